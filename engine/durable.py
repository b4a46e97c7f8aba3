"""Getting what was written onto the disk itself, so that a file that is renamed into place is whole after a loss of power too."""

import fcntl
import os
from pathlib import Path

# macOS alone has it: its fsync leaves data in the drive's own cache, which may write them in any order.
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


def to_disk(handle: int) -> None:
    """Return when what was written to an open file, and whatever was synced before it, is on the disk. Raises OSError."""
    if FULL_SYNC is not None:
        try:
            fcntl.fcntl(handle, FULL_SYNC)
        except OSError:  # not every file system knows it: network folders don't, and some drives
            pass
        else:
            return
    os.fsync(handle)


def sync(path: Path) -> None:
    """Hand a file, or the names in a folder, to the disk: on macOS on their way, elsewhere there. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def path_to_disk(path: Path) -> None:
    """Do what ``to_disk`` does, for a file or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        to_disk(handle)
    finally:
        os.close(handle)

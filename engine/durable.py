"""Getting what was written onto the disk itself, so that a file that is renamed into place is whole after a loss of power too.

And exchanging two names in one step, where the system can.
"""

import ctypes
import errno
import fcntl
import os
import sys
from pathlib import Path

FLUSH_S = 3.0
"""How long closing an engine may take to finish writing what it keeps. Whoever waits for one, or ends its process, waits longer."""

_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
_CANT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""What a kernel, a container's filter or a file system says that can't exchange names."""

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


def exchange(first: Path, second: Path) -> bool:
    """Exchange what two names stand for, in one step: at no moment is either missing. Both are on one file system.

    Returns False, and nothing has changed, where the system or the file system can't. Raises OSError.
    """
    names = os.fsencode(first), os.fsencode(second)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, _RENAME_SWAP)
        else:
            failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    except (AttributeError, OSError):  # a C library without it
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _CANT:
        return False
    raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))


def path_to_disk(path: Path) -> None:
    """Do what ``to_disk`` does, for a file or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        to_disk(handle)
    finally:
        os.close(handle)

"""The file of chats: where it is, that only its user can read it, and how it is moved aside. A folder of its own, mode 0700."""

import datetime
import os
from pathlib import Path

from tokamac.app.store.errors import StoreError, refused
from tokamac.engine.regular_files import check_regular

NAME = "chats.db"
LARGEST_BYTES = 1 << 44
"""SQLite reads what it needs of a file, however large: this is no bound but its own."""
COMPANIONS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file. The log holds what is not yet in the file itself."""


def default_path() -> Path:
    """Return where chats are kept: below ``TOKAMAC_DATA_DIR``, else below the user's data folder."""
    import platformdirs

    given = os.environ.get("TOKAMAC_DATA_DIR")
    return (Path(given) if given else platformdirs.user_data_path("tokamac")) / "chats" / NAME


def prepare(path: Path) -> None:
    """Make the folder and the file, for their user alone, where they are missing, and close them to others where they are not.

    SQLite gives its log and index files the mode of the file, so there is no moment at which another user could read them.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _close_to_others(path.parent, 0o700)
        check_regular([path, *(path.with_name(path.name + tail) for tail in COMPANIONS)], LARGEST_BYTES)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for file in (path, *(path.with_name(path.name + tail) for tail in COMPANIONS)):
            if file.exists():
                _close_to_others(file, 0o600)
    except OSError as problem:
        raise refused(path, problem) from problem


def new_private_file(path: Path) -> None:
    """Make an empty file for its user alone; raise FileExistsError where there is one."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def set_aside(path: Path, now: datetime.datetime) -> Path:
    """Move the file and what belongs to it into a new folder beside it; return the file there. Nothing is removed or replaced."""
    if not path.exists():
        raise StoreError(
            f"There is no {path} to set aside", "Nothing needs to be done: a new one is made when it is opened."
        )
    try:
        folder = _new_folder(path.parent, f"set-aside-{now:%Y%m%d-%H%M%S}")
        for name in [*(path.name + tail for tail in COMPANIONS), path.name]:
            # The log goes before the file: one left behind would be played into the new file.
            if (file := path.with_name(name)).exists():
                file.rename(folder / name)
    except OSError as problem:
        raise refused(path, problem) from problem
    return folder / path.name


def _new_folder(parent: Path, name: str) -> Path:
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return folder


def _close_to_others(path: Path, mode: int) -> None:
    at = path.stat()
    if at.st_uid == os.geteuid() and at.st_mode & 0o077:
        path.chmod(mode)

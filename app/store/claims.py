"""Who is writing a reply: a process holds a locked file for as long as it lives, and the reply carries the file's name.

The system lets go of a lock when its process ends, however it ends. A process number could belong to another program by now, and a
heartbeat stops while a computer sleeps.
"""

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

from tokamac.app.store.errors import refused

_TOKEN = re.compile(r"[0-9a-f]{32}")
_PREFIX = "writer-"


class Claim:
    """A token that is alive until ``release``, or until this process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError where ``folder`` can't be written."""
        self.token = secrets.token_hex(16)
        self._path = _file(folder, self.token)
        unlocked = folder / f".new-{self.token}"
        try:
            self._handle = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                unlocked.rename(self._path)  # it is never seen by its name without its lock
            except OSError:
                os.close(self._handle)
                unlocked.unlink()
                raise
        except OSError as problem:
            raise refused(folder, problem) from problem

    def release(self) -> None:
        """Let go of the token."""
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def is_alive(folder: Path, token: str) -> bool:
    """Return whether the process that made the token still holds it."""
    if not _TOKEN.fullmatch(token):
        return False
    try:
        handle = os.open(_file(folder, token), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as problem:
        raise refused(folder, problem) from problem
    try:
        fcntl.flock(
            handle, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # shared: two who ask at once don't take each other for the writer
    except BlockingIOError:
        return True
    except OSError as problem:
        raise refused(folder, problem) from problem
    finally:
        os.close(handle)
    return False


def tidy(folder: Path) -> None:
    """Remove what processes left that ended without a release."""
    for path in folder.glob(f"{_PREFIX}*"):
        if not is_alive(folder, path.name.removeprefix(_PREFIX)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _file(folder: Path, token: str) -> Path:
    return folder / f"{_PREFIX}{token}"

"""What can go wrong with the store: one class, and two below it: for an id of no chat, and for a file that is broken.

TokamacError
└── StoreError            what failed, and what to do
    ├── NoChatError           no chat has that id
    └── StoreDamagedError     the file is no longer whole: Store.set_aside keeps it and makes room for a new one
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokamac.engine.errors import TokamacError, access_hint


class StoreError(TokamacError):
    """The store of chats can't do what was asked; nothing was changed."""


class NoChatError(StoreError):
    """No chat has the id that was given, nor one that begins so."""


class StoreDamagedError(StoreError):
    """The file of chats is broken: ``Store.repair`` mends its index, and failing that, ``Store.set_aside`` keeps it."""


_ASIDE = "`tokamac chats repair --set-aside` sets the file aside, whole, and a new one is begun."
_FULL = "Free some disk space; what was stored before is safe."
_DENIED = "Check the permissions of the folder, or set TOKAMAC_DATA_DIR to another."
_AGAIN = "Try again; if it stays so, close the other program."
_CAUSES = {
    sqlite3.SQLITE_FULL: ("the disk is full", _FULL),
    sqlite3.SQLITE_IOERR: ("reading or writing it failed", "Check the disk, and the space left on it."),
    sqlite3.SQLITE_READONLY: ("it may not be written", _DENIED),
    sqlite3.SQLITE_CANTOPEN: ("it can't be opened", _DENIED),
    sqlite3.SQLITE_PERM: ("it may not be opened", _DENIED),
    sqlite3.SQLITE_AUTH: ("it may not be opened", _DENIED),
    sqlite3.SQLITE_BUSY: ("another program keeps it busy", _AGAIN),
    sqlite3.SQLITE_LOCKED: ("another program keeps it busy", _AGAIN),
    sqlite3.SQLITE_TOOBIG: ("a text is too large for it", "Send less text at once."),
}


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn what SQLite raises about the file at ``path`` into a StoreError. A mistake of the caller's is let through."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        raise explained(error, path) from error


def explained(error: sqlite3.Error, path: Path) -> StoreError:
    """Return what SQLite's error means for the person whose chats are in ``path``."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # it comes from Python, which could not decode what SQLite read
        return damaged(path, str(error))
    code &= 0xFF  # the upper bits only say more of the same
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    if code in _CAUSES:
        cause, hint = _CAUSES[code]
        return StoreError(f"The chats in {path} can't be used: {cause}", hint)
    return StoreError(f"The chats in {path} can't be used: {error}", "Please report this with the text above.")


def damaged(path: Path, finding: str) -> StoreDamagedError:
    """Return the error for a file that is no longer whole."""
    return StoreDamagedError(
        f"{path} is damaged ({finding})",
        f"`tokamac chats repair` mends its search index; failing that, {_ASIDE}",
    )


def beyond_repair(error: StoreDamagedError) -> StoreDamagedError:
    """Return the error for a file of which more than the search index is broken."""
    return StoreDamagedError(error.message, f"A new search index does not mend that: {_ASIDE}")


def refused(path: Path, problem: OSError) -> StoreError:
    """Return the error for a file or folder that the system does not let us use."""
    hint = _FULL if problem.errno in (errno.ENOSPC, errno.EDQUOT) else access_hint(problem, _DENIED)
    return StoreError(f"The chats in {path} can't be used: {problem.strerror or problem}", hint)

"""The version of the file, and the way to ours. A newer file is never written; an older one is copied first."""

import datetime
import sqlite3
from contextlib import closing
from pathlib import Path

from tokamac.app.store import files
from tokamac.app.store.errors import StoreError, damaged, refused
from tokamac.app.store.schema import APPLICATION_ID, Step


def check_version(connection: sqlite3.Connection, path: Path, known: int) -> int:
    """Return the file's version, 0 for an empty one, inside the caller's transaction.

    Raises StoreError where the file is newer than ``known``, or not ours.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT NOT EXISTS (SELECT 1 FROM sqlite_master)").fetchone()[0]
    if not empty and owner != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program", "Move it away, or set TOKAMAC_DATA_DIR.")
    if version > known:
        raise StoreError(
            f"{path} was written by a newer tokamac (version {version}; this one knows {known})",
            "Update tokamac; the file was left as it is.",
        )
    return version


def migrate(connection: sqlite3.Connection, path: Path, steps: tuple[Step, ...]) -> None:
    """Bring the file to version ``len(steps)``, inside the caller's writing transaction, after copying what it held."""
    version = check_version(connection, path, len(steps))  # another process may have done it while we waited
    if version == len(steps):
        return
    if version > 0:
        back_up(path, version)
    for step in steps[version:]:
        for statement in step:
            connection.execute(statement)
    if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
        raise damaged(path, f"version {version} can't be brought to {len(steps)}: a message belongs to nothing")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(steps)}")


def back_up(path: Path, version: int) -> Path:
    """Copy the file as it is committed, log included, to a new one beside it; return that. The caller keeps writers out."""
    copy = path.with_name(f"{path.stem}.v{version}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}{path.suffix}")
    try:
        files.new_private_file(copy)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except BaseException as problem:
        copy.unlink(missing_ok=True)  # half a copy is none
        if isinstance(problem, OSError):
            raise refused(copy, problem) from problem
        raise
    return copy

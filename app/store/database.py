"""The connection to the file: durable, patient with other processes, and with errors a person can read."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tokamac.app.store import files
from tokamac.app.store.errors import StoreError, damaged, told
from tokamac.app.store.migrate import check_version, migrate
from tokamac.app.store.schema import STEPS, Step
from tokamac.app.store.text import fold

PATIENCE_S = 10.0
"""How long another process may keep the file busy; each of ours takes milliseconds."""
OLDEST_SQLITE = (3, 37, 0)
"""The first with strict tables."""

T = TypeVar("T")


class Database:
    """An open file of chats; use it from the thread that made it. Methods raise StoreError.

    Commits are on the disk when they return (``synchronous = FULL``, and ``fullfsync`` for macOS): what was acknowledged outlives
    a loss of power too.
    read_only: write nothing, so that it may be where nothing can be written.
    """

    def __init__(
        self, path: Path, *, steps: tuple[Step, ...] = STEPS, patience_s: float = PATIENCE_S, read_only: bool = False
    ) -> None:
        _check_library()
        self.path = path
        self._version = len(steps)
        self._patience_s = patience_s
        if not read_only:
            files.prepare(path)
        with told(path):
            self._connection = _to_read(path, patience_s) if read_only else _connected(str(path), patience_s)
        try:
            with told(path):
                (self._set_up_reading if read_only else self._set_up)(steps)
        except BaseException:
            self._connection.close()
            raise

    def _set_up(self, steps: tuple[Step, ...]) -> None:
        connection = self._connection
        # Before anything else, since a file that is not ours, or newer than we are, must not be written.
        version = self._patiently(lambda: self._version_found(len(steps)))
        mode = self._patiently(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        if mode != "wal":
            raise StoreError(
                f"{self.path} is on a file system that can't share it between programs",
                "Set TOKAMAC_DATA_DIR to a folder on a local disk.",
            )
        connection.execute("PRAGMA synchronous = FULL")
        for when in (
            "fullfsync",
            "checkpoint_fullfsync",
        ):  # macOS: past the drive's own cache, commits and merges of the log
            connection.execute(f"PRAGMA {when} = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what is purged leaves no trace in free pages
        connection.execute(f"PRAGMA journal_size_limit = {16 << 20}")
        if version < len(steps):
            with self._transaction():
                migrate(connection, self.path, steps)
        connection.execute("PRAGMA foreign_keys = ON")  # after migrations, which may rebuild tables

    def _set_up_reading(self, steps: tuple[Step, ...]) -> None:
        if (version := self._patiently(lambda: self._version_found(len(steps)))) < len(steps):
            raise StoreError(
                f"{self.path} is of an older tokamac (version {version}), and may not be brought up to date",
                "Copy it to where it may be written, and set TOKAMAC_DATA_DIR.",
            )

    def _version_found(self, known: int) -> int:
        # At one moment: another process that makes the file between two of the questions would look like another program's file.
        self._connection.execute("BEGIN")
        try:
            return check_version(self._connection, self.path, known)
        finally:
            self._roll_back()

    def read(self, sql: str, values: dict[str, Any] | tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Return the rows of one question, as they all were at one moment."""
        with told(self.path):
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Several questions about one and the same moment."""
        with told(self.path):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                self._roll_back()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and alone: what is read in here can't be changed by another process before it is written."""
        with told(self.path), self._transaction() as connection:
            check_version(connection, self.path, self._version)  # another process may have brought the file up to date
            yield connection

    def check(self) -> None:
        """Read the whole file and raise StoreDamagedError if it is not whole. Seconds, for gigabytes."""
        with told(self.path):
            found = [str(row[0]) for row in self._connection.execute("PRAGMA quick_check(3)")]
            if found != ["ok"]:
                raise damaged(self.path, "; ".join(found))
            if self._connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
                raise damaged(self.path, "a message belongs to nothing")

    def merge_log(self) -> None:
        """Write the log into the file and empty it, as far as no other process reads in it."""
        with told(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file. May be called again."""
        with told(self.path):
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # IMMEDIATE takes the right to write at once: a later upgrade could fail halfway, because another process has written.
        self._patiently(lambda: self._connection.execute("BEGIN IMMEDIATE"))
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        finally:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite may have rolled back by itself, on a full disk for one
            self._connection.execute("ROLLBACK")

    def _patiently(self, action: Callable[[], T]) -> T:
        """Do it again while another process is in the way: in some places SQLite says so at once, whatever its time-out."""
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(0.01)


def _check_library() -> None:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(
            f"Python's SQLite is {sqlite3.sqlite_version}, and chats need {needed} or later", "Install a newer Python."
        )


def _connected(name: str, patience_s: float, *, uri: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=patience_s, isolation_level=None, uri=uri)
    connection.row_factory = sqlite3.Row
    connection.create_function("fold", 1, fold, deterministic=True)
    return connection


def _to_read(path: Path, patience_s: float) -> sqlite3.Connection:
    """Return a connection that changes nothing, if all that was committed can be read so."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    connection = _connected(address, patience_s, uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise
        # SQLite wants to share an index of the log beside the file. Without a log there is nothing in it.
        return _connected(f"{address}&immutable=1", patience_s, uri=True)
    return connection

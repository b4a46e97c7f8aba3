"""The file of chats: its tables, its versions, who can read it, and a connection that is durable and patient with others.

The tables are the list of steps that lead to them. A step that has been released is never changed: a new one is added. A newer
file is never written; an older one is copied first. The file lies in a folder of its own that only its user can read.

    chats ──head──▶ messages ──parent──▶ messages        search: an index of the words of every message that is not partial
                        ▲── attachments

That a parent is older than its child makes a ring impossible; that keys hold the chat too keeps every tree within its chat.
"""

import datetime
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tokamac.engine.files import check_regular

from .values import StoreError, damaged, fold, refused, told

Step = tuple[str, ...]
"""SQL statements that lead from one version to the next."""

APPLICATION_ID = 0x546B4D63
"""Says in the file's header that it is ours: "TkMc"."""

_CHATS = """
CREATE TABLE chats (
    id           TEXT PRIMARY KEY,
    title        TEXT NOT NULL,
    title_origin TEXT NOT NULL CHECK (title_origin IN ('words', 'model', 'user')),
    created_at   REAL NOT NULL,
    updated_at   REAL NOT NULL,
    deleted_at   REAL,
    head         INTEGER,
    model        TEXT NOT NULL,
    settings     TEXT NOT NULL CHECK (json_valid(settings)),
    draft        TEXT NOT NULL,
    FOREIGN KEY (id, head) REFERENCES messages (chat, id) DEFERRABLE INITIALLY DEFERRED
) STRICT"""

_MESSAGES = """
CREATE TABLE messages (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    chat       TEXT NOT NULL REFERENCES chats (id) DEFERRABLE INITIALLY DEFERRED,
    parent     INTEGER CHECK (parent < id),
    role       TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    state      TEXT NOT NULL CHECK (state IN ('complete', 'partial', 'stopped', 'failed')),
    owner      TEXT CHECK ((owner IS NOT NULL) = (state = 'partial')),
    created_at REAL NOT NULL,
    model      TEXT NOT NULL,
    settings   TEXT NOT NULL CHECK (json_valid(settings)),
    metrics    TEXT CHECK (metrics IS NULL OR json_valid(metrics)),
    text       TEXT NOT NULL,
    thinking   TEXT NOT NULL,
    UNIQUE (chat, id),
    FOREIGN KEY (chat, parent) REFERENCES messages (chat, id) DEFERRABLE INITIALLY DEFERRED
) STRICT"""

_ATTACHMENTS = """
CREATE TABLE attachments (
    message  INTEGER NOT NULL REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    text     TEXT NOT NULL,
    PRIMARY KEY (message, position)
) STRICT"""

_MESSAGES_BY_PARENT = "CREATE INDEX messages_by_parent ON messages (chat, parent)"
_MESSAGES_BEING_WRITTEN = "CREATE INDEX messages_being_written ON messages (owner) WHERE owner IS NOT NULL"

# A finished text never changes, so its words are indexed once, when it is finished, and not at each checkpoint of a reply.
_SEARCH = (
    "CREATE VIEW finished AS SELECT id, text FROM messages WHERE state <> 'partial'",
    """
CREATE VIRTUAL TABLE search USING fts5 (
    text, content = 'finished', content_rowid = 'id', tokenize = "unicode61 remove_diacritics 2", prefix = '1 2'
)""",
    """
CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END""",
    """
CREATE TRIGGER message_finished AFTER UPDATE ON messages WHEN old.state = 'partial' AND new.state <> 'partial' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.id, new.text);
END""",
    """
CREATE TRIGGER message_removed AFTER DELETE ON messages WHEN old.state <> 'partial' BEGIN
    INSERT INTO search (search, rowid, text) VALUES ('delete', old.id, old.text);
END""",
    """
CREATE TRIGGER finished_stays BEFORE UPDATE ON messages WHEN old.state <> 'partial' BEGIN
    SELECT RAISE(ABORT, 'a finished message is never changed');
END""",
)

EMPTY_INDEX = "REPLACE INTO search_data (id, block) VALUES (1, x''), (10, x'00000000000000')"
"""FTS5's own rows of totals and of structure, as in an index of nothing: with broken ones SQLite opens none, even to mend it."""

_TOOLS: Step = (
    "DROP VIEW finished",
    _MESSAGES.replace("TABLE messages", "TABLE messages_with_tools")
    .replace("'assistant')", "'assistant', 'tool')")
    .replace("    UNIQUE", "    calls      TEXT CHECK (calls IS NULL OR json_valid(calls)),\n    UNIQUE"),
    "INSERT INTO messages_with_tools SELECT *, NULL FROM messages",
    "DELETE FROM sqlite_sequence WHERE name = 'messages_with_tools'",
    "INSERT INTO sqlite_sequence (name, seq) SELECT 'messages_with_tools', seq FROM sqlite_sequence WHERE name = 'messages'",
    "DROP TABLE messages",
    "ALTER TABLE messages_with_tools RENAME TO messages",
    _MESSAGES_BY_PARENT,
    _MESSAGES_BEING_WRITTEN,
    *(statement for statement in _SEARCH if "VIRTUAL" not in statement),
)
"""Messages of the role "tool", and calls. SQLite changes no CHECK, so the table is made anew, with what hangs on it."""

STEPS: tuple[Step, ...] = (
    (
        _CHATS,
        _MESSAGES,
        _ATTACHMENTS,
        "CREATE INDEX chats_by_age ON chats (updated_at)",
        _MESSAGES_BY_PARENT,
        _MESSAGES_BEING_WRITTEN,
        *_SEARCH,
    ),
    _TOOLS,
    (
        "ALTER TABLE chats ADD COLUMN pinned_at REAL",
        "ALTER TABLE chats ADD COLUMN folder TEXT NOT NULL DEFAULT ''",
    ),
)
"""What leads to each version, from 1; the program's version is their number."""


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
        check_regular(files := _files(path), LARGEST_BYTES)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for file in files:
            if file.exists():
                _close_to_others(file, 0o600)
    except OSError as problem:
        raise refused(path, problem) from problem


def _files(path: Path) -> list[Path]:
    """Return what belongs to the file, and it last: a log that is left behind would be played into a new file."""
    return [*(path.with_name(path.name + tail) for tail in COMPANIONS), path]


def set_aside(path: Path, now: datetime.datetime) -> Path:
    """Move the file and what belongs to it into a new folder beside it; return the file there. Nothing is removed or replaced."""
    if not path.exists():
        raise StoreError(
            f"There is no {path} to set aside", "Nothing needs to be done: a new one is made when it is opened."
        )
    try:
        folder = _new_folder(path.parent, f"set-aside-{now:%Y%m%d-%H%M%S}")
        for file in _files(path):
            if file.exists():
                file.rename(folder / file.name)
    except OSError as problem:
        raise refused(path, problem) from problem
    return folder / path.name


def _new_folder(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    return folder


def _close_to_others(path: Path, mode: int) -> None:
    at = path.stat()
    if at.st_uid == os.geteuid() and at.st_mode & 0o077:
        path.chmod(mode)


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
        os.close(os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except BaseException as problem:
        copy.unlink(missing_ok=True)  # half a copy is none
        if isinstance(problem, OSError):
            raise refused(copy, problem) from problem
        raise
    return copy


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
            prepare(path)
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
        for when in ("fullfsync", "checkpoint_fullfsync"):  # macOS: past the drive's own cache, commits and merges
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

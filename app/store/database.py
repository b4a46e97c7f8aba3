"""The chat database: schema, migrations, permissions, and a durable connection with retries."""

# The schema is the list of migrations. A released step never changes. A newer file is never written; an older
# one is backed up first. The file is in a folder that only its user can read.
#
#     chats ──head──▶ messages ──parent──▶ messages        search: index of the words of all finished messages
#                         ▲── attachments               file_search: names and words of attachments
#
# vectors: what an embedding model made of passages (passages.py), by their hash. writes: of tools, below the message
# that they followed, with the file as it was; noted before the file changes.
#
# Parents are older than children, so there are no cycles; keys include the chat, so trees don't cross chats.
#
# Only SQLite may open an existing file: closing any descriptor drops all of the process's locks on it, SQLite's
# too (https://sqlite.org/howtocorrupt.html, 2.2), and another program would then delete the log.

import datetime
import errno
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from tokamac.engine.files import HELD, FileId, check_regular, exists, file_id, is_dir

from .values import StoreError, StoreReplacedError, damaged, explained, fold, refused

Step = tuple[str, ...]  # SQL statements that lead from one version to the next

APPLICATION_ID = 0x546B4D63  # says in the file's header that it is ours: "TkMc"

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

# FTS5's own rows of totals and of structure, as in an index of nothing: with broken ones SQLite opens none, even to
# mend it.
EMPTY_INDEX = "REPLACE INTO {}_data (id, block) VALUES (1, x''), (10, x'00000000000000')"
INDEXES = ("search", "file_search")

# A row of ``attachments`` has no number that stays, so the index numbers it by its message and position.
_FILE = "({0}message << 20 | {0}position)"
_FILE_WORDS = "{0}name, CASE {0}kind WHEN 'picture' THEN '' ELSE {0}text END"
_FILES: Step = (
    f"CREATE INDEX attachments_by_number ON attachments ({_FILE.format('')})",
    f"CREATE VIEW attached (id, name, text) AS SELECT {_FILE.format('')}, {_FILE_WORDS.format('')} FROM attachments",
    """
CREATE VIRTUAL TABLE file_search USING fts5 (
    name, text, content = 'attached', content_rowid = 'id', tokenize = "unicode61 remove_diacritics 2", prefix = '1 2'
)""",
    f"""
CREATE TRIGGER file_added AFTER INSERT ON attachments BEGIN
    INSERT INTO file_search (rowid, name, text) VALUES ({_FILE.format("new.")}, {_FILE_WORDS.format("new.")});
END""",
    f"""
CREATE TRIGGER file_removed AFTER DELETE ON attachments BEGIN
    INSERT INTO file_search (file_search, rowid, name, text)
    VALUES ('delete', {_FILE.format("old.")}, {_FILE_WORDS.format("old.")});
END""",
    "INSERT INTO file_search (file_search) VALUES ('rebuild')",
    "CREATE TABLE vectors (hash BLOB, model TEXT, vector BLOB NOT NULL, PRIMARY KEY (hash, model)) STRICT, WITHOUT ROWID",
)

# Messages of the role "tool", and calls. SQLite changes no CHECK, so the table is made anew, with what hangs on it.
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

# Paths are bytes: a name need not be text.
_WRITES: Step = (
    """
CREATE TABLE writes (
    id      INTEGER PRIMARY KEY,
    message INTEGER NOT NULL REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
    path    BLOB NOT NULL,
    root    BLOB NOT NULL,
    mode    INTEGER,
    before  BLOB,
    after   BLOB NOT NULL
) STRICT""",
    "CREATE INDEX writes_by_message ON writes (message)",
)

# What leads to each version, from 1; the program's version is their number.
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
    ("ALTER TABLE chats ADD COLUMN pinned_at REAL", "ALTER TABLE chats ADD COLUMN folder TEXT NOT NULL DEFAULT ''"),
    _FILES,
    _WRITES,
)


NAME = "chats.db"
LARGEST_BYTES = 1 << 44  # SQLite reads what it needs of a file, however large: this is no bound but its own
# What SQLite keeps beside a file. The log holds what is not yet in the file itself.
COMPANIONS = ("-wal", "-shm", "-journal")


def default_path() -> Path:
    import platformdirs

    given = os.environ.get("TOKAMAC_DATA_DIR")
    return (Path(given) if given else platformdirs.user_data_path("tokamac")) / "chats" / NAME


def prepare(path: Path) -> None:
    """Create the folder and file for this user alone, or restrict their permissions."""
    # SQLite gives its log and index files the mode of the file: no other user can read them at any moment.
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _close_to_others(path.parent, 0o700)
        check_regular(files := _files(path), LARGEST_BYTES)
        if not exists(path):
            with suppress(FileExistsError):  # O_EXCL: one that is there by now, and may be in use, is not opened
                os.close(os.open(files[-1], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if is_dir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.R_OK | os.W_OK):
            code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code))
        for file in files:
            with suppress(FileNotFoundError):
                _close_to_others(file, 0o600)
    except OSError as problem:
        raise refused(path, problem) from problem


def _files(path: Path) -> list[Path]:
    """Return the database's files, the main one last: a log left behind would be replayed into a new file."""
    place = _place(path)
    return [*(place.with_name(place.name + tail) for tail in COMPANIONS), place]


def _place(path: Path) -> Path:
    return Path(os.path.realpath(path))


def set_aside(path: Path, now: datetime.datetime) -> Path:
    """Move the database's files into a new folder next to it; return the new path. Replaces nothing."""
    if not path.exists():
        raise StoreError(
            f"There is no {path} to set aside", "Nothing needs to be done: a new one is made when it is opened."
        )
    try:
        files = _files(path)
        folder = _new_folder(files[-1].parent, f"set-aside-{now:%Y%m%d-%H%M%S}")
        for file in files:
            if file.exists():
                file.rename(folder / file.name)
    except OSError as problem:
        raise refused(path, problem) from problem
    return folder / files[-1].name


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
    """Return the file's version (0: empty), in the caller's transaction. Raises StoreError if newer or not ours."""
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
    """Migrate to version ``len(steps)`` after a backup, in the caller's write transaction."""
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


def vet(path: Path) -> None:
    """Check a foreign file: intact, ours, and reading its tables runs nothing of it. Raises StoreError."""
    names = "('chats', 'messages', 'attachments')"
    plain = f"SELECT count(*) FROM sqlite_master WHERE name IN {names} AND type = 'table' AND sql LIKE 'CREATE TABLE%'"
    computed = f"SELECT 1 FROM sqlite_master m, pragma_table_xinfo(m.name) c WHERE m.name IN {names} AND c.hidden"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            check_version(connection, path, len(STEPS))
            if connection.execute(plain).fetchone() != (3,) or connection.execute(computed).fetchone():
                raise damaged(path, "its tables are others")
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise damaged(path, found)
    except sqlite3.Error as error:
        raise explained(error, path) from error


def back_up(path: Path, version: int) -> Path:
    """Copy the committed file, log included; return the copy. The caller keeps writers out."""
    copy = path.with_name(f"{path.stem}.v{version}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}{path.suffix}")
    with _new_copy(copy) as target, closing(sqlite3.connect(path)) as source:
        source.backup(target)
    return copy


@contextmanager
def _new_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a new file for a copy, removed on failure. Raises StoreError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as problem:
        raise refused(path, problem) from problem
    try:
        with closing(sqlite3.connect(path)) as target:
            yield target
    except BaseException:
        path.unlink(missing_ok=True)  # half a copy is none
        raise


_SHARE = (  # takes the lock that every reader of SQLite has: https://sqlite.org/src/file?name=src/os_unix.c, SHARED_FIRST
    "import fcntl, os, sys; handle = os.open(sys.argv[1], os.O_RDONLY);"
    "fcntl.lockf(handle, fcntl.LOCK_SH, 510, 0x40000002); print(flush=True); sys.stdin.read()"
)


@contextmanager
def _shared_elsewhere(path: Path) -> Iterator[None]:
    # The last one to close would write a log into the file that is no longer its log. Python has a switch for that
    # from 3.12 on; until then another process holds the file open for reading.
    command = (sys.executable, "-I", "-S", "-c", _SHARE, str(path))
    try:
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as problem:
        raise refused(path, problem) from problem
    with reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield


PATIENCE_S = 10.0  # how long another process may keep the file busy; each of ours takes milliseconds
OLDEST_SQLITE = (3, 37, 0)  # the first with strict tables

T = TypeVar("T")


# Every connection of this process. They share SQLite's index of a log, so one to a new log has to wait for those to an old one.
_OPEN: "weakref.WeakSet[Database]" = weakref.WeakSet()
_DOOR = threading.Condition()


class Database:
    """An open chat database, for the thread that made it. Methods raise StoreError.

    Commits are durable (``synchronous = FULL``, ``fullfsync`` on macOS), power loss included. Raises
    StoreReplacedError, and writes nothing, if another program replaced the file or its log.
    """

    def __init__(
        self, path: Path, *, steps: tuple[Step, ...] = STEPS, patience_s: float = PATIENCE_S, read_only: bool = False
    ) -> None:
        _check_library()
        self.path = path
        self._place = _place(path)
        self._version = len(steps)
        self._patience_s = patience_s
        self._files: tuple[FileId | None, ...] = ()
        with _DOOR:
            if any(each.is_replaced() for each in self._others()):
                raise StoreReplacedError.replaced(path)
            if not read_only:
                prepare(path)
            with self._explaining():
                self._connection = _to_read(path, patience_s) if read_only else _connected(str(path), patience_s)
            _OPEN.add(self)
        self._let_go = weakref.finalize(self, HELD.pop, id(self), None)
        try:
            with self._explaining():
                (self._set_up_reading if read_only else self._set_up)(steps)
            HELD[id(self)] = frozenset(filter(None, map(file_id, _files(path))))
            if not read_only:
                self._files = self._there()
        except BaseException:
            self.close()
            raise

    def _others(self) -> "list[Database]":
        return [each for each in _OPEN if each is not self and each._place == self._place]

    def _there(self) -> tuple[FileId | None, ...]:
        return file_id(self._place), file_id(self._place.with_name(f"{self._place.name}-wal"))

    def is_replaced(self) -> bool:
        """Whether another program replaced or removed the file or its log. Thread-safe; microseconds."""
        return bool(self._files) and self._there() != self._files

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
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # SQLite makes the log when it first reads

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
        with self._explaining():
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def reading(self, *, replaced: bool = False) -> Iterator[sqlite3.Connection]:
        """Run several queries on one snapshot. replaced: read the opened file even if it was replaced."""
        with self._explaining(replaced=replaced):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                self._roll_back()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """An exclusive write transaction: no other process changes what is read in it."""
        with self._explaining(), self._transaction() as connection:
            check_version(connection, self.path, self._version)  # another process may have brought the file up to date
            yield connection

    def check(self) -> None:
        with self._explaining():
            found = [str(row[0]) for row in self._connection.execute("PRAGMA quick_check(3)")]
            if found != ["ok"]:
                raise damaged(self.path, "; ".join(found))
            if self._connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
                raise damaged(self.path, "a message belongs to nothing")

    def changes(self) -> int:
        return int(self.read("PRAGMA data_version")[0][0])

    def copy_to(self, path: Path) -> None:
        with _new_copy(path) as copy, self._explaining():
            try:
                self._connection.backup(copy)
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise explained(error, path) from error
                raise

    def merge_log(self) -> None:
        with self._explaining():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self, *, alone: bool = False) -> None:
        """Close, repeatably. alone: return once no other connection of this process is open to the file."""
        with _DOOR, self._explaining(replaced=True):
            if self in _OPEN:
                # Of a file that is not at its place any more, SQLite itself writes no log back.
                replaced = self.is_replaced()
                beside = replaced and self._there()[0] == self._files[0]
                with _shared_elsewhere(self._place) if beside else nullcontext():
                    self._connection.close()
                if not replaced:
                    self._files = ()  # what becomes of it from now on is nothing to this one
                self._let_go()
                _OPEN.discard(self)
                _DOOR.notify_all()
            if alone and not _DOOR.wait_for(lambda: not self._others(), self._patience_s):
                raise StoreError(f"The chats in {self.path} are in use", "Try again.")

    @contextmanager
    def _explaining(self, *, replaced: bool = False) -> Iterator[None]:
        """Convert SQLite's errors to StoreError, except programming errors. replaced: allow a replaced file."""
        if not replaced and self.is_replaced():
            raise StoreReplacedError.replaced(self.path)
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            if not replaced and self.is_replaced():
                raise StoreReplacedError.replaced(self.path) from error
            raise explained(error, self.path) from error

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
        # In some places SQLite reports busy immediately, whatever its time-out.
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

"""Messages and chats as rows: read, and added. Every function works inside the transaction that its caller has begun.

Also who is writing a reply: a process holds a locked file for as long as it lives, and the reply carries the file's name. The
system lets go of a lock when its process ends, however it ends. A process number could belong to another program by now, and a
heartbeat stops while a computer sleeps.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tokamac.engine.errors import OptionError
from tokamac.engine.events import ToolCall

from ..strict_json import ShapeError, build
from .values import (
    LEFT_OUT,
    Archive,
    Attachment,
    Json,
    StoredChat,
    StoredMessage,
    StoreError,
    left_out_of,
    one_line,
    refused,
    storable,
    title_of,
)

ID_CHARS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 8

_BESIDE = "FROM messages s WHERE s.chat = m.chat AND s.parent IS m.parent"
_SELECT = (
    f"SELECT m.*, (SELECT count(*) {_BESIDE} AND s.id < m.id) AS position, (SELECT count(*) {_BESIDE}) AS siblings"
)
_UP = """
WITH RECURSIVE up (id, parent, depth) AS (
    SELECT id, parent, 0 FROM messages WHERE id = ?
    UNION ALL SELECT m.id, m.parent, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent
)"""


def chat_of(row: sqlite3.Row) -> StoredChat:
    """Return a row of the table as a value."""
    return StoredChat(**{**dict(row), "settings": json.loads(row["settings"])})


def as_json(value: Json) -> str:
    """Return an object as it is stored. Raises StoreError for what JSON can't hold."""
    try:
        return json.dumps(dict(value), allow_nan=False)  # ASCII: halves of surrogate pairs too
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"Settings or metrics can't be stored: {error}", "Use numbers, texts, lists and tables."
        ) from None


def chat(connection: sqlite3.Connection, name: str) -> StoredChat:
    """Return the chat of exactly this id. Raises StoreError."""
    row = connection.execute("SELECT * FROM chats WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise StoreError(f"There is no chat {name!r:.20}", "It may have been purged, here or in another window.")
    return chat_of(row)


def update_chat(connection: sqlite3.Connection, name: str, **columns: Any) -> StoredChat:
    """Set columns of a chat and return it. Raises StoreError where there is none."""
    names = ", ".join(f"{column} = :{column}" for column in columns)
    connection.execute(f"UPDATE chats SET {names} WHERE id = :id", {**columns, "id": name})
    return chat(connection, name)


def add_chat(connection: sqlite3.Connection, draft: StoredChat) -> StoredChat:
    """Add a chat under an id of its own, whatever its ``id``, and without its head; return it as it is."""
    while True:
        name = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
        if not connection.execute("SELECT 1 FROM chats WHERE id = ?", (name,)).fetchone():
            break
    _insert(
        connection, "chats", id=name, title=one_line(storable(draft.title)), title_origin=draft.title_origin,
        created_at=draft.created_at, updated_at=draft.updated_at, model=storable(draft.model),
        settings=as_json(draft.settings), draft=storable(draft.draft), folder=one_line(storable(draft.folder)),
    )  # fmt: skip
    return chat(connection, name)


def message(connection: sqlite3.Connection, name: int) -> StoredMessage:
    """Return one message. Raises StoreError."""
    found = select(connection, "FROM messages m WHERE m.id = ?", name)
    if not found:
        raise StoreError(f"There is no message {name}", "Its chat may have been purged, here or in another window.")
    return found[0]


def path(connection: sqlite3.Connection, head: int) -> list[StoredMessage]:
    """Return the messages that lead to ``head``, from the first one to it."""
    return select(connection, "FROM up JOIN messages m ON m.id = up.id ORDER BY up.depth DESC", head, before=_UP)


def select(connection: sqlite3.Connection, source: str, *values: Any, before: str = "") -> list[StoredMessage]:
    """Return messages ``m`` of a source in SQL, each with its place among its siblings and its attachments."""
    rows = connection.execute(f"{before} {_SELECT} {source}", values).fetchall()
    attached = _attachments(connection, [row["id"] for row in rows])
    return [_message_of(row, attached.get(row["id"], ())) for row in rows]


def require_within(connection: sqlite3.Connection, name: str, message_id: int) -> None:
    """Raise StoreError unless the message is one of the chat's."""
    if connection.execute("SELECT 1 FROM messages WHERE chat = ? AND id = ?", (name, message_id)).fetchone() is None:
        raise StoreError(f"Chat {name} has no message {message_id}", "Open the chat again.")


def add(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> StoredMessage:
    """Add a message where it says, and let the chat stand at it; one that was deleted is back: what is said now must not be lost.

    owner: the claim of the process that writes it, if partial. Raises StoreError for a chat or parent that is not there.
    """
    chat(connection, draft.chat)
    if draft.parent is not None:
        require_within(connection, draft.chat, draft.parent)
    made = _add(connection, draft, owner=owner)
    at = update_chat(connection, draft.chat, head=made, updated_at=draft.created_at, deleted_at=None)
    if draft.role == "user" and draft.text and not at.title:
        update_chat(connection, draft.chat, title=title_of(storable(draft.text)), title_origin="words")
    return message(connection, made)


def adopt(connection: sqlite3.Connection, archive: Archive) -> StoredChat:
    """Add a whole chat under a new id and its messages under new ids; what was partial is stopped. Raises StoreError."""
    name = add_chat(connection, archive.chat).id
    made: dict[int | None, int | None] = {None: None}
    for each in archive.messages:
        if each.parent not in made:
            raise StoreError(f"Message {each.id} continues message {each.parent}, which does not come before it")
        state = "stopped" if each.state == "partial" else each.state
        made[each.id] = _add(connection, replace(each, chat=name, parent=made[each.parent], state=state))
    if archive.chat.head not in made:
        raise StoreError(f"The chat stands at message {archive.chat.head}, which is not in it")
    settings = dict(archive.chat.settings)
    if settings.pop(LEFT_OUT, None) is not None:
        moved = sorted((made[key], file) for key, file in left_out_of(archive.chat.settings) if key in made)
        settings |= {LEFT_OUT: moved} if moved else {}
    return update_chat(connection, name, head=made[archive.chat.head], settings=as_json(settings))


def _add(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> int:
    """Add a message, whatever its ``id`` and place; return its id."""
    made = _insert(
        connection, "messages", chat=draft.chat, parent=draft.parent, role=draft.role, state=draft.state, owner=owner,
        created_at=draft.created_at, model=storable(draft.model), settings=as_json(draft.settings),
        metrics=None if draft.metrics is None else as_json(draft.metrics), text=storable(draft.text),
        thinking=storable(draft.thinking), calls=calls_as_json(draft.calls),
    )  # fmt: skip
    for position, each in enumerate(draft.attachments):
        texts = {"kind": storable(each.kind), "name": storable(each.name), "text": storable(each.text)}
        _insert(connection, "attachments", message=made, position=position, **texts)
    return made


def _insert(connection: sqlite3.Connection, table: str, **columns: Any) -> int:
    """Add a row and return its number."""
    names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    return int(connection.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", columns).lastrowid or 0)


def _attachments(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[Attachment, ...]]:
    """Return the attachments of these messages, by message."""
    found: dict[int, tuple[Attachment, ...]] = {}
    wanted = "SELECT * FROM attachments WHERE message IN (SELECT value FROM json_each(?)) ORDER BY message, position"
    for row in connection.execute(wanted, (json.dumps(ids),)):
        attachment = Attachment(row["name"], row["text"], row["kind"])
        found[row["message"]] = (*found.get(row["message"], ()), attachment)
    return found


def _message_of(row: sqlite3.Row, attachments: tuple[Attachment, ...]) -> StoredMessage:
    values: Mapping[str, Any] = {
        **{each.name: row[each.name] for each in fields(StoredMessage) if each.name != "attachments"},
        "calls": _calls_of(row["calls"]),
        "settings": json.loads(row["settings"]),
        "metrics": None if row["metrics"] is None else json.loads(row["metrics"]),
    }
    return StoredMessage(**values, attachments=attachments)


def calls_as_json(calls: Sequence[ToolCall]) -> str | None:
    """Return calls as they are stored; None where there is none."""
    return json.dumps([asdict(each) for each in calls]) if calls else None


def _calls_of(stored: str | None) -> tuple[ToolCall, ...]:
    """Return stored calls. What another version wrote and this one can't read becomes a call that could not be read."""
    if stored is None:
        return ()
    try:
        read: tuple[ToolCall, ...] = build(tuple[ToolCall, ...], json.loads(stored), "calls")
    except (ShapeError, OptionError, ValueError):
        return (ToolCall("", stored, problem="it was written by another version"),)
    return read


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
        # Shared: two who ask at once don't take each other for the writer.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
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

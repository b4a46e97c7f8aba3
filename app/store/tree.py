"""Reading the tree of messages."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from tokamac.app.store.errors import StoreError
from tokamac.app.store.text import one_line
from tokamac.app.store.values import Attachment, Branch, Message

PREVIEW_CHARS = 80

_BESIDE = "FROM messages s WHERE s.chat = m.chat AND s.parent IS m.parent"
_SELECT = (
    f"SELECT m.*, (SELECT count(*) {_BESIDE} AND s.id < m.id) AS position, (SELECT count(*) {_BESIDE}) AS siblings"
)
_UP = """
WITH RECURSIVE up (id, parent, depth) AS (
    SELECT id, parent, 0 FROM messages WHERE id = ?
    UNION ALL SELECT m.id, m.parent, up.depth + 1 FROM up JOIN messages m ON m.id = up.parent
)"""
_DOWN = """
WITH RECURSIVE down (id) AS (
    SELECT ? UNION ALL SELECT m.id FROM down JOIN messages m ON m.chat = ? AND m.parent = down.id
)"""


def message(connection: sqlite3.Connection, name: int) -> Message:
    """Return one message. Raises StoreError."""
    found = _messages(connection, f"{_SELECT} FROM messages m WHERE m.id = ?", name)
    if not found:
        raise StoreError(f"There is no message {name}", "Its chat may have been purged, here or in another window.")
    return found[0]


def path(connection: sqlite3.Connection, head: int) -> list[Message]:
    """Return the messages that lead to ``head``, from the first one to it."""
    return _messages(
        connection, f"{_UP} {_SELECT} FROM up JOIN messages m ON m.id = up.id ORDER BY up.depth DESC", head
    )


def siblings(connection: sqlite3.Connection, name: int) -> list[Message]:
    """Return the messages with the same parent, and this one among them, oldest first."""
    at = message(connection, name)
    where = "WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id"
    return _messages(connection, f"{_SELECT} FROM messages m {where}", at.chat, at.parent)


def children(connection: sqlite3.Connection, chat: str, parent: int | None) -> list[Message]:
    """Return what continues a message, or with None, what a chat begins with; oldest first."""
    return _messages(
        connection, f"{_SELECT} FROM messages m WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id", chat, parent
    )


def all_of(connection: sqlite3.Connection, chat: str) -> list[Message]:
    """Return every message of a chat, parents first."""
    return _messages(connection, f"{_SELECT} FROM messages m WHERE m.chat = ? ORDER BY m.id", chat)


def branches(connection: sqlite3.Connection, chat: str) -> list[Branch]:
    """Return every message of a chat without its text, parents first."""
    rows = connection.execute(
        "SELECT id, parent, role, state, created_at, substr(text, 1, ?) AS beginning,"
        " (SELECT count(*) FROM messages c WHERE c.chat = m.chat AND c.parent = m.id) AS children"
        " FROM messages m WHERE chat = ? ORDER BY id",
        (4 * PREVIEW_CHARS, chat),
    )
    return [
        Branch(
            id=row["id"],
            parent=row["parent"],
            role=row["role"],
            state=row["state"],
            preview=one_line(row["beginning"])[:PREVIEW_CHARS],
            created_at=row["created_at"],
            children=row["children"],
        )
        for row in rows
    ]


def tip(connection: sqlite3.Connection, name: int) -> int:
    """Return the newest message at or below this one. It ends its branch, since children are newer than their parents."""
    chat = message(connection, name).chat
    return int(connection.execute(f"{_DOWN} SELECT max(id) FROM down", (name, chat)).fetchone()[0])


def history(connection: sqlite3.Connection, limit: int, chat: str | None) -> list[str]:
    """Return what the user sent, newest first, each text once; with ``chat``, in that chat."""
    where = "" if chat is None else "AND m.chat = :chat"
    rows = connection.execute(
        "SELECT m.text FROM messages m JOIN chats c ON c.id = m.chat"
        f" WHERE m.role = 'user' AND m.text <> '' AND c.deleted_at IS NULL {where} ORDER BY m.id DESC",
        {"chat": chat},
    )
    return _first_unique((row["text"] for row in rows), limit)


def _first_unique(texts: Iterable[str], limit: int) -> list[str]:
    found: dict[str, None] = {}
    for text in texts:
        if len(found) >= limit:
            break
        found.setdefault(text)
    return list(found)


def require_within(connection: sqlite3.Connection, chat: str, name: int) -> None:
    """Raise StoreError unless the message is one of the chat's."""
    if connection.execute("SELECT 1 FROM messages WHERE chat = ? AND id = ?", (chat, name)).fetchone() is None:
        raise StoreError(f"Chat {chat} has no message {name}", "Open the chat again.")


def _messages(connection: sqlite3.Connection, sql: str, *values: Any) -> list[Message]:
    rows = connection.execute(sql, values).fetchall()
    attached = _attachments(connection, [row["id"] for row in rows])
    return [_message_of(row, attached.get(row["id"], ())) for row in rows]


def _attachments(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[Attachment, ...]]:
    """Return the attachments of these messages, by message."""
    found: dict[int, tuple[Attachment, ...]] = {}
    wanted = "SELECT value FROM json_each(?)"
    for row in connection.execute(
        f"SELECT * FROM attachments WHERE message IN ({wanted}) ORDER BY message, position", (json.dumps(ids),)
    ):
        attachment = Attachment(row["name"], row["text"], row["kind"])
        found[row["message"]] = (*found.get(row["message"], ()), attachment)
    return found


def _message_of(row: sqlite3.Row, attachments: tuple[Attachment, ...]) -> Message:
    return Message(
        id=row["id"],
        chat=row["chat"],
        parent=row["parent"],
        role=row["role"],
        text=row["text"],
        thinking=row["thinking"],
        state=row["state"],
        created_at=row["created_at"],
        model=row["model"],
        settings=json.loads(row["settings"]),
        metrics=None if row["metrics"] is None else json.loads(row["metrics"]),
        attachments=attachments,
        position=row["position"],
        siblings=row["siblings"],
    )

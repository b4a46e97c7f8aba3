"""Chats in SQL. Every function works inside the transaction that its caller has begun, or reads one moment."""

import json
import re
import secrets
import sqlite3
from collections.abc import Mapping
from typing import Any

from tokamac.app.store.errors import NoChatError, StoreError
from tokamac.app.store.text import fold, one_line, storable, title_of
from tokamac.app.store.values import Chat, Json, TitleOrigin

ID_CHARS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 8
_ID = re.compile(f"[{ID_CHARS}]{{1,{ID_LENGTH}}}")
_HOLDS_SOMETHING = "(head IS NOT NULL OR draft <> '')"


def chat_of(row: sqlite3.Row) -> Chat:
    """Return a row of the table as a value."""
    return Chat(
        id=row["id"],
        title=row["title"],
        title_origin=row["title_origin"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        model=row["model"],
        settings=json.loads(row["settings"]),
        draft=row["draft"],
        head=row["head"],
        deleted_at=row["deleted_at"],
    )


def as_json(value: Json) -> str:
    """Return an object as it is stored. Raises StoreError for what JSON can't hold."""
    try:
        return json.dumps(dict(value), allow_nan=False)  # ASCII: halves of surrogate pairs too
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"Settings or metrics can't be stored: {error}", "Use numbers, texts, lists and tables."
        ) from None


def insert(connection: sqlite3.Connection, chat: Chat) -> Chat:
    """Add a chat under an id of its own, whatever its ``id``, and without its head; return it as it is."""
    while True:
        name = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
        if not connection.execute("SELECT 1 FROM chats WHERE id = ?", (name,)).fetchone():
            break
    connection.execute(
        "INSERT INTO chats (id, title, title_origin, created_at, updated_at, deleted_at, model, settings, draft)"
        " VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?)",
        (
            name,
            one_line(storable(chat.title)),
            chat.title_origin,
            chat.created_at,
            chat.updated_at,
            storable(chat.model),
            as_json(chat.settings),
            storable(chat.draft),
        ),
    )
    return get(connection, name)


def get(connection: sqlite3.Connection, name: str) -> Chat:
    """Return the chat of exactly this id. Raises StoreError."""
    row = connection.execute("SELECT * FROM chats WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise StoreError(f"There is no chat {name!r:.20}", "It may have been purged, here or in another window.")
    return chat_of(row)


def find(connection: sqlite3.Connection, name: str) -> Chat:
    """Return the chat whose id is, or is the only one that begins with, ``name``. Raises StoreError."""
    begin = name.strip().lower()
    if not _ID.fullmatch(begin):
        raise StoreError(
            f"{name!r:.40} is no id of a chat", f"An id has {ID_LENGTH} letters and digits, such as k3v7q2ab."
        )
    rows = connection.execute(
        "SELECT * FROM chats WHERE id BETWEEN ? AND ? ORDER BY updated_at DESC LIMIT 4", (begin, begin + "{")
    ).fetchall()
    if not rows:
        raise NoChatError(f"No chat has an id that begins with {begin}", "The list of chats shows their ids.")
    if len(rows) > 1:
        some = ", ".join(row["id"] for row in rows[:3]) + (" …" if len(rows) > 3 else "")
        raise StoreError(f"Several chats have an id that begins with {begin}: {some}", "Give more of it.")
    return chat_of(rows[0])


def listed(connection: sqlite3.Connection, words: str, limit: int, offset: int, *, deleted: bool) -> list[Chat]:
    """Return chats, last used first, whose titles hold all the ``words``; those without message and draft are left out."""
    where = ["deleted_at IS NOT NULL" if deleted else "deleted_at IS NULL", _HOLDS_SOMETHING]
    wanted = fold(storable(words)).split()
    where += ["instr(fold(title), ?) > 0"] * len(wanted)
    rows = connection.execute(
        f"SELECT * FROM chats WHERE {' AND '.join(where)} ORDER BY updated_at DESC, id LIMIT ? OFFSET ?",
        (*wanted, limit, offset),
    )
    return [chat_of(row) for row in rows]


def last_deleted(connection: sqlite3.Connection) -> Chat | None:
    """Return the chat that was deleted last, of those that hold something; None where there is none."""
    row = connection.execute(
        f"SELECT * FROM chats WHERE deleted_at IS NOT NULL AND {_HOLDS_SOMETHING} ORDER BY deleted_at DESC, id LIMIT 1"
    ).fetchone()
    return None if row is None else chat_of(row)


def update(connection: sqlite3.Connection, name: str, **columns: Any) -> Chat:
    """Set columns of a chat and return it. Raises StoreError where there is none."""
    names = ", ".join(f"{column} = :{column}" for column in columns)
    connection.execute(f"UPDATE chats SET {names} WHERE id = :id", {**columns, "id": name})
    return get(connection, name)


def rename(connection: sqlite3.Connection, name: str, title: str, origin: TitleOrigin) -> Chat:
    """Give a chat a title, unless the user gave it one and ``origin`` is anybody else."""
    line = one_line(storable(title))
    if not line:
        raise StoreError("A title can't be empty", "Give it a word.")
    chat = get(connection, name)
    if chat.title_origin == "user" and origin != "user":
        return chat
    return update(connection, name, title=line, title_origin=origin)


def change_settings(connection: sqlite3.Connection, name: str, changes: Mapping[str, Any]) -> Chat:
    """Change the given keys and leave the others; None takes a key away."""
    settings = {**get(connection, name).settings, **changes}
    return update(connection, name, settings=as_json({k: v for k, v in settings.items() if v is not None}))


def touch(connection: sqlite3.Connection, name: str, head: int, now: float, words: str) -> None:
    """Note that a message came: the chat stands at it, is not deleted, and is titled by its first ``words`` if by nothing else."""
    connection.execute("UPDATE chats SET head = ?, updated_at = ?, deleted_at = NULL WHERE id = ?", (head, now, name))
    if words:
        connection.execute(
            "UPDATE chats SET title = ?, title_origin = 'words' WHERE id = ? AND title = ''",
            (title_of(storable(words)), name),
        )


def purge(connection: sqlite3.Connection, before: float) -> int:
    """Remove for ever what was deleted, and last used, before that moment, and where no reply is written; return how many chats."""
    old = "SELECT id FROM chats WHERE max(deleted_at, updated_at) < ?"
    old += " AND NOT EXISTS (SELECT 1 FROM messages WHERE chat = chats.id AND state = 'partial')"
    names = [row["id"] for row in connection.execute(old, (before,))]
    for name in names:
        mine = "SELECT id FROM messages WHERE chat = ?"
        connection.execute(f"DELETE FROM attachments WHERE message IN ({mine})", (name,))
        connection.execute("DELETE FROM messages WHERE chat = ?", (name,))
        connection.execute("DELETE FROM chats WHERE id = ?", (name,))
    return len(names)

"""Writing messages: added whole, or as a reply that grows until it is finished. Always inside the caller's transaction.

Reading the tree of messages.

Chats in SQL. Every function works inside the transaction that its caller has begun, or reads one moment.

Who is writing a reply: a process holds a locked file for as long as it lives, and the reply carries the file's name.

The system lets go of a lock when its process ends, however it ends. A process number could belong to another program by now, and a
heartbeat stops while a computer sleeps.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokamac.app.store.values import (
    Archive,
    Attachment,
    BranchPreview,
    FinalState,
    Json,
    NoChatError,
    StoredChat,
    StoredMessage,
    StoreError,
    TitleOrigin,
    fold,
    one_line,
    refused,
    storable,
    title_of,
)

ID_CHARS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 8
_ID = re.compile(f"[{ID_CHARS}]{{1,{ID_LENGTH}}}")
_HOLDS_SOMETHING = "(head IS NOT NULL OR draft <> '')"


def chat_of(row: sqlite3.Row) -> StoredChat:
    """Return a row of the table as a value."""
    return StoredChat(
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


def insert_chat(connection: sqlite3.Connection, chat: StoredChat) -> StoredChat:
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


def get(connection: sqlite3.Connection, name: str) -> StoredChat:
    """Return the chat of exactly this id. Raises StoreError."""
    row = connection.execute("SELECT * FROM chats WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise StoreError(f"There is no chat {name!r:.20}", "It may have been purged, here or in another window.")
    return chat_of(row)


def find(connection: sqlite3.Connection, name: str) -> StoredChat:
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


def listed(connection: sqlite3.Connection, words: str, limit: int, offset: int, *, deleted: bool) -> list[StoredChat]:
    """Return chats, last used first, whose titles hold all the ``words``; those without message and draft are left out."""
    where = ["deleted_at IS NOT NULL" if deleted else "deleted_at IS NULL", _HOLDS_SOMETHING]
    wanted = fold(storable(words)).split()
    where += ["instr(fold(title), ?) > 0"] * len(wanted)
    rows = connection.execute(
        f"SELECT * FROM chats WHERE {' AND '.join(where)} ORDER BY updated_at DESC, id LIMIT ? OFFSET ?",
        (*wanted, limit, offset),
    )
    return [chat_of(row) for row in rows]


def last_deleted(connection: sqlite3.Connection) -> StoredChat | None:
    """Return the chat that was deleted last, of those that hold something; None where there is none."""
    row = connection.execute(
        f"SELECT * FROM chats WHERE deleted_at IS NOT NULL AND {_HOLDS_SOMETHING} ORDER BY deleted_at DESC, id LIMIT 1"
    ).fetchone()
    return None if row is None else chat_of(row)


def update(connection: sqlite3.Connection, name: str, **columns: Any) -> StoredChat:
    """Set columns of a chat and return it. Raises StoreError where there is none."""
    names = ", ".join(f"{column} = :{column}" for column in columns)
    connection.execute(f"UPDATE chats SET {names} WHERE id = :id", {**columns, "id": name})
    return get(connection, name)


def rename(connection: sqlite3.Connection, name: str, title: str, origin: TitleOrigin) -> StoredChat:
    """Give a chat a title, unless the user gave it one and ``origin`` is anybody else."""
    line = one_line(storable(title))
    if not line:
        raise StoreError("A title can't be empty", "Give it a word.")
    chat = get(connection, name)
    if chat.title_origin == "user" and origin != "user":
        return chat
    return update(connection, name, title=line, title_origin=origin)


def change_settings(connection: sqlite3.Connection, name: str, changes: Mapping[str, Any]) -> StoredChat:
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


def message(connection: sqlite3.Connection, name: int) -> StoredMessage:
    """Return one message. Raises StoreError."""
    found = _messages(connection, f"{_SELECT} FROM messages m WHERE m.id = ?", name)
    if not found:
        raise StoreError(f"There is no message {name}", "Its chat may have been purged, here or in another window.")
    return found[0]


def path(connection: sqlite3.Connection, head: int) -> list[StoredMessage]:
    """Return the messages that lead to ``head``, from the first one to it."""
    return _messages(
        connection, f"{_UP} {_SELECT} FROM up JOIN messages m ON m.id = up.id ORDER BY up.depth DESC", head
    )


def siblings(connection: sqlite3.Connection, name: int) -> list[StoredMessage]:
    """Return the messages with the same parent, and this one among them, oldest first."""
    at = message(connection, name)
    where = "WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id"
    return _messages(connection, f"{_SELECT} FROM messages m {where}", at.chat, at.parent)


def children(connection: sqlite3.Connection, chat: str, parent: int | None) -> list[StoredMessage]:
    """Return what continues a message, or with None, what a chat begins with; oldest first."""
    return _messages(
        connection, f"{_SELECT} FROM messages m WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id", chat, parent
    )


def all_of(connection: sqlite3.Connection, chat: str) -> list[StoredMessage]:
    """Return every message of a chat, parents first."""
    return _messages(connection, f"{_SELECT} FROM messages m WHERE m.chat = ? ORDER BY m.id", chat)


def branches(connection: sqlite3.Connection, chat: str) -> list[BranchPreview]:
    """Return every message of a chat without its text, parents first."""
    rows = connection.execute(
        "SELECT id, parent, role, state, created_at, substr(text, 1, ?) AS beginning,"
        " (SELECT count(*) FROM messages c WHERE c.chat = m.chat AND c.parent = m.id) AS children"
        " FROM messages m WHERE chat = ? ORDER BY id",
        (4 * PREVIEW_CHARS, chat),
    )
    return [
        BranchPreview(
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


def _messages(connection: sqlite3.Connection, sql: str, *values: Any) -> list[StoredMessage]:
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


def _message_of(row: sqlite3.Row, attachments: tuple[Attachment, ...]) -> StoredMessage:
    return StoredMessage(
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


def insert(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> int:
    """Add a message, whatever its ``id`` and place; return its id. owner: the claim of the process that writes it, if partial."""
    cursor = connection.execute(
        "INSERT INTO messages (chat, parent, role, state, owner, created_at, model, settings, metrics, text, thinking)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            draft.chat,
            draft.parent,
            draft.role,
            draft.state,
            owner,
            draft.created_at,
            storable(draft.model),
            as_json(draft.settings),
            None if draft.metrics is None else as_json(draft.metrics),
            storable(draft.text),
            storable(draft.thinking),
        ),
    )
    made = int(cursor.lastrowid or 0)
    connection.executemany(
        "INSERT INTO attachments (message, position, kind, name, text) VALUES (?, ?, ?, ?, ?)",
        [
            (made, position, storable(each.kind), storable(each.name), storable(each.text))
            for position, each in enumerate(draft.attachments)
        ],
    )
    return made


def add(connection: sqlite3.Connection, draft: StoredMessage, *, owner: str | None = None) -> StoredMessage:
    """Add a message where it says, and let the chat stand at it; one that was deleted is back: what is said now must not be lost.

    Raises StoreError for a chat or parent that is not there.
    """
    get(connection, draft.chat)
    if draft.parent is not None:
        require_within(connection, draft.chat, draft.parent)
    made = insert(connection, draft, owner=owner)
    touch(connection, draft.chat, made, draft.created_at, draft.text if draft.role == "user" else "")
    return message(connection, made)


def checkpoint(connection: sqlite3.Connection, name: int, owner: str, text: str, thinking: str) -> None:
    """Keep what a reply holds so far. Raises StoreError unless ``owner`` is writing it."""
    changed = connection.execute(
        "UPDATE messages SET text = ?, thinking = ? WHERE id = ? AND owner = ?",
        (storable(text), storable(thinking), name, owner),
    )
    _require_written(changed, name)


def finish(
    connection: sqlite3.Connection,
    name: int,
    owner: str,
    *,
    text: str,
    thinking: str,
    state: FinalState,
    metrics: Json | None,
    now: float,
) -> StoredMessage:
    """End a reply; from here on it never changes. Raises StoreError unless ``owner`` is writing it."""
    changed = connection.execute(
        "UPDATE messages SET text = ?, thinking = ?, state = ?, metrics = ?, owner = NULL WHERE id = ? AND owner = ?",
        (storable(text), storable(thinking), state, None if metrics is None else as_json(metrics), name, owner),
    )
    _require_written(changed, name)
    done = message(connection, name)
    update(connection, done.chat, updated_at=now)
    return done


def abandoned(connection: sqlite3.Connection, folder: Path) -> list[str]:
    """Return the writers that are gone and left replies behind."""
    owners = connection.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall()
    return [row["owner"] for row in owners if not is_alive(folder, row["owner"])]


def stop_all_by(connection: sqlite3.Connection, owner: str) -> int:
    """End as stopped every reply that this writer has not finished; return how many."""
    return connection.execute("UPDATE messages SET state = 'stopped', owner = NULL WHERE owner = ?", (owner,)).rowcount


def set_head(connection: sqlite3.Connection, chat: str, head: int) -> StoredChat:
    """Let a chat stand at another of its messages. Raises StoreError."""
    get(connection, chat)
    require_within(connection, chat, head)
    return update(connection, chat, head=head)


def adopt(connection: sqlite3.Connection, archive: Archive) -> StoredChat:
    """Add a whole chat under a new id and its messages under new ids; what was partial is stopped. Raises StoreError."""
    chat = insert_chat(connection, archive.chat)
    made: dict[int | None, int | None] = {None: None}
    for each in archive.messages:
        if each.parent not in made:
            raise StoreError(f"Message {each.id} continues message {each.parent}, which does not come before it")
        state = "stopped" if each.state == "partial" else each.state
        made[each.id] = insert(connection, replace(each, chat=chat.id, parent=made[each.parent], state=state))
    if archive.chat.head not in made:
        raise StoreError(f"The chat stands at message {archive.chat.head}, which is not in it")
    return update(connection, chat.id, head=made[archive.chat.head])


def _require_written(changed: sqlite3.Cursor, name: int) -> None:
    if changed.rowcount != 1:
        raise StoreError(
            f"Message {name} is not a reply that is being written here", "Open the chat again to see its state."
        )

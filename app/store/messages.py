"""Writing messages: added whole, or as a reply that grows until it is finished. Always inside the caller's transaction."""

import sqlite3
from dataclasses import replace
from pathlib import Path

from tokamac.app.store import chats, tree
from tokamac.app.store.claims import is_alive
from tokamac.app.store.errors import StoreError
from tokamac.app.store.text import storable
from tokamac.app.store.values import Archive, Chat, FinalState, Json, Message


def insert(connection: sqlite3.Connection, draft: Message, *, owner: str | None = None) -> int:
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
            chats.as_json(draft.settings),
            None if draft.metrics is None else chats.as_json(draft.metrics),
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


def add(connection: sqlite3.Connection, draft: Message, *, owner: str | None = None) -> Message:
    """Add a message where it says, and let the chat stand at it; one that was deleted is back: what is said now must not be lost.

    Raises StoreError for a chat or parent that is not there.
    """
    chats.get(connection, draft.chat)
    if draft.parent is not None:
        tree.require_within(connection, draft.chat, draft.parent)
    made = insert(connection, draft, owner=owner)
    chats.touch(connection, draft.chat, made, draft.created_at, draft.text if draft.role == "user" else "")
    return tree.message(connection, made)


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
) -> Message:
    """End a reply; from here on it never changes. Raises StoreError unless ``owner`` is writing it."""
    changed = connection.execute(
        "UPDATE messages SET text = ?, thinking = ?, state = ?, metrics = ?, owner = NULL WHERE id = ? AND owner = ?",
        (
            storable(text),
            storable(thinking),
            state,
            None if metrics is None else chats.as_json(metrics),
            name,
            owner,
        ),
    )
    _require_written(changed, name)
    done = tree.message(connection, name)
    chats.update(connection, done.chat, updated_at=now)
    return done


def abandoned(connection: sqlite3.Connection, folder: Path) -> list[str]:
    """Return the writers that are gone and left replies behind."""
    owners = connection.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall()
    return [row["owner"] for row in owners if not is_alive(folder, row["owner"])]


def stop_all_by(connection: sqlite3.Connection, owner: str) -> int:
    """End as stopped every reply that this writer has not finished; return how many."""
    return connection.execute("UPDATE messages SET state = 'stopped', owner = NULL WHERE owner = ?", (owner,)).rowcount


def set_head(connection: sqlite3.Connection, chat: str, head: int) -> Chat:
    """Let a chat stand at another of its messages. Raises StoreError."""
    chats.get(connection, chat)
    tree.require_within(connection, chat, head)
    return chats.update(connection, chat, head=head)


def adopt(connection: sqlite3.Connection, archive: Archive) -> Chat:
    """Add a whole chat under a new id and its messages under new ids; what was partial is stopped. Raises StoreError."""
    chat = chats.insert(connection, archive.chat)
    made: dict[int | None, int | None] = {None: None}
    for each in archive.messages:
        if each.parent not in made:
            raise StoreError(f"Message {each.id} continues message {each.parent}, which does not come before it")
        state = "stopped" if each.state == "partial" else each.state
        made[each.id] = insert(connection, replace(each, chat=chat.id, parent=made[each.parent], state=state))
    if archive.chat.head not in made:
        raise StoreError(f"The chat stands at message {archive.chat.head}, which is not in it")
    return chats.update(connection, chat.id, head=made[archive.chat.head])


def _require_written(changed: sqlite3.Cursor, name: int) -> None:
    if changed.rowcount != 1:
        raise StoreError(
            f"Message {name} is not a reply that is being written here", "Open the chat again to see its state."
        )

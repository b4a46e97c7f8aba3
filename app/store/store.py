"""The front of the store: what the chat and the command line ask of it, each in one transaction.

    with Store.open() as store:
        chat = store.new_chat(model="guide")
        asked = store.add_message(chat.id, None, "user", "Why is decode memory-bound?")
        reply = store.begin_reply(chat.id, asked.id, model="guide")
        store.checkpoint(reply.id, "Because every")
        store.finish_reply(reply.id, "Because every weight is read for every token.", metrics={"decode_tps": 41.5})
        for hit in store.search("weight tok"): ...

Several programs may use one file at once. A finished message never changes, and what two of them add to the same message become
siblings; a title, a draft and the head are those set last. Each answer is of one moment.
"""

import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokamac.engine.events import Role, ToolCall

from . import database, messages, search
from .database import EMPTY_INDEX, Database
from .search import parse
from .values import (
    Archive,
    Attachment,
    BranchPreview,
    FinalState,
    Hit,
    Json,
    NoChatError,
    StoreDamagedError,
    StoredChat,
    StoredMessage,
    StoreError,
    TitleOrigin,
    beyond_repair,
    fold,
    one_line,
    storable,
)

Clock = Callable[[], float]
PREVIEW_CHARS = 80
MOST_FOLDER_CHARS = 60
UNDO_S = 30 * 86400.0
"""How long a deleted chat can be brought back."""
_MERGED_PAGES = 500
"""Of the search index in one transaction: some 2 MB."""
_ID = re.compile(f"[{messages.ID_CHARS}]{{1,{messages.ID_LENGTH}}}")
_HOLDS_SOMETHING = "(head IS NOT NULL OR draft <> '')"
_AT_PARENT = "FROM messages m WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id"
_NEWEST_BELOW = """
WITH RECURSIVE down (id) AS (
    SELECT ? UNION ALL SELECT m.id FROM down JOIN messages m ON m.chat = ? AND m.parent = down.id
) SELECT max(id) FROM down"""
_STOP = "UPDATE messages SET state = 'stopped', owner = NULL WHERE owner = ?"


class Questions:
    """The reading half of ``Store``. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open_to_read(cls, path: Path) -> Self:
        """Open a file that may not be written, or whose folder may not. Raises StoreError."""
        return cls(Database(path, read_only=True))

    def close(self) -> None:
        """Close the file. May be called again."""
        self._database.close()

    @property
    def file(self) -> Path:
        """The file of the store."""
        return self._database.path

    def chats(
        self,
        words: str = "",
        *,
        limit: int = 50,
        offset: int = 0,
        deleted: bool = False,
        pinned_first: bool = False,
        folder: str | None = None,
    ) -> list[StoredChat]:
        """Return chats, last used first, whose titles hold all the words, whatever their case and accents.

        Chats with neither message nor draft are left out.

        Args:
            words: in any order; "" leaves none out.
            limit: how many at most.
            offset: how many of the first to leave out.
            deleted: those that were deleted, instead of the others.
            pinned_first: those that are pinned come before the others, the one pinned last first.
            folder: only those in this folder; "" are those in none, None are all.
        """
        order = "pinned_at DESC, " if pinned_first else ""  # NULL is less than any moment
        with self._database.reading() as connection:
            wanted = fold(storable(words)).split()
            where = [
                f"deleted_at IS {'NOT ' * deleted}NULL",
                _HOLDS_SOMETHING,
                *["instr(fold(title), ?) > 0"] * len(wanted),
                *["folder = ?"] * (folder is not None),
            ]
            rows = connection.execute(
                f"SELECT * FROM chats WHERE {' AND '.join(where)} ORDER BY {order}updated_at DESC, id LIMIT ? OFFSET ?",
                (*wanted, *([folder] if folder is not None else []), limit, offset),
            )
            return [messages.chat_of(row) for row in rows]

    def folders(self) -> list[tuple[str, int]]:
        """Return the folders by name, each with how many chats are in it; those of deleted chats are left out."""
        rows = self._database.read(
            f"SELECT folder, count(*) AS chats FROM chats WHERE folder <> '' AND deleted_at IS NULL AND {_HOLDS_SOMETHING}"
            " GROUP BY folder ORDER BY fold(folder), folder"
        )
        return [(row["folder"], int(row["chats"])) for row in rows]

    def chat(self, name: str) -> StoredChat:
        """Return the chat of this id, or the only one whose id begins so; a deleted one too."""
        begin = name.strip().lower()
        if not _ID.fullmatch(begin):
            hint = f"An id has {messages.ID_LENGTH} letters and digits, such as k3v7q2ab."
            raise StoreError(f"{name!r:.40} is no id of a chat", hint)
        rows = self._database.read(
            "SELECT * FROM chats WHERE id BETWEEN ? AND ? ORDER BY updated_at DESC LIMIT 4", (begin, begin + "{")
        )
        if not rows:
            raise NoChatError(f"No chat has an id that begins with {begin}", "The list of chats shows their ids.")
        if len(rows) > 1:
            some = ", ".join(row["id"] for row in rows[:3]) + (" …" if len(rows) > 3 else "")
            raise StoreError(f"Several chats have an id that begins with {begin}: {some}", "Give more of it.")
        return messages.chat_of(rows[0])

    def known(self, chat: str) -> StoredChat | None:
        """Return the chat of exactly this id, a deleted one too; None where there is none, or none any more."""
        rows = self._database.read("SELECT * FROM chats WHERE id = ?", (chat,))
        return messages.chat_of(rows[0]) if rows else None

    def latest(self) -> StoredChat | None:
        """Return the chat that was used last; None where there is none."""
        return next(iter(self.chats(limit=1)), None)

    def message(self, name: int) -> StoredMessage:
        """Return one message."""
        with self._database.reading() as connection:
            return messages.message(connection, name)

    def path(self, chat: str, head: int | None = None) -> list[StoredMessage]:
        """Return the messages from the chat's beginning to ``head``, or to where the chat stands."""
        with self._database.reading() as connection:
            end = head or messages.chat(connection, chat).head
            if end is None:
                return []
            messages.require_within(connection, chat, end)
            return messages.path(connection, end)

    def siblings(self, message: int) -> list[StoredMessage]:
        """Return the messages with the same parent, and this one among them, oldest first."""
        with self._database.reading() as connection:
            at = messages.message(connection, message)
            return messages.select(connection, _AT_PARENT, at.chat, at.parent)

    def children(self, chat: str, parent: int | None) -> list[StoredMessage]:
        """Return what continues ``parent``, or with None, what the chat begins with; oldest first."""
        with self._database.reading() as connection:
            messages.chat(connection, chat)
            return messages.select(connection, _AT_PARENT, chat, parent)

    def tip(self, message: int) -> int:
        """Return the newest message at or below this one: where to go on when its branch is chosen."""
        with self._database.reading() as connection:
            chat = messages.message(connection, message).chat
            # It ends its branch, since children are newer than their parents.
            return int(connection.execute(_NEWEST_BELOW, (message, chat)).fetchone()[0])

    def tree(self, chat: str) -> list[BranchPreview]:
        """Return every message of a chat without its text, parents first."""
        with self._database.reading() as connection:
            messages.chat(connection, chat)
            rows = connection.execute(
                "SELECT id, parent, role, state, substr(text, 1, ?) AS preview, created_at,"
                " (SELECT count(*) FROM messages c WHERE c.chat = m.chat AND c.parent = m.id) AS children"
                " FROM messages m WHERE chat = ? ORDER BY id",
                (4 * PREVIEW_CHARS, chat),
            )
            return [BranchPreview(**{**dict(row), "preview": one_line(row["preview"])[:PREVIEW_CHARS]}) for row in rows]

    def archive(self, chat: str) -> Archive:
        """Return a chat with all of its messages, for export."""
        with self._database.reading() as connection:
            found = messages.select(connection, "FROM messages m WHERE m.chat = ? ORDER BY m.id", chat)
            return Archive(messages.chat(connection, chat), tuple(found))

    def search(self, typed: str, limit: int = 50) -> list[Hit]:
        """Return the newest finished messages that hold all the words typed, the last of which may be a beginning.

        Whatever is typed is looked for, never obeyed: there are no operators. Messages of deleted chats are left out.
        """
        with self._database.reading() as connection:
            return search.search(connection, parse(typed), limit)

    def searchable(self) -> int:
        """Return how many messages a search looks through, those of deleted chats among them."""
        return int(self._database.read(f"SELECT count(*) FROM messages m WHERE {search.SEARCHED}")[0][0])

    def history(self, limit: int = 100, chat: str | None = None) -> list[str]:
        """Return what the user sent, newest first, each text once; with ``chat``, in that chat alone."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT m.text FROM messages m JOIN chats c ON c.id = m.chat WHERE m.role = 'user' AND m.text <> ''"
                " AND c.deleted_at IS NULL AND (:chat IS NULL OR m.chat = :chat) ORDER BY m.id DESC",
                {"chat": chat},
            )
            found: dict[str, None] = {}
            while len(found) < limit and (row := rows.fetchone()) is not None:
                found.setdefault(row["text"])
            return list(found)

    def check(self) -> None:
        """Read the whole file and raise StoreDamagedError if it is not whole: half a second for a hundred thousand messages."""
        self._database.check()


class Store(Questions):
    """Chats on disk. Use it, and close it, on the thread that opened it. Every method may raise StoreError.

    What can be asked is in ``Questions``; here is what changes something, and what there is to undo.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self._clock = clock
        self._claim: messages.Claim | None = None

    @classmethod
    def open(cls, path: Path | None = None, *, clock: Clock = time.time) -> Self:
        """Open the file, made where it is missing; replies that a process left that died are ended as stopped.

        path: None is the user's own (``database.default_path``). clock: seconds since 1970.
        Raises StoreError where the file is of a newer version, of another program, or can't be used; StoreDamagedError where it is
        broken.
        """
        store = cls(Database(path or database.default_path()), clock)
        try:
            store.recover()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def repair(cls, path: Path | None = None, *, clock: Clock = time.time) -> int:
        """Make the search index anew, then read the whole file; return how many messages can be searched.

        path, clock: as for ``open``. Raises StoreDamagedError where more than the index is broken; its messages are as they were.
        """
        try:
            # Not ``open``: a reply that is ended is indexed.
            with cls(Database(path or database.default_path()), clock) as store:
                store.repair_search()
                store.check()  # after it: SQLite from 3.44 on finds a broken index here
                store.recover()
                return store.searchable()
        except StoreDamagedError as error:
            raise beyond_repair(error) from error

    @staticmethod
    def set_aside(path: Path | None = None) -> Path:
        """Move a file that can't be used out of the way, whole, into a folder beside it; return where it is now."""
        return database.set_aside(path or database.default_path(), datetime.now())

    def close(self) -> None:
        """End as stopped what is still being written here, and close the file. May be called again."""
        claim, self._claim = self._claim, None
        try:
            if claim is not None:
                with self._database.writing() as connection:
                    connection.execute(_STOP, (claim.token,))
        finally:
            if claim is not None:
                claim.release()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(StoreError):  # what went wrong first is what must be told
            self.close()

    # Chats

    def new_chat(self, *, model: str = "", settings: Json | None = None) -> StoredChat:
        """Begin a chat. It is listed once it has a message or a draft, and titled by the first words the user sends."""
        now = self._now()
        with self._database.writing() as connection:
            return messages.add_chat(connection, StoredChat("", "", "words", now, now, model, settings or {}))

    def rename(self, chat: str, title: str, origin: TitleOrigin = "user") -> StoredChat:
        """Give a chat a title; one that the user gave stays, unless the user gives another."""
        line = one_line(storable(title))
        if not line:
            raise StoreError("A title can't be empty", "Give it a word.")
        with self._database.writing() as connection:
            at = messages.chat(connection, chat)
            if at.title_origin == "user" and origin != "user":
                return at
            return messages.update_chat(connection, chat, title=line, title_origin=origin)

    def pin(self, chat: str, *, pinned: bool = True) -> StoredChat:
        """Keep a chat at the top of the lists, or no longer."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, pinned_at=self._now() if pinned else None)

    def move(self, chat: str, folder: str) -> StoredChat:
        """Put a chat into the folder of this name, which need not be there yet; "" takes it out of its folder."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, folder=one_line(storable(folder))[:MOST_FOLDER_CHARS])

    def set_draft(self, chat: str, text: str) -> None:
        """Keep what stands in the prompt and was not sent."""
        with self._database.writing() as connection:
            messages.update_chat(connection, chat, draft=storable(text))

    def set_model(self, chat: str, model: str) -> StoredChat:
        """Note which model the chat goes on with."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, model=storable(model))

    def set_settings(self, chat: str, changes: Mapping[str, Any]) -> StoredChat:
        """Change these keys of the chat's settings and leave the others; None takes a key away."""
        with self._database.writing() as connection:
            settings = {**messages.chat(connection, chat).settings, **changes}
            kept = {key: value for key, value in settings.items() if value is not None}
            return messages.update_chat(connection, chat, settings=messages.as_json(kept))

    def delete(self, chat: str) -> StoredChat:
        """Take a chat out of lists and searches; ``undelete`` brings it back until it is purged."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, deleted_at=self._now())

    def undelete(self, chat: str) -> StoredChat:
        """Bring a deleted chat back."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, deleted_at=None)

    def last_deleted(self) -> StoredChat | None:
        """Return the chat that was deleted last, of those that ``undelete`` can bring back; None where there is none."""
        rows = self._database.read(
            f"SELECT * FROM chats WHERE deleted_at IS NOT NULL AND {_HOLDS_SOMETHING} ORDER BY deleted_at DESC, id LIMIT 1"
        )
        return messages.chat_of(rows[0]) if rows else None

    def purge(self, older_than_s: float = UNDO_S) -> int:
        """Remove for ever the chats deleted so many seconds ago or more, and overwrite their bytes; return how many.

        Chats that were used since, or in which a reply is written, stay.
        """
        old = "SELECT id FROM chats WHERE max(deleted_at, updated_at) < ?"
        old += " AND NOT EXISTS (SELECT 1 FROM messages WHERE chat = chats.id AND state = 'partial')"
        with self._database.writing() as connection:
            gone = [(row["id"],) for row in connection.execute(old, (self._now() - older_than_s,))]
            mine = "SELECT id FROM messages WHERE chat = ?"
            connection.executemany(f"DELETE FROM attachments WHERE message IN ({mine})", gone)
            connection.executemany("DELETE FROM messages WHERE chat = ?", gone)
            connection.executemany("DELETE FROM chats WHERE id = ?", gone)
        if gone:
            pages, more = -_MERGED_PAGES, True
            while more:  # a part at a time, so that other programs can write in between
                with self._database.writing() as connection:
                    more = search.merge_index(connection, pages)
                pages = _MERGED_PAGES
            self._database.merge_log()
        return len(gone)

    # Messages

    def add_message(
        self,
        chat: str,
        parent: int | None,
        role: Role,
        text: str,
        *,
        thinking: str = "",
        attachments: Sequence[Attachment] = (),
        model: str = "",
        settings: Json | None = None,
        calls: Sequence[ToolCall] = (),
        state: FinalState = "complete",
    ) -> StoredMessage:
        """Add a whole message after ``parent``, or with None as a beginning; the chat then stands at it.

        To edit a message is to add another after the same parent.
        """
        draft = StoredMessage(
            0,
            chat,
            parent,
            role,
            text,
            thinking,
            state,
            self._now(),
            model,
            settings or {},
            None,
            tuple(attachments),
            calls=tuple(calls),
        )
        with self._database.writing() as connection:
            return messages.add(connection, draft)

    def begin_reply(
        self,
        chat: str,
        parent: int | None,
        *,
        model: str = "",
        settings: Json | None = None,
        text: str = "",
        thinking: str = "",
    ) -> StoredMessage:
        """Add a reply that is still being written here; the chat then stands at it.

        text, thinking: what it begins with, to continue another that was stopped.
        """
        if self._claim is None:
            self._claim = messages.Claim(self.file.parent)
        draft = StoredMessage(
            0, chat, parent, "assistant", text, thinking, "partial", self._now(), model, settings or {}
        )
        with self._database.writing() as connection:
            return messages.add(connection, draft, owner=self._claim.token)

    def checkpoint(self, reply: int, text: str, thinking: str = "") -> None:
        """Keep all that a reply holds so far."""
        with self._database.writing() as connection:
            self._update_reply(connection, reply, text=storable(text), thinking=storable(thinking))

    def finish_reply(
        self,
        reply: int,
        text: str,
        thinking: str = "",
        *,
        state: FinalState = "complete",
        metrics: Json | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> StoredMessage:
        """End a reply, with all of its text and its calls. It never changes again."""
        figures = None if metrics is None else messages.as_json(metrics)
        ended = {"state": state, "metrics": figures, "owner": None, "calls": messages.calls_as_json(calls)}
        with self._database.writing() as connection:
            self._update_reply(connection, reply, text=storable(text), thinking=storable(thinking), **ended)
            done = messages.message(connection, reply)
            messages.update_chat(connection, done.chat, updated_at=self._now())
            return done

    def _update_reply(self, connection: sqlite3.Connection, reply: int, **columns: Any) -> None:
        """Change a reply that is being written here. Raises StoreError for any other message."""
        names = ", ".join(f"{column} = :{column}" for column in columns)
        owner = "" if self._claim is None else self._claim.token
        changed = connection.execute(
            f"UPDATE messages SET {names} WHERE id = :id AND owner = :writer", {**columns, "id": reply, "writer": owner}
        )
        if changed.rowcount != 1:
            hint = "Open the chat again to see its state."
            raise StoreError(f"Message {reply} is not a reply that is being written here", hint)

    def repair_search(self) -> None:
        """Make the search index anew from the messages: the first thing to try after a StoreDamagedError.

        Raises StoreDamagedError where the messages can't be read either. Seconds, for a hundred thousand messages.
        """
        with self._database.writing() as connection:
            connection.execute(EMPTY_INDEX)
            connection.execute("INSERT INTO search (search) VALUES ('rebuild')")

    def recover(self) -> int:
        """End as stopped every reply whose process is gone; return how many. What another program writes is left alone."""
        folder = self.file.parent
        owners = self._database.read("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL")
        gone = [row["owner"] for row in owners if not messages.is_alive(folder, row["owner"])]
        stopped = 0
        if gone:
            with self._database.writing() as connection:
                stopped = sum(connection.execute(_STOP, (owner,)).rowcount for owner in gone)
        messages.tidy(folder)
        return stopped

    def set_head(self, chat: str, message: int) -> StoredChat:
        """Let the chat stand at another of its messages."""
        with self._database.writing() as connection:
            messages.chat(connection, chat)
            messages.require_within(connection, chat, message)
            return messages.update_chat(connection, chat, head=message)

    def fork(self, chat: str, message: int) -> StoredChat:
        """Copy the messages that lead to this one, and it, into a new chat; return that."""
        with self._database.writing() as connection:
            old = messages.chat(connection, chat)
            messages.require_within(connection, chat, message)
            now = self._now()
            copy = replace(old, title=f"{old.title} (fork)", created_at=now, updated_at=now, draft="", head=message)
            return messages.adopt(connection, Archive(copy, tuple(messages.path(connection, message))))

    def adopt(self, archive: Archive) -> StoredChat:
        """Store a conversation that comes from elsewhere as a new chat, under ids of its own, and return that."""
        with self._database.writing() as connection:
            return messages.adopt(connection, archive)

    def _now(self) -> float:
        return round(self._clock(), 6)

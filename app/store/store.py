"""The store's API for the chat and the command line; each call is one transaction."""

#     with Store.open() as store:
#         chat = store.new_chat(model="guide")
#         asked = store.add_message(chat.id, None, "user", "Why is decode memory-bound?")
#         reply = store.begin_reply(chat.id, asked.id, model="guide")
#         store.checkpoint(reply.id, "Because every")
#         store.finish_reply(reply.id, "Because every weight is read for every token.", metrics={"decode_tps": 41.5})
#         for hit in store.search("weight tok"): ...
#
# Several programs may share a file. Finished messages never change; concurrent additions become siblings; for
# title, draft and head the last write wins. Long-running programs poll ``changed`` and ``follow``.

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokamac.engine.events import Role, ToolCall

from . import database, messages, passages
from .database import EMPTY_INDEX, INDEXES, Database
from .messages import parse
from .values import (
    Archive,
    Attachment,
    BranchPreview,
    FileWrite,
    FinalState,
    Followed,
    Hit,
    Json,
    Merged,
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
WRITES_BYTES = 64 << 20  # of files as they were before tools wrote them
UNDO_S = 30 * 86400.0  # how long a deleted chat can be brought back
_MERGED_PAGES = 500  # of the search index in one transaction: some 2 MB
_ID = re.compile(f"[{messages.ID_CHARS}]{{1,{messages.ID_LENGTH}}}")
_HOLDS_SOMETHING = "(head IS NOT NULL OR draft <> '')"
_AT_PARENT = "FROM messages m WHERE m.chat = ? AND m.parent IS ? ORDER BY m.id"
_NEWEST_BELOW = """
WITH RECURSIVE down (id) AS (
    SELECT ? UNION ALL SELECT m.id FROM down JOIN messages m ON m.chat = ? AND m.parent = down.id
) SELECT max(id) FROM down"""
# Replies that models wrote in a comparison of which one is on the path that is read.
_CHOICES = """
WITH RECURSIVE made AS MATERIALIZED (
    SELECT id, chat, parent, model FROM messages WHERE json_extract(metrics, '$.compared') <> '' AND state = 'complete'
), up (chat, id, parent) AS (
    SELECT m.chat, m.id, m.parent FROM chats c JOIN messages m ON m.chat = c.id AND m.id = c.head
    WHERE c.deleted_at IS NULL AND c.id IN (SELECT chat FROM made)
    UNION ALL SELECT m.chat, m.id, m.parent FROM up JOIN messages m ON m.chat = up.chat AND m.id = up.parent
), kept AS (SELECT chat, parent, model FROM made WHERE id IN (SELECT id FROM up))
SELECT m.model, sum(m.model = k.model) AS kept, count(*) AS compared FROM made m
JOIN kept k ON k.chat = m.chat AND k.parent IS m.parent
WHERE EXISTS (SELECT 1 FROM made o WHERE o.chat = m.chat AND o.parent IS m.parent AND o.model <> m.model)
GROUP BY m.model ORDER BY kept DESC, compared, m.model"""
_STOP = "UPDATE messages SET state = 'stopped', owner = NULL WHERE owner = ?"


class Questions:
    """The reading half of ``Store``. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open_to_read(cls, path: Path) -> Self:
        """Open a file without write access. Raises StoreError."""
        return cls(Database(path, read_only=True))

    def close(self) -> None:
        self._database.close()

    @property
    def file(self) -> Path:
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
        """Return chats whose titles contain all words, ignoring case and accents, last used first.

        Chats with neither message nor draft are omitted. deleted: deleted chats instead of the others. folder: "" for
        chats in none, None for all.
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
        rows = self._database.read(
            f"SELECT folder, count(*) AS chats FROM chats WHERE folder <> '' AND deleted_at IS NULL AND {_HOLDS_SOMETHING}"
            " GROUP BY folder ORDER BY fold(folder), folder"
        )
        return [(row["folder"], int(row["chats"])) for row in rows]

    def chat(self, name: str) -> StoredChat:
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
        rows = self._database.read("SELECT * FROM chats WHERE id = ?", (chat,))
        return messages.chat_of(rows[0]) if rows else None

    def latest(self) -> StoredChat | None:
        return next(iter(self.chats(limit=1)), None)

    def message(self, name: int) -> StoredMessage:
        with self._database.reading() as connection:
            return messages.message(connection, name)

    def path(self, chat: str, head: int | None = None) -> list[StoredMessage]:
        with self._database.reading() as connection:
            end = head or messages.chat(connection, chat).head
            if end is None:
                return []
            messages.require_within(connection, chat, end)
            return messages.path(connection, end)

    def siblings(self, message: int) -> list[StoredMessage]:
        with self._database.reading() as connection:
            at = messages.message(connection, message)
            return messages.select(connection, _AT_PARENT, at.chat, at.parent)

    def children(self, chat: str, parent: int | None) -> list[StoredMessage]:
        with self._database.reading() as connection:
            messages.chat(connection, chat)
            return messages.select(connection, _AT_PARENT, chat, parent)

    def tip(self, message: int) -> int:
        with self._database.reading() as connection:
            chat = messages.message(connection, message).chat
            # It ends its branch, since children are newer than their parents.
            return int(connection.execute(_NEWEST_BELOW, (message, chat)).fetchone()[0])

    def tree(self, chat: str) -> list[BranchPreview]:
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
        with self._database.reading() as connection:
            found = messages.select(connection, "FROM messages m WHERE m.chat = ? ORDER BY m.id", chat)
            return Archive(messages.chat(connection, chat), tuple(found))

    def search(self, typed: str, limit: int = 50) -> list[Hit]:
        with self._database.reading() as connection:
            return messages.search(connection, parse(typed), limit)

    def passages(self) -> list[passages.Passage]:
        with self._database.reading() as connection:
            return passages.passages(connection)

    def vectors(self, model: str) -> dict[bytes, bytes]:
        with self._database.reading() as connection:
            return passages.vectors_of(connection, model)

    def writes(self, messages: Collection[int]) -> list[FileWrite]:
        """Return what tools wrote after these messages, oldest first."""
        wanted = "SELECT * FROM writes WHERE message IN (SELECT value FROM json_each(?)) ORDER BY id"
        return [
            FileWrite(
                Path(os.fsdecode(row["path"])), Path(os.fsdecode(row["root"])), row["before"], row["after"], row["mode"]
            )
            for row in self._database.read(wanted, (json.dumps(list(messages)),))
        ]

    def choices(self) -> list[tuple[str, int, int]]:
        """Return (model, comparisons in which its reply was kept, comparisons), most kept first."""
        return [(row["model"], int(row["kept"]), int(row["compared"])) for row in self._database.read(_CHOICES)]

    def searchable(self) -> int:
        return int(self._database.read(f"SELECT count(*) FROM messages m WHERE {messages.SEARCHED}")[0][0])

    def history(self, limit: int = 100, chat: str | None = None) -> list[str]:
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
        """Check the whole file (0.5 s per 100,000 messages). Raises StoreDamagedError."""
        self._database.check()

    def copy_to(self, path: Path) -> None:
        self._database.copy_to(path)


class Store(Questions):
    """Chats on disk, for the thread that opened it. Every method may raise StoreError."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self._clock = clock
        self._claim: messages.Claim | None = None
        self._newest = 0  # message of those that were there when the file was opened
        self._changes = 0
        self._left: tuple[list[Archive], int] | None = (
            None  # of a file that was replaced: chats, and how many can't be read
        )

    @classmethod
    def open(cls, path: Path | None = None, *, clock: Clock = time.time) -> Self:
        """Open the file, created if missing (None: the user's own); stop replies of dead processes.

        Raises StoreError for a newer, foreign or unusable file, and StoreDamagedError for a broken one.
        """
        store = cls(Database(path or database.default_path()), clock)
        try:
            store.recover()
            store._newest = int(store._database.read("SELECT coalesce(max(id), 0) FROM messages")[0][0])
            store._changes = store._database.changes()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def repair(cls, path: Path | None = None) -> int:
        """Rebuild the search index and check the file; return the number of searchable messages.

        Raises StoreDamagedError, messages unchanged, where more than the index is broken.
        """
        try:
            # Not ``open``: a reply that is ended is indexed.
            with cls(Database(path or database.default_path()), time.time) as store:
                store.repair_search()
                store.check()  # after it: SQLite from 3.44 on finds a broken index here
                store.recover()
                return store.searchable()
        except StoreDamagedError as error:
            raise beyond_repair(error) from error

    @staticmethod
    def set_aside(path: Path | None = None) -> Path:
        """Move an unusable file into a folder next to it; return the new path."""
        return database.set_aside(path or database.default_path(), datetime.now())

    def close(self) -> None:
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
        """Create a chat, listed once it has a message or draft; its title is the first prompt's first words."""
        now = self._now()
        with self._database.writing() as connection:
            return messages.add_chat(connection, StoredChat("", "", "words", now, now, model, settings or {}))

    def rename(self, chat: str, title: str, origin: TitleOrigin = "user") -> StoredChat:
        """Set a title; only the user replaces a title given by the user."""
        line = one_line(storable(title))
        if not line:
            raise StoreError("A title can't be empty", "Give it a word.")
        with self._database.writing() as connection:
            at = messages.chat(connection, chat)
            if at.title_origin == "user" and origin != "user":
                return at
            return messages.update_chat(connection, chat, title=line, title_origin=origin)

    def pin(self, chat: str, *, pinned: bool = True) -> StoredChat:
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, pinned_at=self._now() if pinned else None)

    def move(self, chat: str, folder: str) -> StoredChat:
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, folder=one_line(storable(folder))[:MOST_FOLDER_CHARS])

    def set_draft(self, chat: str, text: str) -> None:
        with self._database.writing() as connection:
            messages.update_chat(connection, chat, draft=storable(text))

    def set_model(self, chat: str, model: str) -> StoredChat:
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, model=storable(model))

    def set_settings(self, chat: str, changes: Mapping[str, Any]) -> StoredChat:
        """Update these keys of a chat's settings; None removes a key."""
        with self._database.writing() as connection:
            settings = {**messages.chat(connection, chat).settings, **changes}
            kept = {key: value for key, value in settings.items() if value is not None}
            return messages.update_chat(connection, chat, settings=messages.as_json(kept))

    def delete(self, chat: str) -> StoredChat:
        """Hide a chat from lists and searches; ``undelete`` restores it until it is purged."""
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, deleted_at=self._now())

    def undelete(self, chat: str) -> StoredChat:
        with self._database.writing() as connection:
            return messages.update_chat(connection, chat, deleted_at=None)

    def last_deleted(self) -> StoredChat | None:
        rows = self._database.read(
            f"SELECT * FROM chats WHERE deleted_at IS NOT NULL AND {_HOLDS_SOMETHING} ORDER BY deleted_at DESC, id LIMIT 1"
        )
        return messages.chat_of(rows[0]) if rows else None

    def purge(self, older_than_s: float = UNDO_S) -> int:
        """Remove chats deleted ``older_than_s`` ago and overwrite their bytes; return how many.

        Keeps chats that were used since, or have a running reply.
        """
        old = "SELECT id FROM chats WHERE max(deleted_at, updated_at) < ?"
        old += " AND NOT EXISTS (SELECT 1 FROM messages WHERE chat = chats.id AND state = 'partial')"
        with self._database.writing() as connection:
            gone = [(row["id"],) for row in connection.execute(old, (self._now() - older_than_s,))]
            mine = "SELECT id FROM messages WHERE chat = ?"
            for table in ("attachments", "writes"):
                connection.executemany(f"DELETE FROM {table} WHERE message IN ({mine})", gone)
            connection.executemany("DELETE FROM messages WHERE chat = ?", gone)
            connection.executemany("DELETE FROM chats WHERE id = ?", gone)
            if gone:
                passages.forget(connection)
        if gone:
            pages, more = -_MERGED_PAGES, True
            while more:  # a part at a time, so that other programs can write in between
                with self._database.writing() as connection:
                    more = messages.merge_index(connection, pages)
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
        """Add a message after ``parent`` (None: a root) and move the head to it. An edit is a new sibling."""
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
        """Add an unfinished reply and move the head to it. text, thinking: of a stopped reply to continue."""
        if self._claim is None:
            self._claim = messages.Claim(self.file.parent)
        draft = StoredMessage(
            0, chat, parent, "assistant", text, thinking, "partial", self._now(), model, settings or {}
        )
        with self._database.writing() as connection:
            return messages.add(connection, draft, owner=self._claim.token)

    def checkpoint(self, reply: int, text: str, thinking: str = "") -> None:
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
        figures = None if metrics is None else messages.as_json(metrics)
        ended = {"state": state, "metrics": figures, "owner": None, "calls": messages.calls_as_json(calls)}
        with self._database.writing() as connection:
            self._update_reply(connection, reply, text=storable(text), thinking=storable(thinking), **ended)
            done = messages.message(connection, reply)
            messages.update_chat(connection, done.chat, updated_at=self._now())
            return done

    def _update_reply(self, connection: sqlite3.Connection, reply: int, **columns: Any) -> None:
        """Update an unfinished reply of this process. Raises StoreError for any other message."""
        names = ", ".join(f"{column} = :{column}" for column in columns)
        owner = "" if self._claim is None else self._claim.token
        changed = connection.execute(
            f"UPDATE messages SET {names} WHERE id = :id AND owner = :writer", {**columns, "id": reply, "writer": owner}
        )
        if changed.rowcount != 1:
            hint = "Open the chat again to see its state."
            raise StoreError(f"Message {reply} is not a reply that is being written here", hint)

    def note_write(self, message: int, write: FileWrite) -> int:
        """Note a write before it is made; files as they were are kept up to WRITES_BYTES, the newest ones."""
        row = (message, os.fsencode(write.path), os.fsencode(write.root), write.mode, write.before, write.after)
        old = "SELECT id, sum(coalesce(length(before), 0)) OVER (ORDER BY id DESC) AS so_far FROM writes"
        with self._database.writing() as connection:
            added = connection.execute(
                "INSERT INTO writes (message, path, root, mode, before, after) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            connection.execute(
                f"DELETE FROM writes WHERE id IN (SELECT id FROM ({old}) WHERE so_far > ?)", (WRITES_BYTES,)
            )
            return int(added.lastrowid or 0)

    def forget_write(self, write: int) -> None:
        with self._database.writing() as connection:
            connection.execute("DELETE FROM writes WHERE id = ?", (write,))

    def repair_search(self) -> None:
        """Rebuild the search index: the first remedy after StoreDamagedError. Seconds per 100,000 messages.

        Raises StoreDamagedError where the messages can't be read either.
        """
        with self._database.writing() as connection:
            for index in INDEXES:
                connection.execute(EMPTY_INDEX.format(index))
                connection.execute(f"INSERT INTO {index} ({index}) VALUES ('rebuild')")

    def keep_vectors(self, model: str, vectors: Mapping[bytes, bytes]) -> None:
        with self._database.writing() as connection:
            passages.keep(connection, model, vectors)

    def recover(self) -> int:
        folder = self.file.parent
        owners = self._database.read("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL")
        gone = [row["owner"] for row in owners if not messages.is_alive(folder, row["owner"])]
        stopped = 0
        if gone:
            with self._database.writing() as connection:
                stopped = sum(connection.execute(_STOP, (owner,)).rowcount for owner in gone)
        messages.tidy(folder)
        return stopped

    def changed(self) -> bool:
        before, self._changes = self._changes, self._database.changes()
        return self._changes != before

    def follow(self, chats: Collection[str] = ()) -> Followed | None:
        """If another program replaced the file or its log, reopen it and add what only the old one had.

        chats: added in full; of others only what is newer than the open. Returns their fate and new message ids; None
        where nothing was replaced. The next call retries failures.
        """
        replaced = self._database.is_replaced()
        if not replaced and self._left is None:
            return None
        if self._left is None:
            self._left = self._leftover(chats)
        if replaced:
            self._database.close(alone=True)
            self._database = Database(self.file)
        if self._claim is not None and not messages.is_alive(
            self.file.parent, self._claim.token
        ):  # its file is gone, too
            self._claim.release()
            self._claim = None
        self.recover()
        (left, unread), self._changes = self._left, 0
        with self._database.writing() as connection:
            merged = {archive.chat.id: messages.merge(connection, archive) for archive in left}
        self._left = None
        return Followed(merged, unread)

    def _leftover(self, chats: Collection[str]) -> tuple[list[Archive], int]:
        names, found, unread = list(chats), [], 0
        wanted = "SELECT value AS id FROM json_each(?) UNION SELECT chat FROM messages WHERE id > ?"
        with suppress(StoreError), self._database.reading(replaced=True) as connection:
            rows = connection.execute(f"SELECT id FROM chats WHERE id IN ({wanted})", (json.dumps(names), self._newest))
            names = [row["id"] for row in rows]
        for name in names:
            try:
                with self._database.reading(replaced=True) as connection:
                    said = messages.select(connection, "FROM messages m WHERE m.chat = ? ORDER BY m.id", name)
                    found.append(Archive(messages.chat(connection, name), tuple(said)))
            except StoreError:
                unread += 1
        return found, unread

    def merge(self, archive: Archive) -> Merged:
        with self._database.writing() as connection:
            return messages.merge(connection, archive, stopped=True)

    def set_head(self, chat: str, message: int) -> StoredChat:
        with self._database.writing() as connection:
            messages.chat(connection, chat)
            messages.require_within(connection, chat, message)
            return messages.update_chat(connection, chat, head=message)

    def fork(self, chat: str, message: int) -> StoredChat:
        with self._database.writing() as connection:
            old = messages.chat(connection, chat)
            messages.require_within(connection, chat, message)
            now = self._now()
            copy = replace(old, title=f"{old.title} (fork)", created_at=now, updated_at=now, draft="", head=message)
            return messages.adopt(connection, Archive(copy, tuple(messages.path(connection, message))))

    def adopt(self, archive: Archive) -> StoredChat:
        with self._database.writing() as connection:
            return messages.adopt(connection, archive)

    def _now(self) -> float:
        return round(self._clock(), 6)

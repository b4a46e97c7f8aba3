"""The front of the store: what the chat and the command line ask of it, each in one transaction.

    with Store.open() as store:
        chat = store.new_chat(model="guide")
        asked = store.add_message(chat.id, None, "user", "Why is decode memory-bound?")
        reply = store.begin_reply(chat.id, asked.id, model="guide")
        store.checkpoint(reply.id, "Because every")
        store.finish_reply(reply.id, "Because every weight is read for every token.", metrics={"decode_tps": 41.5})
        for hit in store.search("weight tok"): ...

Several programs may use one file at once. A finished message never changes, and what two of them add to the same message become
siblings; a title, a draft and the head are those set last.

What can be asked of the store without changing it. Each answer is of one moment.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokamac.app.store import database, messages, search
from tokamac.app.store.database import EMPTY_INDEX, Database
from tokamac.app.store.search import parse
from tokamac.app.store.values import (
    Archive,
    Attachment,
    BranchPreview,
    FinalState,
    Hit,
    Json,
    StoreDamagedError,
    StoredChat,
    StoredMessage,
    StoreError,
    TitleOrigin,
    beyond_repair,
    storable,
)
from tokamac.engine.events import Role


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

    def chats(self, words: str = "", *, limit: int = 50, offset: int = 0, deleted: bool = False) -> list[StoredChat]:
        """Return chats, last used first, whose titles hold all the words, whatever their case and accents.

        Chats with neither message nor draft are left out. deleted: those that were deleted, instead of the others.
        """
        with self._database.reading() as connection:
            return messages.listed(connection, words, limit, offset, deleted=deleted)

    def chat(self, name: str) -> StoredChat:
        """Return the chat of this id, or the only one whose id begins so; a deleted one too."""
        with self._database.reading() as connection:
            return messages.find(connection, name)

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
            end = head or messages.get(connection, chat).head
            if end is None:
                return []
            messages.require_within(connection, chat, end)
            return messages.path(connection, end)

    def siblings(self, message: int) -> list[StoredMessage]:
        """Return the messages with the same parent, and this one among them, oldest first."""
        with self._database.reading() as connection:
            return messages.siblings(connection, message)

    def children(self, chat: str, parent: int | None) -> list[StoredMessage]:
        """Return what continues ``parent``, or with None, what the chat begins with; oldest first."""
        with self._database.reading() as connection:
            messages.get(connection, chat)
            return messages.children(connection, chat, parent)

    def tip(self, message: int) -> int:
        """Return the newest message at or below this one: where to go on when its branch is chosen."""
        with self._database.reading() as connection:
            return messages.tip(connection, message)

    def tree(self, chat: str) -> list[BranchPreview]:
        """Return every message of a chat without its text, parents first."""
        with self._database.reading() as connection:
            messages.get(connection, chat)
            return messages.branches(connection, chat)

    def archive(self, chat: str) -> Archive:
        """Return a chat with all of its messages, for export."""
        with self._database.reading() as connection:
            return Archive(messages.get(connection, chat), tuple(messages.all_of(connection, chat)))

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
            return messages.history(connection, limit, chat)

    def check(self) -> None:
        """Read the whole file and raise StoreDamagedError if it is not whole: half a second for a hundred thousand messages."""
        self._database.check()


Clock = Callable[[], float]
_MERGED_PAGES = 500
"""Of the search index in one transaction: some 2 MB."""
UNDO_S = 30 * 86400.0
"""How long a deleted chat can be brought back."""


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

        path: None is the user's own (``files.default_path``). clock: seconds since 1970. Raises StoreError where the file is of a
        newer version, of another program, or can't be used; StoreDamagedError where it is broken.
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
            with cls(
                Database(path or database.default_path()), clock
            ) as store:  # not ``open``: a reply that is ended is indexed
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
                    messages.stop_all_by(connection, claim.token)
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
            return messages.insert_chat(connection, StoredChat("", "", "words", now, now, model, settings or {}))

    def rename(self, chat: str, title: str, origin: TitleOrigin = "user") -> StoredChat:
        """Give a chat a title; one that the user gave stays, unless the user gives another."""
        with self._database.writing() as connection:
            return messages.rename(connection, chat, title, origin)

    def set_draft(self, chat: str, text: str) -> None:
        """Keep what stands in the prompt and was not sent."""
        with self._database.writing() as connection:
            messages.update(connection, chat, draft=storable(text))

    def set_model(self, chat: str, model: str) -> StoredChat:
        """Note which model the chat goes on with."""
        with self._database.writing() as connection:
            return messages.update(connection, chat, model=storable(model))

    def set_settings(self, chat: str, changes: Mapping[str, Any]) -> StoredChat:
        """Change these keys of the chat's settings and leave the others; None takes a key away."""
        with self._database.writing() as connection:
            return messages.change_settings(connection, chat, changes)

    def delete(self, chat: str) -> StoredChat:
        """Take a chat out of lists and searches; ``undelete`` brings it back until it is purged."""
        with self._database.writing() as connection:
            return messages.update(connection, chat, deleted_at=self._now())

    def undelete(self, chat: str) -> StoredChat:
        """Bring a deleted chat back."""
        with self._database.writing() as connection:
            return messages.update(connection, chat, deleted_at=None)

    def last_deleted(self) -> StoredChat | None:
        """Return the chat that was deleted last, of those that ``undelete`` can bring back; None where there is none."""
        with self._database.reading() as connection:
            return messages.last_deleted(connection)

    def purge(self, older_than_s: float = UNDO_S) -> int:
        """Remove for ever the chats deleted so many seconds ago or more, and overwrite their bytes; return how many."""
        with self._database.writing() as connection:
            gone = messages.purge(connection, self._now() - older_than_s)
        if gone:
            self._merge_index()
            self._database.merge_log()
        return gone

    def _merge_index(self) -> None:
        """A part at a time, so that other programs can write in between."""
        pages, more = -_MERGED_PAGES, True
        while more:
            with self._database.writing() as connection:
                more = search.merge_index(connection, pages)
            pages = _MERGED_PAGES

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
            "complete",
            self._now(),
            model,
            settings or {},
            attachments=tuple(attachments),
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
            messages.checkpoint(connection, reply, self._token, text, thinking)

    def finish_reply(
        self, reply: int, text: str, thinking: str = "", *, state: FinalState = "complete", metrics: Json | None = None
    ) -> StoredMessage:
        """End a reply, with all of its text. It never changes again."""
        with self._database.writing() as connection:
            return messages.finish(
                connection,
                reply,
                self._token,
                text=text,
                thinking=thinking,
                state=state,
                metrics=metrics,
                now=self._now(),
            )

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
        with self._database.reading() as connection:
            gone = messages.abandoned(connection, folder)
        stopped = 0
        if gone:
            with self._database.writing() as connection:
                stopped = sum(messages.stop_all_by(connection, owner) for owner in gone)
        messages.tidy(folder)
        return stopped

    def set_head(self, chat: str, message: int) -> StoredChat:
        """Let the chat stand at another of its messages."""
        with self._database.writing() as connection:
            return messages.set_head(connection, chat, message)

    def fork(self, chat: str, message: int) -> StoredChat:
        """Copy the messages that lead to this one, and it, into a new chat; return that."""
        with self._database.writing() as connection:
            old = messages.get(connection, chat)
            messages.require_within(connection, chat, message)
            now = self._now()
            copy = replace(old, title=f"{old.title} (fork)", created_at=now, updated_at=now, draft="", head=message)
            return messages.adopt(connection, Archive(copy, tuple(messages.path(connection, message))))

    def adopt(self, archive: Archive) -> StoredChat:
        """Store a conversation that comes from elsewhere as a new chat, under ids of its own, and return that."""
        with self._database.writing() as connection:
            return messages.adopt(connection, archive)

    @property
    def _token(self) -> str:
        return self._claim.token if self._claim is not None else ""

    def _now(self) -> float:
        return round(self._clock(), 6)

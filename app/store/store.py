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
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokamac.app.store import chats, claims, files, messages, search, tree
from tokamac.app.store.database import Database
from tokamac.app.store.errors import StoreDamagedError, StoreError, beyond_repair
from tokamac.app.store.questions import Questions
from tokamac.app.store.schema import EMPTY_INDEX
from tokamac.app.store.text import storable
from tokamac.app.store.values import Archive, Attachment, Chat, FinalState, Json, Message, TitleOrigin
from tokamac.engine.events import Role

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
        self._claim: claims.Claim | None = None

    @classmethod
    def open(cls, path: Path | None = None, *, clock: Clock = time.time) -> Self:
        """Open the file, made where it is missing; replies that a process left that died are ended as stopped.

        path: None is the user's own (``files.default_path``). clock: seconds since 1970. Raises StoreError where the file is of a
        newer version, of another program, or can't be used; StoreDamagedError where it is broken.
        """
        store = cls(Database(path or files.default_path()), clock)
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
                Database(path or files.default_path()), clock
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
        return files.set_aside(path or files.default_path(), datetime.now())

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

    def new_chat(self, *, model: str = "", settings: Json | None = None) -> Chat:
        """Begin a chat. It is listed once it has a message or a draft, and titled by the first words the user sends."""
        now = self._now()
        with self._database.writing() as connection:
            return chats.insert(connection, Chat("", "", "words", now, now, model, settings or {}))

    def rename(self, chat: str, title: str, origin: TitleOrigin = "user") -> Chat:
        """Give a chat a title; one that the user gave stays, unless the user gives another."""
        with self._database.writing() as connection:
            return chats.rename(connection, chat, title, origin)

    def set_draft(self, chat: str, text: str) -> None:
        """Keep what stands in the prompt and was not sent."""
        with self._database.writing() as connection:
            chats.update(connection, chat, draft=storable(text))

    def set_model(self, chat: str, model: str) -> Chat:
        """Note which model the chat goes on with."""
        with self._database.writing() as connection:
            return chats.update(connection, chat, model=storable(model))

    def set_settings(self, chat: str, changes: Mapping[str, Any]) -> Chat:
        """Change these keys of the chat's settings and leave the others; None takes a key away."""
        with self._database.writing() as connection:
            return chats.change_settings(connection, chat, changes)

    def delete(self, chat: str) -> Chat:
        """Take a chat out of lists and searches; ``undelete`` brings it back until it is purged."""
        with self._database.writing() as connection:
            return chats.update(connection, chat, deleted_at=self._now())

    def undelete(self, chat: str) -> Chat:
        """Bring a deleted chat back."""
        with self._database.writing() as connection:
            return chats.update(connection, chat, deleted_at=None)

    def last_deleted(self) -> Chat | None:
        """Return the chat that was deleted last, of those that ``undelete`` can bring back; None where there is none."""
        with self._database.reading() as connection:
            return chats.last_deleted(connection)

    def purge(self, older_than_s: float = UNDO_S) -> int:
        """Remove for ever the chats deleted so many seconds ago or more, and overwrite their bytes; return how many."""
        with self._database.writing() as connection:
            gone = chats.purge(connection, self._now() - older_than_s)
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
    ) -> Message:
        """Add a whole message after ``parent``, or with None as a beginning; the chat then stands at it.

        To edit a message is to add another after the same parent.
        """
        draft = Message(
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
    ) -> Message:
        """Add a reply that is still being written here; the chat then stands at it.

        text, thinking: what it begins with, to continue another that was stopped.
        """
        if self._claim is None:
            self._claim = claims.Claim(self.file.parent)
        draft = Message(0, chat, parent, "assistant", text, thinking, "partial", self._now(), model, settings or {})
        with self._database.writing() as connection:
            return messages.add(connection, draft, owner=self._claim.token)

    def checkpoint(self, reply: int, text: str, thinking: str = "") -> None:
        """Keep all that a reply holds so far."""
        with self._database.writing() as connection:
            messages.checkpoint(connection, reply, self._token, text, thinking)

    def finish_reply(
        self,
        reply: int,
        text: str,
        thinking: str = "",
        *,
        state: FinalState = "complete",
        metrics: Json | None = None,
    ) -> Message:
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
        claims.tidy(folder)
        return stopped

    def set_head(self, chat: str, message: int) -> Chat:
        """Let the chat stand at another of its messages."""
        with self._database.writing() as connection:
            return messages.set_head(connection, chat, message)

    def fork(self, chat: str, message: int) -> Chat:
        """Copy the messages that lead to this one, and it, into a new chat; return that."""
        with self._database.writing() as connection:
            old = chats.get(connection, chat)
            tree.require_within(connection, chat, message)
            now = self._now()
            copy = replace(old, title=f"{old.title} (fork)", created_at=now, updated_at=now, draft="", head=message)
            return messages.adopt(connection, Archive(copy, tuple(tree.path(connection, message))))

    def adopt(self, archive: Archive) -> Chat:
        """Store a conversation that comes from elsewhere as a new chat, under ids of its own, and return that."""
        with self._database.writing() as connection:
            return messages.adopt(connection, archive)

    @property
    def _token(self) -> str:
        return self._claim.token if self._claim is not None else ""

    def _now(self) -> float:
        return round(self._clock(), 6)

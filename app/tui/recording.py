"""Keeps the conversation on disk while it goes on: the prompt before its reply begins, the reply every two seconds.

It is told what the screen is told. The store is written at once, on this thread: a transaction takes about a millisecond.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.store.values import TitleOrigin
from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.kept import tree_of
from tokamac.app.tui.ledger import Asked, Ledger
from tokamac.app.tui.memory import Memory
from tokamac.app.tui.own import Own, as_settings, own_of
from tokamac.app.tui.session import Session
from tokamac.app.tui.steps import Step
from tokamac.app.tui.tree import Tree
from tokamac.engine.options import NOTHING_TOLD

CHECKPOINT_S = 2.0
LEFT = "What was not sent stays in the chat that was left."
AGAIN = "Not saved: {} It is tried again with the next prompt."
SAVED = "The chat is saved again, all of it."
LOST = "What was said and is not saved is lost: {}"
TITLE = "The title was not kept: {}"


class Recording:
    """The chat that is held, in the store. While the store fails the chat goes on without it, ``tell`` is told why, and all that
    is not stored is tried again with each prompt, at the end of each reply, and when another chat is opened.

    unsaved: whether anything of the chat is not in the store because it failed. title: the chat's, as it was stored when it was
    last looked up; "" while there is none.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        memory: Memory,
        tell: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.unsaved, self.title = False, ""
        self._session = session
        self._memory = memory
        self._tell = tell
        self._clock = clock
        self._ledger = Ledger(store)
        self._owed: dict[str, Callable[[str], object]] = {}  # to be written of the chat, beside its messages
        self._written_at = 0.0
        self._draft = ""  # as it is in the store

    @property
    def chat(self) -> str | None:
        """The id of the chat; None until there is something to keep."""
        return self._ledger.chat

    @property
    def ledger(self) -> Ledger:
        """What of the chat is in the store. It tells that when the chat was left, too."""
        return self._ledger

    # What the session does ------------------------------------------------------------------------------------------------

    def begun(self, turn: Turn) -> None:
        """A prompt was sent."""
        session, said = self._session, self._session.talk.said  # what a reply that is continued begins with
        model = session.load.model
        settings = {"sampling": asdict(session.sampling), "kv": asdict(session.load.kv), **_adapter(session)}
        if session.template != NOTHING_TOLD:
            settings["template"] = asdict(session.template)
        self._ledger.ask(session.talk.tree, turn.reply_key, Asked(model, settings, said.text, said.thinking))
        self._owed.pop("head", None)
        self._owed["model"] = lambda chat: self._keep_model(chat, model)
        self._save(AGAIN)
        self._written_at = self._clock()

    def grew(self) -> None:
        """The reply has grown: keep it, if it is time."""
        reply = self._ledger.growing
        if reply is not None and not self.unsaved and self._clock() - self._written_at >= CHECKPOINT_S:
            self._written_at = self._clock()
            said = self._session.talk.said
            try:
                self.store.checkpoint(reply, said.text, said.thinking)
            except StoreError as error:
                self._fail(AGAIN, error)

    def ended(self, reply: Reply) -> None:
        """The reply has ended."""
        if self._ledger.awaited:
            self._ledger.end(reply)
            self._save()

    def moved(self) -> None:
        """Another path of the conversation is read."""
        head = self._session.talk.tree.head
        if head is not None and self._ledger.stored(head) is not None:
            self._owe("head", lambda chat: self._keep_head(chat, head))

    def left(self) -> None:
        """Another conversation is held, of which nothing is kept yet."""
        self._owed.pop("draft", None)  # whoever left it was told that it is not kept
        if self.unsaved:
            self._save(LOST)
        self._ledger, self._owed, self.unsaved, self._draft = Ledger(self.store), {}, False, ""
        self.title = ""

    def drafted(self, text: str) -> bool:
        """This stands in the prompt, not sent; return whether it is kept. An empty chat with a draft is kept, too."""
        self._owed.pop("draft", None)
        if text != self._draft:
            self._owe("draft", lambda chat: self._keep_draft(chat, text))
        return text == self._draft

    # What the user wishes -------------------------------------------------------------------------------------------------

    def read(self, chat: str) -> tuple[Tree, str]:
        """Return the conversation ``chat``, to be opened, and the draft that was left in it. Raises StoreError."""
        if chat == self.chat and self.lacking():
            raise StoreError("What was said in this chat is not all saved", "Read again now, it would be lost.")
        archive = self.store.archive(chat)
        if archive.chat.deleted_at is not None:
            raise StoreError(f"Chat {chat} was deleted", "What is said in it would be lost.")
        return tree_of(archive.messages, archive.chat.head), archive.chat.draft

    def hold(self, chat: str, tree: Tree, draft: str) -> None:
        """Go on with ``chat``, which was read and is held now."""
        self.left()
        self._draft = draft
        self._ledger = Ledger(self.store, chat, tree)
        self.look_up_title()

    def holds(self, chat: str) -> bool:
        """Whether ``chat`` is held, and need not be read again: no window has added to it, or it can't be left now.

        Raises StoreError.
        """
        if chat != self.chat:
            return False
        return self.unsaved or self._session.replying or bool(self._session.queued) or self._ledger.is_current()

    def own(self, chat: str) -> Own:
        """Return what ``chat`` has of its own. Raises StoreError."""
        return own_of(self.store.chat(chat).settings)

    def keep_own(self) -> None:
        """Keep what the chat that is held has of its own."""
        if self.chat is not None:
            self._owe("own", lambda chat: self.store.set_settings(chat, as_settings(self._memory.own)))

    def stored(self, key: int) -> int | None:
        """Return the id in the store of a message that is held."""
        return self._ledger.stored(key)

    def held(self, message: int) -> int | None:
        """Return the key under which a message of the store is held."""
        return self._ledger.held(message)

    def lacking(self) -> str:
        """Say how many turns of the path that is read are not in the store, after another try to store them; "": all are."""
        if self.unsaved:
            self._save()
        turns = self._session.turns
        lacking = sum(self._ledger.lacks(turn) for turn in turns)
        return f"{lacking} of {len(turns)} turns are not in it: they could not be saved." if lacking else ""

    def retitle(self, title: str) -> bool:
        """Give the chat the user's title; return whether it is kept. What the store says against it is told."""
        return (chat := self.chat) is not None and self._entitle(chat, title, "user")

    def look_up_title(self) -> None:
        """Know the title that the chat has now: the store makes the first one, and the list of chats can change it."""
        if self.chat is not None:
            with suppress(StoreError):  # it is told when the next message can't be kept
                self.title = self.store.chat(self.chat).title

    def entitle(self) -> list[Step]:
        """Return what to ask for a title by the model, if the chat is to have one now. To be called now and then."""
        return self._session.entitle() if self._session.titles.wanted and self.may_be_entitled() else []

    def may_be_entitled(self) -> bool:
        """Whether the chat is kept, has but its first words for a title, and the settings allow another."""
        if self.chat is None or self.unsaved or self._memory.settings.titles != "model":
            return False
        try:
            return self.store.chat(self.chat).title_origin == "words"
        except StoreError:
            return False  # it is told when the next message can't be kept

    def entitled(self, title: str) -> None:
        """The model gave the chat a title; the user's stays."""
        if (chat := self.chat) is not None:
            self._entitle(chat, title, "model")

    def close(self, draft: str) -> None:
        """Keep what stands in the prompt, and the running reply as far as it came; close the store."""
        self._owed.pop("draft", None)
        if draft != self._draft:
            self._owed["draft"] = lambda chat: self._keep_draft(chat, draft)
        running = self._ledger.running
        if running:
            self._ledger.end(replace(self._session.talk.said, ending="cancelled"))
        if running or self.unsaved or self._owed:
            self._save(LOST)
        try:
            self.store.close()
        except StoreError as error:
            self._fail(LOST, error)

    # Writing --------------------------------------------------------------------------------------------------------------

    def _owe(self, what: str, write: Callable[[str], object]) -> None:
        """Write it now, or while the store fails, when all that is not stored is tried again."""
        self._owed[what] = write
        if not self.unsaved:
            self._save()

    def _save(self, failing: str = "") -> None:
        """Store all that is not stored yet. failing: what to say where that fails; "": nothing new, if it failed before."""
        try:
            chat, said = self._ledger.catch_up(self._new_chat)
            while self._owed:
                what, write = next(iter(self._owed.items()))
                write(chat)
                del self._owed[what]
        except StoreError as error:
            if failing or not self.unsaved:
                self._tell((failing or AGAIN).format(error.one_line()))
            self.unsaved = True
            return
        self.look_up_title()
        if self.unsaved:
            self.unsaved = False
            self._tell(SAVED)
        if said:
            self._tell(said)

    def _fail(self, failing: str, error: StoreError) -> None:
        self.unsaved = True
        self._tell(failing.format(error.one_line()))

    def _new_chat(self) -> str:
        own = as_settings(self._memory.own)
        settings = {key: value for key, value in own.items() if value is not None}
        made = self.store.new_chat(model=self._session.load.model, settings=settings).id
        self._memory.system_drafts.begun(made)
        return made

    def _keep_model(self, chat: str, model: str) -> None:
        if self.store.chat(chat).model != model:
            self.store.set_model(chat, model)

    def _keep_head(self, chat: str, head: int) -> None:
        if (stored := self._ledger.stored(head)) is not None:
            self.store.set_head(chat, stored)

    def _keep_draft(self, chat: str, text: str) -> None:
        self.store.set_draft(chat, text)
        self._draft = text

    def _entitle(self, chat: str, title: str, origin: TitleOrigin) -> bool:
        try:
            self.title = self.store.rename(chat, title, origin).title
        except StoreError as error:
            self._tell(TITLE.format(error.one_line()))
            return False
        return True


def _adapter(session: Session) -> dict[str, Any]:
    """Return what is added to the model, as it is stored; nothing where nothing is."""
    if session.load.adapter is None:
        return {}
    digest = None if session.info is None else session.info.adapter_digest
    return {"adapter": {"name": session.load.adapter, "digest": digest}}

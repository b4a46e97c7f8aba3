"""Keeps the conversation on disk while it goes on: the prompt before its reply begins, the reply every two seconds.

It is told what the screen is told. The store is written at once, on this thread: a transaction takes about a millisecond.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.kept import measured, state_of, tree_of
from tokamac.app.tui.memory import Memory
from tokamac.app.tui.own import Own, as_settings, own_of
from tokamac.app.tui.session import Session
from tokamac.app.tui.tree import Tree

CHECKPOINT_S = 2.0


class Recording:
    """The chat that is held, in the store. Once the store fails the chat goes on without it, and ``tell`` is told why.

    chat: its id; None until there is something to keep.
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
        self.chat: str | None = None
        self._session = session
        self._memory = memory
        self._tell = tell
        self._clock = clock
        self._ids: dict[int, int] = {}  # of the tree's keys in the store
        self._reply: int | None = None
        self._written_at = 0.0
        self._draft = ""
        self._failed = False

    # What the session does ------------------------------------------------------------------------------------------------

    def begun(self, turn: Turn) -> None:
        """A prompt was sent."""
        self._try(lambda: self._begun(turn))

    def grew(self) -> None:
        """The reply has grown: keep it, if it is time."""
        if self._reply is not None and self._clock() - self._written_at >= CHECKPOINT_S:
            self._written_at = self._clock()
            said, reply = self._session.talk.said, self._reply
            self._try(lambda: self.store.checkpoint(reply, said.text, said.thinking))

    def ended(self, reply: Reply) -> None:
        """The reply has ended."""
        stored, self._reply = self._reply, None
        if stored is not None:
            self._try(
                lambda: self.store.finish_reply(
                    stored, reply.text, reply.thinking, state=state_of(reply), metrics=measured(reply)
                )
            )

    def moved(self) -> None:
        """Another path of the conversation is read."""
        head = self._session.talk.tree.head
        if self.chat is not None and head in self._ids:
            chat = self.chat
            self._try(lambda: self.store.set_head(chat, self._ids[head]))

    def left(self) -> None:
        """Another conversation is held, of which nothing is kept yet."""
        self.chat, self._ids, self._reply, self._draft = None, {}, None, ""

    def drafted(self, text: str) -> None:
        """This stands in the prompt, not sent. An empty chat with a draft is kept, too."""
        if text != self._draft:
            self._draft = text
            self._try(lambda: self.store.set_draft(self._chat(), text))

    # What the user wishes -------------------------------------------------------------------------------------------------

    def read(self, chat: str) -> tuple[Tree, str]:
        """Return the conversation ``chat``, to be opened, and the draft that was left in it. Raises StoreError."""
        archive = self.store.archive(chat)
        if archive.chat.deleted_at is not None:
            raise StoreError(f"Chat {chat} was deleted", "What is said in it would be lost.")
        return tree_of(archive.messages, archive.chat.head), archive.chat.draft

    def hold(self, chat: str, tree: Tree, draft: str) -> None:
        """Go on with ``chat``, which was read and is held now."""
        self.left()
        self._draft = draft
        self.chat, self._ids = chat, {key: key for key in tree.nodes}

    def own(self, chat: str) -> Own:
        """Return what ``chat`` has of its own. Raises StoreError."""
        return own_of(self.store.chat(chat).settings)

    def keep_own(self) -> None:
        """Keep what the chat that is held has of its own."""
        if (chat := self.chat) is not None:
            self._try(lambda: self.store.set_settings(chat, as_settings(self._memory.own)))

    def stored(self, key: int) -> int | None:
        """Return the id in the store of a message that is held."""
        return self._ids.get(key)

    def held(self, message: int) -> int | None:
        """Return the key under which a message of the store is held."""
        return next((key for key, stored in self._ids.items() if stored == message), None)

    def retitle(self, title: str) -> None:
        """Give the chat the user's title."""
        if (chat := self.chat) is not None:
            self._try(lambda: self.store.rename(chat, title))

    def close(self, draft: str) -> None:
        """Keep what stands in the prompt, and the running reply as far as it came; close the store."""
        if draft or self._draft:
            self.drafted(draft)
        if self._reply is not None:
            self.ended(replace(self._session.talk.said, ending="cancelled"))
        self._try(self.store.close)

    def _begun(self, turn: Turn) -> None:
        chat, tree = self._chat(), self._session.talk.tree
        if turn.key not in self._ids:
            parent = tree.nodes[turn.key].parent
            before = None if parent is None else self._ids.get(parent)
            kept = self.store.add_message(chat, before, "user", turn.prompt, attachments=turn.attachments)
            self._ids[turn.key] = kept.id
            if not turn.prompt and not self.store.chat(chat).title:  # titles are made of the user's words
                self.store.rename(chat, turn.attachments[0].name, "words")
        model, sampling = self._session.load.model, asdict(self._session.sampling)
        settings = {"sampling": sampling, "kv": asdict(self._session.load.kv)}
        said = self._session.talk.said  # what a reply that is continued begins with
        begun = {"text": said.text, "thinking": said.thinking}
        reply = self.store.begin_reply(chat, self._ids[turn.key], model=model, settings=settings, **begun)
        self._reply = self._ids[turn.reply_key] = reply.id
        self._written_at = self._clock()

    def _chat(self) -> str:
        if self.chat is None:
            own = as_settings(self._memory.own)
            settings = {key: value for key, value in own.items() if value is not None}
            self.chat = self.store.new_chat(model=self._session.load.model, settings=settings).id
        return self.chat

    def _try(self, write: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            write()
        except StoreError as error:
            self._failed = True
            self._tell(f"The chat is not kept any more: {error.one_line()}")

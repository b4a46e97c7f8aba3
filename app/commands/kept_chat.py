"""A stored chat continued by a single answer (``ask``), saved as the chat itself saves it."""

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict

from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.events import Event, Finished, Message, TextChunk
from tokamac.engine.options import NOTHING_TOLD, KVSpec, Sampling, TemplateOptions
from tokamac.engine.text.tokenizer import Tokenizer

from .. import settings, system_files
from ..chat.attachments import Draft
from ..chat.conversation import Conversation, Ending
from ..chat.preferences import own_of, template_record
from ..chat.recording import CHECKPOINT_S, Ledger, ReplyRequest, tree_of
from ..chat.start import ChatOptions, open_store
from ..chat.state import reason
from ..models.local import lasting
from ..store.database import default_path
from ..store.store import Questions, Store
from ..store.values import StoreError, ToolResult, left_out_of


def own_text(tokenizer: Tokenizer, characters: int, *, agreed: bool) -> str:
    """Return the newest kept chats as the model's template writes them, once the user agrees. Raises OptionError, StoreError."""
    found, count = "", 0
    with closing(Questions.open_to_read(default_path())) as store:
        for chat in store.chats():
            told = [Message(each.role, each.text) for each in store.path(chat.id, chat.head)
                    if each.role in ("user", "assistant") and each.state == "complete" and each.text]  # fmt: skip
            if len(found) >= characters:
                break
            if told:
                plain = "\n\n".join(each.content for each in told)
                found += tokenizer.render(told, reply=False) if tokenizer.has_chat_template else f"{plain}\n\n"
                count += 1
    if not found:
        raise OptionError("there is no kept chat to compare on", "Chat first, or give a --text.")
    asked = (
        f"{count} of your chats, {len(found):,} characters, stay on this machine; the report shows a few words of them."
    )
    if not agreed:
        if not sys.stdin.isatty():
            raise OptionError("your chats are read only if you agree", "Add --yes.")
        print(f"{asked} Compare on them? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise OptionError("nothing was compared", "Answer y, or give a --text.")
    return found[:characters]


class KeptChat:
    """A stored chat at its head. system, sampling, template, kv: the general ones unless it has its own."""

    def __init__(self, store: Store, chat: str, known: settings.Settings) -> None:
        archive = store.archive(chat)
        own = own_of(archive.chat.settings)
        tree = tree_of(archive.messages, archive.chat.head)
        writing = {message.id for message in archive.messages if message.state == "partial"}
        if any(node.key in writing for node in tree.path_to(tree.head)):
            raise StoreError(
                f"Chat {chat} is being written by another tokamac", "Wait for that reply, or stop it there."
            )
        self.id, self.model = chat, archive.chat.model
        system, home = known.system if own.system is None else own.system, settings.default_path().parent
        parts = [*system_files.project(own.project), *system_files.memory(home, own.profile or "")]
        self.system = system_files.with_parts(system, parts)
        self.sampling = own.sampling or known.sampling
        self.template = own.template or known.template
        self.kv = known.kv
        self._store = store
        self._conversation = Conversation(tree, left_out_of(archive.chat.settings))
        self._ledger = Ledger(store, chat, tree)
        self._request = ReplyRequest(self.model)
        self._kept_s = 0.0

    @classmethod
    def open(cls, chat: str | None, known: settings.Settings) -> "KeptChat":
        """Open by ID prefix; None: the last chat. Raises StoreError."""
        store, found = open_store(ChatOptions(chat=chat, resume=chat is None))
        try:
            if found is None:
                raise StoreError("there is no saved chat yet", "`tokamac` begins one.")
            return cls(store, found, known)
        except BaseException:
            store.close()
            raise

    def ask(self, draft: Draft, model: str, wanted: Sampling, kv: KVSpec, template: TemplateOptions) -> None:
        """Save the prompt and its model. Raises StoreError."""
        asked = {"sampling": asdict(wanted), "kv": asdict(kv)}
        if template != NOTHING_TOLD:
            asked["template"] = template_record(template)
        self._request = ReplyRequest(lasting(model), asked)
        turn = self._conversation.ask(draft, self._conversation.tree.head)
        self._begin(turn.reply_key)
        if self.model != self._request.model:
            self._store.set_model(self.id, self._request.model)

    def answer(self, results: Sequence[ToolResult]) -> None:
        """Save tool results; another reply follows. Raises StoreError."""
        tree = self._conversation.tree
        for result in results:
            assert tree.head is not None  # the reply that called
            tree.add_result(tree.head, result)
        assert tree.head is not None
        self._begin(self._conversation.answer(tree.head).reply_key)

    def messages(self, system: str) -> tuple[Message, ...]:
        return self._conversation.request(system)

    def hear(self, events: Iterator[Event]) -> Generator[Event]:
        """Yield a reply's events, saving it every few seconds and however it ends. Raises StoreError."""
        ending: Ending = "cancelled"
        finished, why = None, ""
        try:
            for event in events:
                self._conversation.progress.update(event)
                if isinstance(event, TextChunk):
                    self._conversation.grow(event.text, event.kind, time.monotonic())
                    self._checkpoint()
                elif isinstance(event, Finished):
                    finished, ending = event, event.reason
                yield event
        except TokamacError as error:
            ending, why = "failed", reason(error.message, error.hint)
            raise
        finally:
            said = self._conversation.end(ending, time.monotonic(), self._request.model, finished, reason=why)
            self._ledger.end(said)
            self._keep()

    def close(self) -> None:
        self._store.close()

    def _begin(self, reply: int) -> None:
        self._ledger.ask(self._conversation.tree, reply, self._request)
        self._keep()
        self._kept_s = time.monotonic()

    def _checkpoint(self) -> None:
        now, reply = time.monotonic(), self._ledger.growing
        if reply is not None and now - self._kept_s >= CHECKPOINT_S:
            self._kept_s, said = now, self._conversation.partial
            with suppress(StoreError):  # the whole reply is tried again at its end
                self._store.checkpoint(reply, said.text, said.thinking)

    def _keep(self) -> None:
        self.id, _ = self._ledger.catch_up(lambda: self._store.new_chat(model=self._request.model).id)

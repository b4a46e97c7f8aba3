"""A conversation: its messages, and what may be done with them. The engine finds what of it is computed already."""

import contextlib
import operator
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokamac.engine.continuation import unfinished
from tokamac.engine.errors import EngineClosedError, OptionError
from tokamac.engine.events import Event, Finished, Message, TextChunk
from tokamac.engine.given import given_messages, given_sampling, given_text, given_words
from tokamac.engine.options import Sampling
from tokamac.engine.price import Action, Branch, Continue, Edit, Price, Regenerate, Send
from tokamac.engine.reply_stream import ReplyStream

if TYPE_CHECKING:
    from tokamac.engine.session import Engine


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a reply was asked for with.

    now: the messages then. after: those it comes after. before: those to go back to, if it fails before it says anything.
    begun: what it goes on with.
    """

    now: tuple[Message, ...]
    after: tuple[Message, ...]
    before: tuple[Message, ...]
    begun: Message | None = None


class Chat:
    """A conversation with an engine's model. Made by ``engine.chat``.

    ``messages`` are the turns without the system prompt. ``send``, ``regenerate`` and ``continue_reply`` yield events; stop
    iterating, or close the iterator, to cancel: what was said so far stays in ``messages``; ``cancel`` of the iterator does so from
    another thread. They wait for a reply in progress, and so does ``price``.

    A conversation has one turn at a time: while a reply that one thread asked for is not at its end, ``send``, ``regenerate``,
    ``continue_reply`` and ``edit`` raise OptionError on any other. Chats of one engine, branches among them, may be used by
    several threads at once.
    """

    def __init__(self, engine: "Engine", system: str | None = None, messages: Sequence[Message] = ()) -> None:
        self._engine = engine
        self.system = None if system is None else given_text(system, "the system prompt")
        self._messages = given_messages(messages)
        self._turn = threading.Lock()  # held while messages are changed by who asks; never while a reply is made
        self._asker: int | None = None  # the thread that asked last
        self._reply: weakref.ref[ReplyStream] | None = None

    def __repr__(self) -> str:
        return f"<Chat of {len(self._messages)} messages with {self._engine!r}>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far, oldest first."""
        return tuple(self._messages)

    def send(self, text: str, sampling: Sampling | None = None) -> ReplyStream:
        """Add a user's message and generate the reply. Raises OptionError for an empty message.

        A message before it that was never answered (cancelled at once, say) is left out: templates refuse two in a row. Where the
        reply fails before it says anything, the messages are what they were before.
        """
        added, how = Message("user", given_words(text)), given_sampling(sampling)
        with self._own_turn():
            before = self.messages
            self._messages = [*self._answered(), added]
            return self._begun(self._record(_Asked(self.messages, self.messages, before), how))

    def regenerate(self, sampling: Sampling | None = None) -> ReplyStream:
        """Generate the last reply again, or the missing one after an edit. Raises OptionError when there is no question.

        The last reply stays until the new one has ended, or was cancelled; for good, where that says nothing.
        """
        how = given_sampling(sampling)
        with self._own_turn():
            now = self.messages
            asked = now[:-1] if now and now[-1].role == "assistant" else now
            if not asked:
                raise OptionError("there is nothing to regenerate", "Send a message first.")
            return self._begun(self._record(_Asked(now, asked, now), how))

    def continue_reply(self, sampling: Sampling | None = None) -> ReplyStream:
        """Generate the rest of the last reply, which was cut: at its token limit, or by cancelling. It becomes one message with it.

        TextChunks are what is new; Finished holds all of the reply. Raises OptionError where no reply is last, or it is empty.
        """
        how = given_sampling(sampling)
        with self._own_turn():
            now = self.messages
            return self._begun(self._record(_Asked(now, now[:-1], now, unfinished(now)), how))

    def edit(self, index: int, text: str) -> None:
        """Replace the text of message ``index`` and drop what followed it; ``regenerate`` then answers it.

        Raises OptionError when there is no such message, and for an empty text.
        """
        words = given_words(text)
        with self._own_turn():
            self._check(index)
            self._messages[index:] = [Message(self._messages[index].role, words)]

    def branch(self, index: int) -> "Chat":
        """Return a new chat that begins with the messages up to and including ``index``; this one stays as it is.

        Raises OptionError when there is no such message.
        """
        self._check(index)
        return Chat(self._engine, self.system, self._messages[: index + 1])

    def price(self, action: Action) -> Price:
        """Return what an action would take until the reply's first token, before it is taken: ``Send``, ``Regenerate``,
        ``Continue``, ``Edit``, ``Branch``. Waits for a reply in progress. Raises OptionError where the action would.
        """  # fmt: skip
        if isinstance(action, Send | Edit):
            given_words(action.text)
        return self._engine.price(self._prompt(self._after(action)), continues=isinstance(action, Continue))

    def warm(self, text: str = "") -> None:
        """Compute ahead what is certain of the conversation, and of a message that begins with ``text``. Returns at once.

        Any request ends it; what was computed is found by the next.
        """
        self._engine.warm_ahead(self._prompt(self._after(Send(given_text(text, "the message")))))

    def _reread(self) -> None:
        """Templates drop earlier thinking: read the visible answer alone while nothing else is to do, or the next turn must."""
        with contextlib.suppress(EngineClosedError):
            self.warm()

    def _after(self, action: Action) -> list[Message]:
        """Return the messages that an action would have answered."""
        messages = self._messages
        match action:
            case Send(text):
                return [*self._answered(), Message("user", text)]
            case Continue():
                return [*messages[:-1], unfinished(messages)]
            case Regenerate():
                return messages[:-1] if messages and messages[-1].role == "assistant" else messages
            case Edit(index, text):
                self._check(index)
                return [*messages[:index], Message(messages[index].role, text)]
            case Branch(index):
                self._check(index)
                kept = messages[: index + 1]
                return kept if kept[-1].role == "user" else [*kept, Message("user", "")]
        raise OptionError(f"{action!r:.60} is no action", "Use Send, Regenerate, Continue, Edit or Branch.")

    def _answered(self) -> list[Message]:
        """Return the messages without a last one of the user's that was never answered."""
        messages = self._messages
        return messages[:-1] if messages and messages[-1].role == "user" else messages

    def _prompt(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *messages]

    def _check(self, index: object) -> None:
        if not isinstance(index, int) or not 0 <= index < len(self._messages):
            raise OptionError(
                f"there is no message {index!r:.60}", f"The chat has {len(self._messages)}, counted from 0."
            )

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Change the messages for this thread. Raises OptionError while another one's reply is not at its end."""
        with self._turn:
            reply = None if self._reply is None else self._reply()
            if reply is not None and not reply.ended and self._asker != threading.get_ident():
                raise OptionError(
                    "this chat is being answered on another thread",
                    "Read that reply to its end or close it first; or ask in a chat of its own (branch).",
                )
            yield

    def _begun(self, reply: ReplyStream) -> ReplyStream:
        """Note whose turn it is now: this thread's, until the reply is at its end, closed, or let go of."""
        self._asker, self._reply = threading.get_ident(), weakref.ref(reply)
        return reply

    def _record(self, asked: _Asked, sampling: Sampling) -> ReplyStream:
        begun = asked.begun
        prompt = self._prompt(asked.after if begun is None else (*asked.after, begun))
        events = self._engine.generate(prompt, sampling, continues=begun is not None)
        return ReplyStream(self._recorded(asked, events), events)

    def _recorded(self, asked: _Asked, reply: ReplyStream) -> Generator[Event, None, None]:
        """Yield the events of a reply, and keep what it said.

        An edit since it was asked for, or another reply, changes what it would belong to: then it belongs to nothing.
        """
        begun = asked.begun
        said = Message("assistant", "") if begun is None else begun
        whole = False
        try:
            with contextlib.closing(reply) as events:
                for event in events:
                    if isinstance(event, TextChunk):
                        said = _longer(said, event)
                    elif isinstance(event, Finished):
                        said, whole = Message("assistant", event.text, event.thinking), True
                    yield event
        except Exception:
            if not whole and said in (begun, Message("assistant", "")) and self._is_as(asked.now):
                self._messages[:] = asked.before
            raise
        finally:
            new = (said.content or said.thinking) and (whole or said != begun)
            if new and self._is_as(asked.now):
                self._messages[:] = [*asked.after, said]
                if said.thinking:
                    self._reread()

    def _is_as(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation is still this one: the very same messages."""
        return len(messages) == len(self._messages) and all(map(operator.is_, messages, self._messages))


def _longer(said: Message, chunk: TextChunk) -> Message:
    if chunk.kind == "answer":
        return replace(said, content=said.content + chunk.text)
    return replace(said, thinking=said.thinking + chunk.text)

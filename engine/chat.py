"""Conversations: messages and actions on them; the engine reuses what is computed. No MLX here."""

import contextlib
import operator
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import EngineClosedError, OptionError
from .events import (
    Action,
    Branch,
    Continue,
    Edit,
    Event,
    Finished,
    Message,
    Price,
    Regenerate,
    Send,
    TextChunk,
    ToolCall,
    given_messages,
    given_text,
    given_words,
    unfinished,
)
from .options import Sampling, TemplateOptions, given_sampling, given_template
from .schedule.stream import ReplyHandle, ReplyStream

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class _Asked:
    now: tuple[Message, ...]
    after: tuple[Message, ...]
    before: tuple[Message, ...]
    begun: Message | None = None


class Chat:
    """A conversation with an engine's model, from ``engine.chat``.

    ``messages`` excludes the system prompt. ``send``, ``regenerate`` and ``continue_reply`` yield events. To
    cancel, stop iterating, close the iterator or call its ``cancel`` from any thread; partial text stays in
    ``messages``. They and ``price`` wait for a reply in progress. ``template`` may change between replies.

    While one thread's reply is running, ``send``, ``regenerate``, ``continue_reply`` and ``edit`` raise
    OptionError on others. Different chats of an engine may be used in parallel.
    """

    def __init__(
        self,
        engine: "Engine",
        system: str | None = None,
        messages: Sequence[Message] = (),
        template: TemplateOptions | None = None,
    ) -> None:
        self._engine = engine
        self.template = given_template(template)
        self.system = None if system is None else given_text(system, "the system prompt")
        self._messages = given_messages(messages)
        self._turn = threading.Lock()  # held while messages are changed by who asks; never while a reply is made
        self._asker: int | None = None  # the thread that asked last
        self._reply: weakref.ref[ReplyStream] | None = None
        self._warming = ReplyHandle()  # of the last warm-up

    def __repr__(self) -> str:
        return f"<Chat of {len(self._messages)} messages with {self._engine!r}>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far, oldest first."""
        return tuple(self._messages)

    def send(self, text: str, sampling: Sampling | None = None) -> ReplyStream:
        """Add a user's message and generate the reply. Raises OptionError for an empty message.

        A preceding unanswered message is dropped: templates refuse two in a row. If the reply fails before any text,
        the messages are restored.
        """
        added, how = Message("user", given_words(text)), given_sampling(sampling)
        with self._own_turn():
            before = self.messages
            self._messages = [*self._answered(), added]
            return self._begun(self._record(_Asked(self.messages, self.messages, before), how))

    def send_results(self, *results: str, sampling: Sampling | None = None) -> ReplyStream:
        """Send the results of the last reply's calls, in order, and generate the reply.

        Raises OptionError if there were no calls, or another number of them.
        """
        texts, how = [given_text(each, "a result") for each in results], given_sampling(sampling)
        with self._own_turn():
            before = self.messages
            calls = before[-1].tool_calls if before else ()
            if not calls or len(calls) != len(texts):
                raise OptionError(
                    f"{len(texts)} results are given for {len(calls)} calls", "Give one text for each call."
                )
            for call, text in zip(calls, texts, strict=True):
                self._messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            return self._begun(self._record(_Asked(self.messages, self.messages, before), how))

    def regenerate(self, sampling: Sampling | None = None) -> ReplyStream:
        """Generate the last reply again, or the missing one after an edit. Raises OptionError without a question.

        The old reply stays until the new one ends or is cancelled, for good if that is empty.
        """
        how = given_sampling(sampling)
        with self._own_turn():
            now = self.messages
            asked = now[:-1] if now and now[-1].role == "assistant" else now
            if not asked:
                raise OptionError("there is nothing to regenerate", "Send a message first.")
            return self._begun(self._record(_Asked(now, asked, now), how))

    def continue_reply(self, sampling: Sampling | None = None) -> ReplyStream:
        """Continue a last reply that was cut (token limit, cancelled), as one message.

        TextChunks are the new text, Finished the whole. Raises OptionError without a nonempty last reply.
        """
        how = given_sampling(sampling)
        with self._own_turn():
            now = self.messages
            return self._begun(self._record(_Asked(now, now[:-1], now, unfinished(now)), how))

    def edit(self, index: int, text: str) -> None:
        """Replace message ``index`` and drop what follows; ``regenerate`` answers it.

        Raises OptionError for an unknown index or an empty text.
        """
        words = given_words(text)
        with self._own_turn():
            self._check(index)
            self._messages[index:] = [Message(self._messages[index].role, words)]

    def branch(self, index: int) -> "Chat":
        """Return a new chat with the messages up to and including ``index``. Raises OptionError if there is none."""
        self._check(index)
        return Chat(self._engine, self.system, self._messages[: index + 1], self.template)

    def price(self, action: Action) -> Price:
        """Return the cost of an action until its reply's first token, without taking it.

        ``Send``, ``Regenerate``, ``Continue``, ``Edit`` or ``Branch``. Waits for a reply in progress. Raises
        OptionError where the action would.
        """
        if isinstance(action, Send | Edit):
            given_words(action.text)
        prompt = self._prompt(self._after(action))
        return self._engine.price(prompt, continues=isinstance(action, Continue), template=self.template)

    def warm(self, text: str = "") -> None:
        """Prefill the conversation and a message that begins with ``text``, in the background.

        Ends when this chat requests a reply or is warmed again; the next reply reuses the result.
        """
        prompt = self._prompt(self._after(Send(given_text(text, "the message"))))
        self._warming.cancel()
        self._warming = self._engine.warm_ahead(prompt, template=self.template)

    def _reread(self) -> None:
        # Templates drop earlier thinking, so the cached tokens differ from the next prompt: without this the
        # next turn pays for the prefill.
        with contextlib.suppress(EngineClosedError):
            self.warm()

    def _after(self, action: Action) -> list[Message]:
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
        """Change the messages from this thread. Raises OptionError while another thread's reply runs."""
        with self._turn:
            reply = None if self._reply is None else self._reply()
            if reply is not None and not reply.ended and self._asker != threading.get_ident():
                raise OptionError(
                    "this chat is being answered on another thread",
                    "Read that reply to its end or close it first; or ask in a chat of its own (branch).",
                )
            yield

    def _begun(self, reply: ReplyStream) -> ReplyStream:
        self._asker, self._reply = threading.get_ident(), weakref.ref(reply)
        return reply

    def _record(self, asked: _Asked, sampling: Sampling) -> ReplyStream:
        self._warming.cancel()
        begun = asked.begun
        prompt = self._prompt(asked.after if begun is None else (*asked.after, begun))
        events = self._engine.generate(prompt, sampling, continues=begun is not None, template=self.template)
        return ReplyStream(self._recorded(asked, events), events)

    def _recorded(self, asked: _Asked, reply: ReplyStream) -> Generator[Event, None, None]:
        begun = asked.begun
        said = Message("assistant", "") if begun is None else begun
        whole = False
        try:
            with contextlib.closing(reply) as events:
                for event in events:
                    if isinstance(event, TextChunk):
                        said = _longer(said, event)
                    elif isinstance(event, ToolCall):
                        said = replace(said, tool_calls=(*said.tool_calls, event))
                    elif isinstance(event, Finished):
                        said, whole = Message("assistant", event.text, event.thinking, event.tool_calls), True
                    yield event
        except Exception:
            if not whole and said in (begun, Message("assistant", "")) and self._is_as(asked.now):
                self._messages[:] = asked.before
            raise
        finally:
            new = (said.content or said.thinking or said.tool_calls) and (whole or said != begun)
            if new and self._is_as(asked.now):
                self._messages[:] = [*asked.after, said]
                if said.thinking or self.template.thinking is not None:
                    self._reread()

    def _is_as(self, messages: Sequence[Message]) -> bool:
        return len(messages) == len(self._messages) and all(map(operator.is_, messages, self._messages))


def _longer(said: Message, chunk: TextChunk) -> Message:
    if chunk.kind == "answer":
        return replace(said, content=said.content + chunk.text)
    return replace(said, thinking=said.thinking + chunk.text)

"""A conversation: its messages, and what may be done with them. The engine finds what of it is computed already.

What callers give, checked and made plain on their own thread. No MLX here; an array of another library is read item by item.
"""

import contextlib
import operator
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
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
)
from .options import EMPTY_SCHEMA, NOTHING_TOLD, KVBits, KVSpec, Sampling, TemplateOptions, ToolSpec, index
from .schedule.stream import ReplyHandle, ReplyStream
from .text.continuation import unfinished

if TYPE_CHECKING:
    from .engine import Engine


def given_prompt(prompt: object) -> list[Message] | list[int]:
    """Return a prompt as Messages alone or as token ids alone. Raises OptionError for anything else."""
    items = _items(prompt, "a prompt")
    if not items:
        raise OptionError("the prompt holds no token and no message", "Give token ids, or Messages.")
    if isinstance(items[0], Message | dict):
        return given_messages(items)
    return _ids(items)


def given_question(prompt: object, system: object) -> list[Message] | list[int]:
    """Return a prompt that may also be a text, with a system prompt before it. Raises OptionError for what can't have one."""
    given = [Message("user", given_words(prompt))] if isinstance(prompt, str) else given_prompt(prompt)
    if system is None:
        return given
    first = given[0]
    if not isinstance(first, Message):
        raise OptionError("token ids can't have a system prompt", "Put it into the ids, or give Messages.")
    if first.role == "system":
        raise OptionError("the messages begin with a system prompt already", "Leave out system, or that message.")
    return [Message("system", given_text(system, "the system prompt")), *given_messages(given)]


def given_messages(messages: object) -> list[Message]:
    """Return a conversation as a list. Raises OptionError for what is no sequence of Messages."""
    items = _items(messages, "a conversation")
    for item in items:
        if isinstance(item, dict):
            raise OptionError("a message is given as a dict", "Use Message(role, content).")
        if not isinstance(item, Message):
            raise OptionError(f"a {_kind(item)} is among the messages", "Give Messages alone, or token ids alone.")
    return [item for item in items if isinstance(item, Message)]


def given_ids(tokens: object, what: str) -> list[int]:
    """Return one token id or more as plain ints; ``what`` needs them. Raises OptionError for what are none."""
    items = _items(tokens, "a sequence of token ids")
    if not items:
        raise OptionError(f"{what} needs a text, and there is no token", "Give at least one token id.")
    if isinstance(items[0], Message | dict):
        raise OptionError(
            "messages are not token ids", "Use engine.tokenizer.encode(engine.tokenizer.render(messages))."
        )
    return _ids(items)


def given_count(value: object, what: str, *, least: int) -> int:
    """Return the argument called ``what`` as an int. Raises OptionError for what is none, or below ``least``."""
    try:
        count = index(value)
    except TypeError:
        raise OptionError(f"{what} is {value!r:.60}, which is not a whole number", "Give an int.") from None
    if count < least:
        raise OptionError(f"{what} is {count}, which is too small", f"Use {least} or more.")
    return count


def given_bits(value: object) -> KVBits:
    """Return the bits of keys and values. Raises OptionError for what is none."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise OptionError(f"KV bits of {value!r:.60} are not two numbers", "Give those of keys and of values: (8, 4).")
    spec = KVSpec(key_bits=value[0], value_bits=value[1])
    return spec.key_bits, spec.value_bits


def given_limit(value: object) -> int:
    """Return a limit of memory, in bytes. Raises OptionError for what is none."""
    try:
        nbytes = index(value)
    except TypeError:
        raise OptionError(
            f"a memory limit of {value!r:.60} is not a whole number of bytes", "Give an int: 14_000_000_000."
        ) from None
    if nbytes < 1:
        raise OptionError(f"a memory limit of {nbytes} bytes is too small", "Give the bytes that arrays may take.")
    return nbytes


def given_text(text: object, what: str) -> str:
    """Return a text. Raises OptionError for anything else."""
    if not isinstance(text, str):
        raise OptionError(f"{what} is a {_kind(text)}, not a text", "Give a str.")
    return text


def given_words(text: object) -> str:
    """Return a message's text. Raises OptionError for what is none, and for one that is blank."""
    words = given_text(text, "the message")
    if not words.strip():
        raise OptionError("the message is empty", "Write something first.")
    return words


def given_sampling(sampling: object) -> Sampling:
    """Return how to sample; None is the default. Raises OptionError for anything but a Sampling."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise OptionError(f"sampling is a {_kind(sampling)}", "Use Sampling(temperature=0), for example.")
    return sampling


def given_template(template: object, tools: object = ()) -> TemplateOptions:
    """Return what the chat template is told, ``tools`` as well; None is nothing. Raises OptionError for anything else."""
    if template is None:
        template = NOTHING_TOLD
    if not isinstance(template, TemplateOptions):
        raise OptionError(f"template is a {_kind(template)}", 'Use TemplateOptions(thinking="off"), for example.')
    given = given_tools(tools)
    return replace(template, tools=given) if given else template


def given_tools(tools: object) -> tuple[ToolSpec, ...]:
    """Return definitions of functions: ToolSpecs, or dicts as OpenAI's API has them. Raises OptionError for anything else."""
    if isinstance(tools, str | bytes | dict | ToolSpec) or not isinstance(tools, Iterable):
        raise OptionError(f"tools is a {_kind(tools)}", "Give a list of ToolSpec(name, description, parameters).")
    return tuple(each if isinstance(each, ToolSpec) else _tool_of(each) for each in tools)


def _tool_of(given: object) -> ToolSpec:
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise OptionError(f"{given!r:.80} defines no tool", "Use ToolSpec(name, description, parameters).")
    return ToolSpec(function["name"], function.get("description") or "", function.get("parameters") or EMPTY_SCHEMA)


def _items(given: object, what: str) -> list[object]:
    if isinstance(given, str | bytes):
        raise OptionError(
            f"a text is not {what}",
            'Use engine.chat().send(text), [Message("user", text)] or engine.tokenizer.encode(text).',
        )
    if isinstance(given, dict | Message) or not isinstance(given, Iterable):
        raise OptionError(f"a {_kind(given)} is not {what}", "Give a list of token ids, or of Messages.")
    try:
        return list(given)
    except TypeError:  # an array of no dimension says that it can be iterated
        raise OptionError(f"a single number is not {what}", "Give a list of token ids.") from None


def _ids(items: list[object]) -> list[int]:
    ids = []
    for item in items:
        try:
            ids.append(index(item))
        except TypeError:
            raise OptionError(
                f"{item!r:.60} is no token id", "A prompt is token ids alone, or Messages alone."
            ) from None
    return ids


def _kind(value: object) -> str:
    return type(value).__name__


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
    another thread. They wait for a reply in progress, and so does ``price``. ``template`` is what the chat template is told; it may
    be set between two replies.

    A conversation has one turn at a time: while a reply that one thread asked for is not at its end, ``send``, ``regenerate``,
    ``continue_reply`` and ``edit`` raise OptionError on any other. Chats of one engine, branches among them, may be used by
    several threads at once.
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

        A message before it that was never answered (cancelled at once, say) is left out: templates refuse two in a row. Where the
        reply fails before it says anything, the messages are what they were before.
        """
        added, how = Message("user", given_words(text)), given_sampling(sampling)
        with self._own_turn():
            before = self.messages
            self._messages = [*self._answered(), added]
            return self._begun(self._record(_Asked(self.messages, self.messages, before), how))

    def send_results(self, *results: str, sampling: Sampling | None = None) -> ReplyStream:
        """Give the results of the last reply's calls, one text for each in order, and generate what the model says to them.

        Raises OptionError where the last reply calls nothing, or for another number of results.
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
        return Chat(self._engine, self.system, self._messages[: index + 1], self.template)

    def price(self, action: Action) -> Price:
        """Return what an action would take until the reply's first token, before it is taken: ``Send``, ``Regenerate``,
        ``Continue``, ``Edit``, ``Branch``. Waits for a reply in progress. Raises OptionError where the action would.
        """  # fmt: skip
        if isinstance(action, Send | Edit):
            given_words(action.text)
        prompt = self._prompt(self._after(action))
        return self._engine.price(prompt, continues=isinstance(action, Continue), template=self.template)

    def warm(self, text: str = "") -> None:
        """Compute ahead what is certain of the conversation, and of a message that begins with ``text``. Returns at once.

        It runs in the background, until this chat asks for a reply or is warmed again; what was computed is found by the next.
        """
        prompt = self._prompt(self._after(Send(given_text(text, "the message"))))
        self._warming.cancel()
        self._warming = self._engine.warm_ahead(prompt, template=self.template)

    def _reread(self) -> None:
        """Templates drop earlier thinking, or that there was none: read the answer alone while idle, or the next turn must."""
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
        self._warming.cancel()
        begun = asked.begun
        prompt = self._prompt(asked.after if begun is None else (*asked.after, begun))
        events = self._engine.generate(prompt, sampling, continues=begun is not None, template=self.template)
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
        """Whether the conversation is still this one: the very same messages."""
        return len(messages) == len(self._messages) and all(map(operator.is_, messages, self._messages))


def _longer(said: Message, chunk: TextChunk) -> Message:
    if chunk.kind == "answer":
        return replace(said, content=said.content + chunk.text)
    return replace(said, thinking=said.thinking + chunk.text)

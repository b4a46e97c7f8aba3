"""From what a caller gives, messages or token ids, to a request: rendered, checked, truncated where it must be, with checkpoints.

What does not fit the context loses its middle. A conversation keeps its system prompt, its first exchange (it says what all is
about) and its newest message; the exchanges after the first go, oldest first. Only when that is not enough does the newest message
lose its own middle: a file with a question after it keeps both its ends. Nothing is remembered: the same conversation is always
cut in the same way.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from zlib import crc32

from ..errors import ContextError, OptionError, TemplateError
from ..events import Message, Truncated
from ..metrics import Recorder
from ..options import NOTHING_TOLD, Sampling, TemplateOptions
from ..prompt_cache.radix_tree import common_prefix
from ..reply import Request
from ..runtime import Runtime
from . import continuation
from .continuation import PartialReply

Prompt = Sequence[int] | Sequence[Message]
"""One of the two, not empty: engine/chat.py sees to it."""

Turn = Literal["closed", "opened", "continued"]
"""How a rendered conversation ends: with the last message; with the assistant's turn opened; inside its last message."""

REPLY_SHARE = 4
"""The reply gets a quarter of the context, unless it is bounded. Exchanges go by the quarter as well: a cut that moved with every
message would leave nothing of the prompt cache to reuse."""

MARK = "\n[… left out …]\n"

LONGEST_OPENING = 16
"""Tokens that the mark with which thinking begins, and white space after it, have at most."""

SINKS = 4
"""First tokens that much attention goes to, whatever they are (https://arxiv.org/abs/2309.17453): pinned at least."""


@dataclass(frozen=True, slots=True)
class Words:
    """How messages become token ids. ``render``: a whole conversation; ``encode``, ``decode``: plain text."""

    render: Callable[[Sequence[Message]], list[int]]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def room_for_prompt(capacity: int, max_tokens: int | None) -> int:
    """Return how many tokens of a context of ``capacity`` the prompt may take, never less than half: the reply gets the rest."""
    reply = capacity // REPLY_SHARE if max_tokens is None else min(max_tokens, capacity // 2)
    return capacity - max(1, reply)


def fit_messages(
    messages: Sequence[Message], words: Words, capacity: int, room: int
) -> tuple[list[int], Truncated | None]:
    """Return the token ids of as much of the conversation as fits ``room`` tokens, and what was left out.

    Raises ContextError when not even the ends of the newest message fit.
    """
    ids = words.render(messages)
    whole, surplus = len(ids), len(ids) - room
    if surplus <= 0:
        return ids, None
    step = max(1, capacity // REPLY_SHARE)
    kept = list(messages)
    goal = -(-surplus // step) * step
    while len(ids) > room and len(shorter := _drop(messages, words, goal)) < len(kept):
        kept, goal = shorter, goal + step
        ids = words.render(kept)
    if len(ids) > room:
        ids = _cut_newest(kept, words, room)
    return ids, Truncated(len(messages) - len(kept), whole - len(ids))


def fit_ids(ids: list[int], room: int) -> tuple[list[int], Truncated | None]:
    """Return the first and the last half of the ids that fit ``room``, and what was left out."""
    if len(ids) <= room:
        return ids, None
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :], Truncated(0, len(ids) - room)


def _drop(messages: Sequence[Message], words: Words, goal: int) -> list[Message]:
    """Leave out exchanges after the first, oldest first, until their texts amount to ``goal`` tokens; the first goes last."""
    system = [message for message in messages[:1] if message.role == "system"]
    exchanges: list[list[Message]] = []  # each from a user's message on, so that roles still alternate without one
    for message in messages[len(system) : -1]:
        if message.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    dropped, count = 0, 0
    while count < len(exchanges) and dropped < goal:
        count += 1
        gone = exchanges[count] if count < len(exchanges) else exchanges[0]
        dropped += sum(len(words.encode(message.content)) for message in gone)
    first = exchanges[:1] if count < len(exchanges) else []
    return [*system, *(message for exchange in first + exchanges[count + 1 :] for message in exchange), messages[-1]]


def _cut_newest(messages: Sequence[Message], words: Words, room: int) -> list[int]:
    newest = messages[-1]
    text = words.encode(newest.content)
    budget = room - (len(words.render(messages)) - len(text)) - len(words.encode(MARK))
    while budget >= 2:
        tail = budget // 2
        begin, end = words.decode(text[: budget - tail]), words.decode(text[len(text) - tail :])
        cut = begin.rstrip("\ufffd") + MARK + end.lstrip("\ufffd")  # a cut may fall inside a character
        ids = words.render([*messages[:-1], replace(newest, content=cut)])
        if len(ids) <= room:
            return ids
        budget -= max(1, len(ids) - room)  # tokens join differently where the ends meet the mark
    raise ContextError(
        f"the conversation does not fit: {room:,} tokens are free for it, and not even its newest message's ends fit",
        "Shorten the system prompt, ask for fewer tokens (--max-tokens, max_tokens), or use a larger context.",
    )


class Prompting:
    """Makes requests for a model.

    Args:
        runtime: The loaded model.
        vocabulary_size: Bounds token ids.
        checkpoints: Whether its caches can continue only from checkpoints.
        template: Options of the chat template.

    Raises:
        OptionError: The template does not take these options.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocabulary_size: int,
        *,
        checkpoints: bool,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> None:
        self._runtime = runtime
        self._tokenizer = runtime.tokenizer.using(template)
        self._template = template
        self._vocabulary_size = vocabulary_size
        self._needs_checkpoints = checkpoints

    def request(self, prompt: Prompt, sampling: Sampling, recorder: Recorder, *, turn: Turn = "opened") -> Request:
        """Return the request for a prompt that ends with this ``turn``.

        Raises OptionError, ContextError or TemplateError for a prompt that can't be.
        """
        messages = [item for item in prompt if isinstance(item, Message)]
        ids = [item for item in prompt if not isinstance(item, Message)]
        tokenizer, in_thinking = self._tokenizer, False
        reply = continuation.unfinished(messages) if turn == "continued" else None
        before = messages if reply is None else messages[:-1]

        def render(messages: Sequence[Message]) -> str:
            if reply is None:
                return tokenizer.render(messages, reply=turn == "opened")
            return continuation.render(tokenizer, messages, reply)

        if messages:
            text = render(before)
            # Thinking opens at the end of the prompt, which truncation keeps.
            in_thinking = (
                tokenizer.opens_thinking(text) if reply is None else continuation.continues_thinking(tokenizer, reply)
            )
            ids = tokenizer.encode(text)
            if not ids:
                raise TemplateError("the model's chat template renders nothing", "Use another model.")
        elif self._template.changes_prompt:
            raise OptionError(
                "token ids are a prompt that is rendered already: thinking and template options can't change it",
                "Give messages, or render them with engine.tokenizer.using(options).",
            )
        self.check_ids(ids)
        if not messages:
            in_thinking = tokenizer.opens_thinking(tokenizer.decode(ids[-LONGEST_OPENING:]))
        ids, left_out = self._fit(before, ids, sampling.max_tokens, render)
        return Request(
            ids,
            sampling,
            self.pinned(before),
            in_thinking,
            None if reply is None else PartialReply(reply, tuple(ids)),
            left_out,
            self._checkpoints(before, ids) if self._needs_checkpoints else (),
            recorder,
            thinking_budget=self._template.thinking_budget,
            calls=tokenizer.call_reader(crc32(array("q", ids))),
        )

    def held(self, request: Request) -> Request:
        """Return a request whose reply is held to the form that it is to have.

        Raises OptionError, GrammarError among them, where it can't be.
        """
        tokenizer, partial, sampling = self._tokenizer, request.partial, request.sampling
        if self._template.must_call and sampling.min_tokens:
            raise OptionError("min tokens may keep a reply from ending after its call", "Leave them out.")
        if self._template.must_call and request.thinking_budget is not None and tokenizer.writes_channels:
            raise OptionError("a thinking budget ends with an answer here, not with a call", "Leave one of them out.")
        opening = tokenizer.decode(request.ids[-LONGEST_OPENING:]).rstrip()
        thinks = tokenizer.thinking is not None and not opening.endswith(tokenizer.thinking[1])
        constraint = tokenizer.constraint(
            sampling.json_schema,
            self._template.must_call,
            thought=request.in_thinking,
            may_think=thinks and partial is None,
            begun=None if partial is None else partial.message,
        )
        return replace(request, constraint=constraint)

    def without_end(self, reply: Message, ids: Sequence[int]) -> Iterator[Message]:
        """Yield what ``reply`` may have been before its last tokens ``ids`` came: a space may belong to either."""
        answer = self._tokenizer.decode(ids)
        if answer and reply.content.endswith(answer):
            begun = reply.content[: -len(answer)]
            yield from (
                replace(reply, content=each) for each in dict.fromkeys((begun, begun.removesuffix(" "))) if each
            )

    def check_ids(self, ids: list[int]) -> None:
        """Raise OptionError for ids outside the vocabulary."""
        bound = self._vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < bound:
            bad = next(token for token in ids if not 0 <= token < bound)
            raise OptionError(f"token id {bad} is not in the vocabulary of {bound:,}", "Use the model's own tokenizer.")

    def pinned(self, messages: Sequence[Message]) -> int | None:
        """Return how many tokens a rotating cache pins: the user's number, or those of the system prompt, and SINKS at least."""
        kv = self._runtime.kv
        if kv.window is None:
            return None
        if kv.keep != "system":
            return kv.keep
        sinks = min(SINKS, kv.window - 1)
        if not messages or messages[0].role != "system":
            return sinks
        pinned = max(sinks, len(self.stable([messages[0], Message("user", "")])))
        if pinned >= kv.window:
            raise OptionError(
                f"the system prompt has {pinned:,} tokens, which fills a KV window of {kv.window:,}",
                "Use a larger --kv-window or a number for --kv-keep.",
            )
        return pinned

    def stable(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids that a conversation begins with, however its last message, the user's, continues."""
        tokenizer = self._tokenizer
        *before, last = messages
        a, b = (
            tokenizer.encode(tokenizer.render([*before, replace(last, content=last.content + more)]))
            for more in ("a", " b")
        )
        return a[: common_prefix(a, b)]

    def _checkpoints(self, messages: Sequence[Message], ids: list[int]) -> tuple[int, ...]:
        """Return where the system prompt ends, and where the newest message begins: other chats and edits branch off there."""
        begins = [messages[:1]] if messages and messages[0].role == "system" else []
        begins += [messages[:-1]] if len(messages) > 2 else []
        try:
            return tuple(sorted({common_prefix(ids, self.stable([*begin, Message("user", "")])) for begin in begins}))
        except TemplateError:  # it refuses a conversation of that shape
            return ()

    def _fit(
        self,
        messages: Sequence[Message],
        ids: list[int],
        max_tokens: int | None,
        render: Callable[[Sequence[Message]], str],
    ) -> tuple[list[int], Truncated | None]:
        """Leave out the middle of a prompt that does not fit, where the user wants that."""
        capacity, tokenizer = self._runtime.capacity, self._tokenizer
        if capacity is None or self._runtime.kv.when_full != "truncate-middle":
            return ids, None
        room = room_for_prompt(capacity, max_tokens)
        if not messages:
            return fit_ids(ids, room)
        words = Words(lambda some: tokenizer.encode(render(some)), tokenizer.encode, tokenizer.decode)
        return fit_messages(messages, words, capacity, room)

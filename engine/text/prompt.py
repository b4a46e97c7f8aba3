"""Messages or token ids to a request: rendered, continued, checked, cut to the context, with checkpoints."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from zlib import crc32

from ..errors import ContextError, OptionError, PictureError, TemplateError
from ..events import Message, PartialReply, Truncated, unfinished
from ..metrics import Recorder
from ..options import NOTHING_TOLD, Sampling, TemplateOptions
from ..prompt_cache.memory import common_prefix
from ..reply import Request, check_context
from ..runtime import Runtime
from .length import COUNTED

if TYPE_CHECKING:
    from ..vision.eyes import Sight
    from .tokenizer import Tokenizer

# Truncation cuts the middle: exchanges after the first go, oldest first; then the newest message's own middle.
# Stateless: the same conversation is always cut alike.


Prompt = Sequence[int] | Sequence[Message]  # one of the two, not empty: engine/chat.py sees to it

# How a rendered conversation ends: with the last message; with the assistant's turn opened; inside its last message.
Turn = Literal["closed", "opened", "continued"]

# The reply gets a quarter of the context, unless it is bounded. Exchanges go by the quarter as well: a cut that moved
# with every message would leave nothing of the prompt cache to reuse.
REPLY_SHARE = 4

MARK = "\n[… left out …]\n"

LONGEST_OPENING = 16  # tokens that the mark with which thinking begins, and white space after it, have at most

# First tokens that much attention goes to, whatever they are (https://arxiv.org/abs/2309.17453): pinned at least.
SINKS = 4


@dataclass(frozen=True, slots=True)
class Words:
    render: Callable[[Sequence[Message]], list[int]]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def room_for_prompt(capacity: int, max_tokens: int | None) -> int:
    """Return the prompt's share of ``capacity`` tokens, at least half."""
    reply = capacity // REPLY_SHARE if max_tokens is None else min(max_tokens, capacity // 2)
    return capacity - max(1, reply)


def fit_messages(
    messages: Sequence[Message], words: Words, capacity: int, room: int
) -> tuple[list[int], Truncated | None]:
    """Return the ids of what fits ``room`` tokens, and what was cut.

    Raises ContextError where not even the ends of the newest message fit.
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
    if len(ids) <= room:
        return ids, None
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :], Truncated(0, len(ids) - room)


def _drop(messages: Sequence[Message], words: Words, goal: int) -> list[Message]:
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
    """Makes requests for a model. Raises OptionError for options that its template does not have."""

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
        """Return the request. Raises OptionError, ContextError or TemplateError."""
        messages = [item for item in prompt if isinstance(item, Message)]
        ids = [item for item in prompt if not isinstance(item, Message)]
        tokenizer, in_thinking = self._tokenizer, False
        reply = unfinished(messages) if turn == "continued" else None
        before = messages if reply is None else messages[:-1]

        sight = None

        def render(messages: Sequence[Message]) -> str:
            if reply is None:
                return tokenizer.render(messages, reply=turn == "opened")
            return render_continued(tokenizer, messages, reply)

        def ids_of(messages: Sequence[Message]) -> list[int]:
            nonlocal sight
            ids, sight = self._with_pictures(messages, render(messages))
            return ids

        if messages:
            text = render(before)
            # Thinking opens at the end of the prompt, which truncation keeps.
            in_thinking = tokenizer.opens_thinking(text) if reply is None else continues_thinking(tokenizer, reply)
            self._check_length(text)
            ids, sight = self._with_pictures(before, text)
            if not ids:
                raise TemplateError("the model's chat template renders nothing", "Use another model.")
        elif self._template.changes_prompt:
            raise OptionError(
                "token ids are a prompt that is rendered already: thinking and template options can't change it",
                "Give messages, or render them with engine.tokenizer.using(options).",
            )
        self.check_ids(ids if sight is None else [each for each in ids if each >= 0])
        if not messages:
            in_thinking = tokenizer.opens_thinking(tokenizer.decode(ids[-LONGEST_OPENING:]))
        ids, left_out = self._fit(before, ids, sampling.max_tokens, ids_of)
        words = ids if sight is None else [each for each in ids if each >= 0]
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
            calls=tokenizer.call_reader(
                crc32(array("q", ids)), tokenizer.decode(words[-LONGEST_OPENING:]) if reply is None else ""
            ),
            messages=messages,
            tools=self._template.tools,
            sight=sight,
        )

    def tokens(self, prompt: str | Sequence[Message], *, continues: bool) -> list[int]:
        """Return a prompt's tokens. Raises as ``request``; for a prompt that is too long, if it is several times so."""
        tokenizer, is_text = self._tokenizer, isinstance(prompt, str)
        if isinstance(prompt, str):
            text = prompt
        elif (reply := unfinished(prompt) if continues else None) is not None:
            text = render_continued(tokenizer, prompt[:-1], reply)
        else:
            text = tokenizer.render(prompt)
        self._check_length(text, COUNTED)
        if isinstance(prompt, str):
            return tokenizer.encode(text, add_special_tokens=is_text)
        return self._with_pictures(prompt, text)[0]

    def _with_pictures(self, messages: Sequence[Message], text: str) -> tuple[list[int], "Sight | None"]:
        """Return the ids of a rendered conversation, and its pictures' places. Raises PictureError."""
        pictures = [each for message in messages for each in message.pictures]
        if not pictures:
            return self._tokenizer.encode(text), None
        eyes = self._runtime.eyes
        if isinstance(eyes, str):
            raise PictureError(f"this model can't see pictures: {eyes}", "Use a model that sees, or leave them out.")
        return eyes.read(pictures, text, self._tokenizer.encode)

    def _check_length(self, text: str, contexts: int = 1) -> None:
        """Raise ContextError for a text that has more tokens than so many contexts, before all of it is encoded."""
        longest, cuts = self._runtime.longest, self._runtime.kv.when_full == "truncate-middle"
        if longest is not None and not cuts and (least := self._tokenizer.exceeds(text, contexts * longest)):
            check_context(self._runtime, least, "at least ")

    def held(self, request: Request) -> Request:
        """Return a request with its constraint. Raises OptionError, GrammarError among them."""
        tokenizer, partial, sampling = self._tokenizer, request.partial, request.sampling
        held = bool(self._template.must_call) or any(each.strict for each in self._template.tools)
        if held and sampling.min_tokens:
            raise OptionError("min tokens may keep a reply from ending after its call", "Leave them out.")
        if held and request.thinking_budget is not None and tokenizer.writes_channels:
            raise OptionError("a thinking budget ends with an answer here, not with a call", "Leave one of them out.")
        opening = tokenizer.decode(request.words[-LONGEST_OPENING:]).rstrip()
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
        """Yield candidates for ``reply`` before its last tokens ``ids``: a space may belong to either."""
        answer = self._tokenizer.decode(ids)
        if answer and reply.content.endswith(answer):
            begun = reply.content[: -len(answer)]
            yield from (
                replace(reply, content=each) for each in dict.fromkeys((begun, begun.removesuffix(" "))) if each
            )

    def check_ids(self, ids: list[int]) -> None:
        bound = self._vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < bound:
            bad = next(token for token in ids if not 0 <= token < bound)
            raise OptionError(f"token id {bad} is not in the vocabulary of {bound:,}", "Use the model's own tokenizer.")

    def pinned(self, messages: Sequence[Message]) -> int | None:
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
        tokenizer = self._tokenizer
        *before, last = messages
        each = [[*before, replace(last, content=last.content + more)] for more in ("a", " b")]
        a, b = (self._with_pictures(some, tokenizer.render(some))[0] for some in each)
        return a[: common_prefix(a, b)]

    def _checkpoints(self, messages: Sequence[Message], ids: list[int]) -> tuple[int, ...]:
        """Return branch points of other chats and edits: the system prompt's end, the newest message's start."""
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
        ids_of: Callable[[Sequence[Message]], list[int]],
    ) -> tuple[list[int], Truncated | None]:
        capacity, tokenizer = self._runtime.capacity, self._tokenizer
        if capacity is None or self._runtime.kv.when_full != "truncate-middle":
            return ids, None
        room = room_for_prompt(capacity, max_tokens)
        if not messages:
            return fit_ids(ids, room)
        words = Words(ids_of, tokenizer.encode, tokenizer.decode)
        return fit_messages(messages, words, capacity, room)


# Templates trim finished messages, so the cut reply's own tokens are used; the prompt cache holds nearly all.


def continues_thinking(tokenizer: "Tokenizer", reply: Message) -> bool:
    return tokenizer.thinking is not None and bool(reply.thinking) and not reply.content


def render_continued(tokenizer: "Tokenizer", before: Sequence[Message], reply: Message) -> str:
    """Return the conversation, open at the end of ``reply``.

    Raises TemplateError where the template fails, or a reply cut in thinking has a model without it.
    """
    opened, reply = tokenizer.render(before), tokenizer.plain(reply)
    if tokenizer.thinking is None:
        if not reply.content:
            raise TemplateError(
                "the reply was cut off while its model was thinking, and this model does not think",
                "Regenerate it, or choose the model that began it.",
            )
        return opened + reply.content  # another model's thinking is left out, as templates do
    start, end = tokenizer.thinking
    if not reply.thinking:
        # A turn that opens with thinking, and a reply without: nothing was thought.
        return opened + (f"{end}\n\n" if tokenizer.opens_thinking(opened) else "") + reply.content
    if (cut := _as_template_writes(tokenizer, before, reply)) is not None:
        return cut
    opened += "" if tokenizer.opens_thinking(opened) else start
    return opened + reply.thinking + (end + reply.content if reply.content else "")


def _as_template_writes(tokenizer: "Tokenizer", before: Sequence[Message], reply: Message) -> str | None:
    last = reply.content or reply.thinking
    try:
        text = tokenizer.render_cut([*before, reply], "answer" if reply.content else "thinking").rstrip()
    except TemplateError:
        return None
    # The white space that templates trim is where the model continues from, and part of its reply.
    end = next((each for each in (last.rstrip(), last.strip()) if text.endswith(each)), None)
    if end is None or reply.thinking.strip() not in text:
        return None
    return text.removesuffix(end) + last

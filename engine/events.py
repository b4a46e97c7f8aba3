"""Messages, events, actions and prices of a conversation: plain values that may cross threads and pipes."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .device import DeviceKind
from .errors import OptionError, TokamacError
from .lab.passes import PassLog
from .metrics import Metrics, Outlier
from .options import Sampling, Thinking, index, type_name
from .perf.diagnosis import Diagnosis
from .text.length import LongestPieces
from .vision.picture import Picture

Role = Literal["system", "user", "assistant", "tool"]
TextKind = Literal["answer", "thinking"]
FinishReason = Literal["stop", "length", "loop", "cancelled", "tool_calls"]
CutBy = Literal["max_tokens", "context", "memory"]
ROLES: tuple[Role, ...] = get_args(Role)
# As other programs and families call them; whoever else speaks is read as the user.
OTHER_ROLES: dict[str, Role] = {
    **dict.fromkeys(("developer", "instructions"), "system"),
    **dict.fromkeys(("ai", "bot", "chatbot", "gpt", "model"), "assistant"),
    **dict.fromkeys(("environment", "function", "ipython", "observation", "tool_response", "tool_results"), "tool"),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call written by the model: part of an assistant's message, and an event once complete.

    Attributes:
        id: Unique within the conversation.
        arguments: A JSON object as text.
        problem: Why the call could not be parsed; ``arguments`` is then the raw text, which also appears in the
            reply's text, and earlier ToolCallDelta events are void.
        mistyped: Arguments whose type is none of the tool's schema: they are as the model wrote them.

    Raises:
        OptionError: The arguments are not a JSON object.
    """

    name: str
    arguments: str = "{}"
    id: str = ""
    problem: str = ""
    mistyped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.problem:
            return
        try:
            read = json.loads(self.arguments)
        except (TypeError, ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise OptionError(
                f"the arguments of the call of {self.name!r:.60} are not a JSON object",
                'Give a text such as {"path": "a"}.',
            )

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name; none of a call that could not be read."""
        return {} if self.problem else dict(json.loads(self.arguments))


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call's arguments, streamed as the model writes them.

    The pieces of one call are contiguous, and joined they equal ``ToolCall.arguments`` unless it has a problem.
    Formats that can't be streamed yield one piece.
    """

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: One of ROLES; other names for them become theirs, and any other is the user.
        thinking: The reasoning behind an assistant's ``content``.
        tool_calls: The calls of an assistant's message.
        tool_call_id: In a "tool" message, the call it answers; ``name`` is the function's.
        images: Pictures before the text: paths or bytes of PNG, JPEG, WebP, GIF or BMP files, read at once.

    Raises:
        OptionError: The role or a text is not a string.
        PictureError: An image can't be read.
    """

    role: Role
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    images: tuple[Picture | str | Path | bytes, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        if self.images:
            object.__setattr__(self, "images", tuple(map(Picture.of, self.images)))
        for name, text in (("role", self.role), ("content", self.content), ("thinking", self.thinking)):
            if not isinstance(text, str):
                raise OptionError(f"the {name} of a message is a {type(text).__name__}, not a text", "Give a str.")
        if self.role not in ROLES:
            object.__setattr__(self, "role", OTHER_ROLES.get(str(self.role).lower(), "user"))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The images, as they were read."""
        return tuple(each for each in self.images if isinstance(each, Picture))


def has_calls(messages: Sequence[Message]) -> bool:
    return any(each.tool_calls or each.role == "tool" for each in messages)


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prefill progress: ``done`` of ``total`` prompt tokens are in the cache, ``cached`` of them from before."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The prompt did not fit: ``messages`` were dropped from its middle, ``tokens`` in all."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """A response to memory pressure before prefill or during decode. Bytes; 0 or None where not applicable.

    Attributes:
        pool_bytes: Released by MLX's pool.
        cache_bytes: Evicted prompt caches.
        chunk: Tokens per prefill chunk from here on.
        predicted_bytes: Expected peak, of ``budget_bytes``.
        from_others: To be released by other programs.
        critical: macOS is at critical pressure.
        fused_bytes: Scores avoided by slower fused kernels.
        failed: A chunk ran out of memory and is recomputed.
        ended: The reply ends here.
        waits: The reply waits for others' memory.
    """

    pool_bytes: int
    chunk: int | None
    cache_bytes: int
    predicted_bytes: int
    budget_bytes: int | None
    from_others: int = 0
    critical: bool = False
    fused_bytes: int = 0
    failed: bool = False
    ended: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class LoopFound:
    """The reply repeats itself and ends because of it unless it is allowed to continue.

    Attributes:
        period: Tokens per repetition.
        ends_at: Reply length in tokens at which it ends; None once the loop has ended.
    """

    period: int
    ends_at: int | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A likely token at a position, with its natural log-probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the reply with its natural log-probability before sampling.

    Attributes:
        text: Of this token alone; U+FFFD for part of a character.
        top: The likeliest tokens at this position, likeliest first.
    """

    id: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole characters of the reply, in order; ``kind`` separates thinking from the answer.

    Attributes:
        ids: The tokens of this text, and earlier ones that produced none. Those of all chunks and of Finished are
            all tokens of the reply, in order.
        logprobs: Of the same tokens, if ``Sampling.logprobs`` requests them.
        guessed: Character ranges of ``text``, [from, to), that come from accepted draft tokens.
    """

    text: str
    kind: TextKind = "answer"
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    guessed: tuple[tuple[int, int], ...] = ()


# Why prompt tokens were computed. new: none of them were before. first: nothing was held. changed: the prompt differs from
# one that was read, and goes on like it. evicted: read before, and no longer held. state: held, but this model's state can
# be resumed only at some tokens. settings: held for another model, adapter or settings. off: nothing is kept.
ReadReason = Literal["new", "first", "changed", "evicted", "state", "settings", "off"]
# What changed, where it is known of programs that they change it. reply: what the model wrote came back otherwise.
Churn = Literal["date", "attribution", "tool order", "tools", "id", "environment", "thinking", "reply"]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the prompt cache saved of a prompt, and why the rest was read.

    Attributes:
        held_tokens: Of the earlier prompt and reply that begins most like this prompt; 0 if none.
        common_tokens: From the beginning, so the position of the first token that differs.
        again_tokens: Tokens of this prompt that had been read before, and were read again.
        again_s: Seconds of that, at this reply's prefill rate; None if unknown.
        part: Where the difference is: "system prompt", "tools", "message 3 (user)", "chat template"; "" if nowhere.
        before, held, now: The text before the difference, the earlier one and this one; short, and not sanitised.
    """

    reason: ReadReason
    held_tokens: int = 0
    common_tokens: int = 0
    again_tokens: int = 0
    again_s: float | None = None
    part: str = ""
    churn: Churn | None = None
    before: str = ""
    held: str = ""
    now: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a reply.

    Attributes:
        outliers: Outlier gaps, longest first.
        predicted_peak_bytes: For ``metrics.peak_memory_bytes``.
        diagnosis: Why it took its time; None without tokens.
        doubts: Settings computed differently (loaded unchecked).
        stopped_by: Stop text or end token id; None at an end mark of several tokens.
        ids, logprobs: Of the tokens after the last text.
        thinking_ended_at: The token budget that ended thinking.
        tool_calls: In order; reason "tool_calls" if any is parsable, else "stop".
        cut_by: The limit, for reason "length"; "context" leaves room for the next turn.
        cache: What the prompt cache saved; None for background replies.
    """

    reason: FinishReason
    text: str
    metrics: Metrics
    thinking: str = ""
    outliers: tuple[Outlier, ...] = ()
    predicted_peak_bytes: int | None = None
    diagnosis: Diagnosis | None = None
    doubts: tuple[str, ...] = ()
    stopped_by: str | int | None = None
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    thinking_ended_at: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    passes: PassLog | None = None
    cut_by: CutBy | None = None
    cache: CacheUse | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of one of several replies by a failure; the others continue."""

    error: TokamacError


Piece = TextChunk | ToolCallDelta  # what a reply says while it is written: text of its own, or of a call's arguments

Event = Truncated | MemoryPressure | PrefillProgress | LoopFound | Piece | ToolCall | Finished


@dataclass(frozen=True, slots=True)
class Live:
    """A snapshot of the running reply: metrics and recent gaps between tokens (ms, oldest first).

    ``bytes_per_step`` is of the last step, ``now_tps`` and ``achieved_gbs`` of the last second.
    """

    metrics: Metrics
    context_tokens: int
    gaps_ms: tuple[float, ...]
    bytes_per_step: int | None = None
    achieved_gbs: float | None = None
    outliers: tuple[Outlier, ...] = ()
    now_tps: float | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Load progress: bytes ``done`` of ``total`` (None: unknown yet) in this ``stage``.

    Three stages have no bytes: "warm-up"; "compile", CPU kernels, once per machine; "rounding", which measures the
    quality cost of rounding, once per model and machine.
    """

    stage: Literal["download", "weights", "compile", "rounding", "warm-up"]
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class ModelNote:
    """A note to the user on a loaded model, as a clause.

    Attributes:
        about: The option or aspect it concerns; "alone": replies are not batched; "quality": answers are worse
            than the source model's.
    """

    text: str
    about: Literal["model", "adapter", "draft", "heads", "alone", "quality"] = "model"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Generate the last reply again."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Continue the last reply, which was cut."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text of message ``index`` and regenerate its answer."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Branch into a new chat at message ``index``, with a message still to be written."""

    index: int


Action = Send | Regenerate | Continue | Edit | Branch


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of a prompt up to its first token.

    Attributes:
        tokens: Of ``prompt_tokens``, those to compute.
        disk_bytes: Keys and values to read from disk.
        seconds: Of both, and of seeing pictures, at speeds measured since the model was loaded.
        estimated: No sufficiently long prompt was measured, so ``seconds`` come from ``Engine.predict``; None until
            the machine's latency is known.
    """

    prompt_tokens: int
    tokens: int
    disk_bytes: int
    seconds: float | None
    estimated: bool = False


# What callers give, checked and made plain on their own thread; an array of another library is read item by item.


def given_prompt(prompt: object) -> list[Message] | list[int]:
    """Return Messages or token ids; a text is a user's message. Raises OptionError."""
    if isinstance(prompt, str):
        return [Message("user", given_words(prompt))]
    items = _items(prompt, "a prompt")
    if not items:
        raise OptionError("the prompt holds no token and no message", "Give token ids, or Messages.")
    if isinstance(items[0], Message | dict):
        return given_messages(items)
    return _ids(items)


def given_question(prompt: object, system: object) -> list[Message] | list[int]:
    """Return a prompt preceded by a system prompt. Raises OptionError where it can't have one."""
    given = given_prompt(prompt)
    if system is None:
        return given
    first = given[0]
    if not isinstance(first, Message):
        raise OptionError("token ids can't have a system prompt", "Put it into the ids, or give Messages.")
    if first.role == "system":
        raise OptionError("the messages begin with a system prompt already", "Leave out system, or that message.")
    return [Message("system", given_text(system, "the system prompt")), *given_messages(given)]


def given_messages(messages: object) -> list[Message]:
    """Return a conversation as a list. Raises OptionError unless it is a sequence of Messages."""
    items = _items(messages, "a conversation")
    for item in items:
        if isinstance(item, dict):
            raise OptionError("a message is given as a dict", "Use Message(role, content).")
        if not isinstance(item, Message):
            raise OptionError(f"a {type_name(item)} is among the messages", "Give Messages alone, or token ids alone.")
    return [item for item in items if isinstance(item, Message)]


def given_ids(tokens: object, what: str) -> list[int]:
    """Return one or more token ids as plain ints; ``what`` names the option. Raises OptionError."""
    items = _items(tokens, "a sequence of token ids")
    if not items:
        raise OptionError(f"{what} needs a text, and there is no token", "Give at least one token id.")
    if isinstance(items[0], Message | dict):
        raise OptionError(
            "messages are not token ids", "Use engine.tokenizer.encode(engine.tokenizer.render(messages))."
        )
    return _ids(items)


def given_text(text: object, what: str) -> str:
    """Return ``text``. Raises OptionError unless it is a string."""
    if not isinstance(text, str):
        raise OptionError(f"{what} is a {type_name(text)}, not a text", "Give a str.")
    return text


def given_words(text: object) -> str:
    """Return a message's text. Raises OptionError for a non-string or a blank one."""
    words = given_text(text, "the message")
    if not words.strip():
        raise OptionError("the message is empty", "Write something first.")
    return words


def _items(given: object, what: str) -> list[object]:
    if isinstance(given, str | bytes):
        raise OptionError(
            f"a text is not {what}",
            'Use engine.chat().send(text), [Message("user", text)] or engine.tokenizer.encode(text).',
        )
    if isinstance(given, dict | Message) or not isinstance(given, Iterable):
        raise OptionError(f"a {type_name(given)} is not {what}", "Give a list of token ids, or of Messages.")
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


@dataclass(frozen=True, slots=True)
class StepToken:
    """A token of a reply with its natural log-probability before sampling.

    thinking, answer: characters so far. settled: no incomplete character or possible mark is pending.
    """

    id: int
    text: str
    logprob: float
    others: tuple[Alternative, ...]
    thinking: int
    answer: int
    settled: bool
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTokens:
    first: int
    total: int
    tokens: tuple[StepToken, ...]


@dataclass(frozen=True, slots=True)
class PromptText:
    tokens: int
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartialReply:
    """The beginning of a reply. ids: of the whole prompt, as detokenizing depends on earlier tokens."""

    message: Message
    ids: tuple[int, ...]


def unfinished(messages: Sequence[Message]) -> Message:
    """Return the final reply, without a cut character. Raises OptionError where there is none or it is empty."""
    if not messages or messages[-1].role != "assistant":
        raise OptionError("only a reply can be continued", "Give messages that end with the assistant's.")
    reply = whole_characters(messages[-1])
    if not (reply.content or reply.thinking):
        raise OptionError("this reply has no tokens", "Regenerate it.")
    return reply


def whole_characters(reply: Message) -> Message:
    if reply.content:
        return replace(reply, content=reply.content.rstrip("\ufffd"))
    return replace(reply, thinking=reply.thinking.rstrip("\ufffd"))


MOST_ROUNDING_SHARE = 0.1  # what rounding may add, over what the packing costs


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """Nats per token: the cost of rounding rows, and about that of quantizing the weights."""

    added: float
    packing: float

    @property
    def is_small(self) -> bool:
        return self.added <= MOST_ROUNDING_SHARE * self.packing

    def __str__(self) -> str:
        share = f"adds KL {self.added:.2g}; the weights' own few bits about {self.packing:.2g}"
        return f"rounded to 8 bits ({share})" if self.is_small else f"exact (rounding to 8 bits {share})"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A loaded model's facts. Sizes in bytes.

    capacity: tokens of the context; rolls: whether the oldest are evicted. holds_calls: whether arguments of calls
    can be held to a schema. doubts: config parts computed
    otherwise. heads_bytes: weights and at most their KV. rounding: cost of rounding rows; None if impossible.
    longest_pieces: of the vocabulary. sees: whether messages may have images.
    """

    name: str
    path: Path
    device: DeviceKind
    architecture: str
    layers: int
    parameters: int
    weight_bytes: int
    bits_per_weight: float | None
    context_length: int | None
    capacity: int | None
    rolls: bool
    vocabulary_size: int
    thinks: bool
    recommended: Sampling
    model_notes: tuple[ModelNote, ...] = ()
    advice: str | None = None
    memory_notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    adapter: str | None = None
    adapter_digest: str | None = None
    draft: str | None = None
    draft_bytes: int | None = None
    heads: str | None = None
    heads_bytes: int | None = None
    thinking_modes: tuple[Thinking, ...] = ()
    template_names: tuple[str, ...] = ()
    takes_tools: bool = False
    holds_calls: bool = False
    later_system: bool = False
    rounding: RoundingCost | None = None
    longest_pieces: LongestPieces = LongestPieces()  # noqa: RUF009  # frozen
    sees: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of it, in clauses."""
        return tuple(note.text for note in self.model_notes)

"""What a reply is made of: messages go in, events come out. Only plain values, so they may cross threads and pipes.

What an action on a conversation would cost, before it is taken.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import OptionError, TokamacError
from .metrics import Metrics, Outlier
from .passes.log import PassLog
from .perf.diagnosis import Diagnosis

Role = Literal["system", "user", "assistant", "tool"]
TextKind = Literal["answer", "thinking"]
FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, as the model wrote it: part of an assistant's message, and an event once it is whole.

    arguments: a JSON object, as text. id: tells it from the other calls of the conversation. problem: why the call could not be
    read; ``arguments`` is then what the model wrote, which is text of the reply as well, and what was told of it (ToolCallDelta)
    is void. Raises OptionError for other arguments.
    """

    name: str
    arguments: str = "{}"
    id: str = ""
    problem: str = ""

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
    """A piece of a call's arguments, while the model writes them.

    The pieces of a call follow each other, from the first, which tells its name and id, to its ToolCall; none of another call
    comes between. Joined they are its ``arguments``, as soon as that tells no problem. Formats that can't be told piece by piece
    have one piece.
    """

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. ``thinking`` is the reasoning that led to an assistant's ``content``.

    tool_calls: what an assistant's message calls. Of role "tool", the result of a call: tool_call_id says which, name is the
    function's. Raises OptionError for a role that there is not, and for what is no text.
    """

    role: Role
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        if self.role not in ROLES:
            raise OptionError(f"there is no role {self.role!r:.60}", f"Use one of {', '.join(ROLES)}.")
        for name, text in (("content", self.content), ("thinking", self.thinking)):
            if not isinstance(text, str):
                raise OptionError(f"the {name} of a message is a {type(text).__name__}, not a text", "Give a str.")


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens in the cache so far (``done``, of ``total``); ``cached`` of them were there before."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The prompt did not fit: ``messages`` of its middle were left out whole, ``tokens`` in all."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """Memory was short before a prefill or while decoding, and this was done about it. Bytes; 0 and None where nothing was.

    pool_bytes: given back by MLX's pool. chunk: tokens computed at once from here on. cache_bytes: of other prompts let go of.
    predicted_bytes: the peak that is expected now, of the budget_bytes that may be used (None is unknown). from_others: by how much
    other programs have to give way, which the system sees to. critical: macOS is at critical pressure. fused_bytes: of attention's
    scores that are not written down, by kernels that take somewhat longer. failed: MLX had no memory for a piece of the prompt,
    which is computed again. ended: the reply ends here, since more of it would not fit. waits: the prompt begins, or the reply goes
    on, once other replies have given back what it needs.
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
class Alternative:
    """A token that was likely in a place, and its natural log-probability there."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the reply, its natural log-probability by the model itself, and the likeliest tokens in its place.

    text: of this token alone; U+FFFD where it is a part of a character. top: likeliest first, as many as were asked for.
    """

    id: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole characters of the reply, in order; ``kind`` tells the model's thinking from its answer.

    ids: the tokens that made them, with those before that made no text. logprobs: of the same tokens, where ``Sampling.logprobs``
    asks for them. Those of all chunks and of Finished are all tokens of the reply, in order.
    guessed: characters of ``text``, from and to (exclusive), whose tokens were guessed and came true.
    """

    text: str
    kind: TextKind = "answer"
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    guessed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a reply: why it ended, the whole answer, its thinking, and what was measured.

    outliers: the gaps between tokens that stand out, longest first. predicted_peak_bytes: what the arithmetic expected of
    ``metrics.peak_memory_bytes``, for a reply of this length. diagnosis: why it took as long as it did; None where no token came.
    doubts: what of the model's config was computed otherwise, where it was loaded unchecked: the text may be wrong.
    stopped_by: the stop text that was met, or the id of the token that ended the reply; None for another reason than "stop".
    ids, logprobs: as of TextChunk, of the tokens after the last text: the end, a stop text.
    thinking_ended_at: the budget of tokens that ended the thinking; None where nothing but the model did.
    tool_calls: what the reply calls, in order. The reason is "tool_calls" where it ends so that they are answered; of a call that
    could not be read (``ToolCall.problem``) alone it is "stop".
    passes: what was recorded of its passes; None where there was none.
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


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of one reply of several that failed; the others go on."""

    error: TokamacError


Piece = TextChunk | ToolCallDelta
"""What a reply says while it is written: text of its own, or of a call's arguments."""

Event = Truncated | MemoryPressure | PrefillProgress | Piece | ToolCall | Finished


@dataclass(frozen=True, slots=True)
class Live:
    """A snapshot of the reply in progress: its metrics so far and its last gaps between tokens (ms, oldest first).

    The metrics are of the whole reply; ``bytes_per_step`` and ``achieved_gbs`` are of now: the last step, the last few gaps.
    outliers: those of the reply so far, longest first.
    """

    metrics: Metrics
    context_tokens: int
    gaps_ms: tuple[float, ...]
    bytes_per_step: int | None = None
    achieved_gbs: float | None = None
    outliers: tuple[Outlier, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come: bytes ``done`` of ``total`` (None: not known yet) in this ``stage``.

    Of three stages there are no bytes: "warm-up"; "compile", in which a CPU's kernels are compiled, once on a machine; "rounding",
    in which is measured what rounding costs a model there, once for each.
    """

    stage: Literal["download", "weights", "compile", "rounding", "warm-up"]
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class ModelNote:
    """What the user should know of a loaded model, in a clause.

    about: what was asked for beside it, or what else of it; "alone": that its replies are made one after another.
    """

    text: str
    about: Literal["model", "adapter", "draft", "heads", "alone"] = "model"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Regenerate:
    """Generate the last reply again."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on with the last reply, which was cut."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text of message ``index``, and answer it again."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Go on from message ``index`` in a chat of its own, with a message that is still to be written."""

    index: int


Action = Send | Regenerate | Continue | Edit | Branch


@dataclass(frozen=True, slots=True)
class Price:
    """What a prompt takes until its first token.

    prompt_tokens: all of it. tokens: of them, to be computed. disk_bytes: keys and values to be read from disk. seconds: both
    together, by what was measured since the model was loaded. estimated: no prompt of a good length was read since then, and the
    seconds are what the arithmetic expects (``Engine.predict``); they are None until the machine's latency is known, too.
    """

    prompt_tokens: int
    tokens: int
    disk_bytes: int
    seconds: float | None
    estimated: bool = False

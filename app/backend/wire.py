"""What the screen and the engine's process say to each other: one frozen dataclass a message, one JSON object a line.

Decoding is strict. A line that is too long, is not JSON, has an unknown kind, an unknown or missing field, or a value of the
wrong type is a ``WireError``, never a traceback further in. No line ever holds a raw newline: JSON escapes them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.backend.whatif import Answer, Question
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import FinishReason, Live, Message, Squeezed, TextKind
from tokamac.engine.limits.diagnosis import Diagnosis
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling
from tokamac.engine.price import Price

LONGEST_LINE = 64 * 2**20  # a conversation that fills a context of a million tokens is about 5 MB


class WireError(TokamacError):
    """A line that is not a message."""


# Requests: screen → engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Load ``model`` in place of whatever is loaded."""

    model: str
    kv: KVSpec = field(default_factory=KVSpec)
    prompt_cache: bool = True


@dataclass(frozen=True, slots=True)
class Send:
    """Reply to a conversation. It is always whole: the engine's process remembers nothing that matters."""

    id: int
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End reply ``id`` within one token; it finishes with the reason ``cancelled``."""

    id: int


@dataclass(frozen=True, slots=True)
class Warm:
    """Compute in idle time what is certain of a conversation whose last message is still being written. Nothing is replied.

    Any request ends it, and so does another ``Warm``. Where the prompt cache is off nothing is done.
    """

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class AskPrice:
    """Tell what a reply to a conversation would take until its first token: ``Priced`` comes when the engine is free.

    A later question replaces one that still waits.
    """

    id: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class AskWhatIf:
    """Tell what a model would do otherwise, or elsewhere: ``WhatIf`` comes when the engine is free.

    A later question of the same kind replaces one that is not answered yet.
    """

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class Unload:
    """Give the model's memory back."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End the process."""


Request = Load | Send | Cancel | Warm | AskPrice | AskWhatIf | Unload | Quit


# Replies: engine → screen -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use by the engine, now and at most, and the bytes it may use; None is unknown.

    predicted_peak_bytes: what the peak of a reply that has ended was expected to be.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the screen shows of a loaded model; None is unknown.

    device: what computes: "metal", "cuda" or "cpu". capacity: tokens that the context holds at once; rolls: whether the oldest make
    room then.
    recommended: what its makers suggest, else the defaults. notes: where the caches are not what was asked for, and why.
    """

    name: str
    path: str = ""
    device: str = ""
    architecture: str = ""
    parameters: int | None = None
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    context_length: int | None = None
    thinks: bool = False
    capacity: int | None = None
    rolls: bool = False
    recommended: Sampling = field(default_factory=Sampling)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """How far loading has come, in bytes; ``total`` None is not known yet."""

    stage: Literal["download", "weights"]
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready. ``ceiling_tps`` is that of an empty context."""

    info: ModelInfo
    ceiling_tps: float | None = None
    bandwidth_gbs: float | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The model is gone and its memory given back."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens of reply ``id`` in the cache; ``cached`` of them were there before."""

    id: int
    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The conversation did not fit: ``tokens`` of its middle are not seen in reply ``id``."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ShortOfMemory:
    """Memory was short before reply ``id``, and this was done."""

    id: int
    done: Squeezed


@dataclass(frozen=True, slots=True)
class Text:
    """Characters of reply ``id``, batched."""

    id: int
    text: str
    kind: TextKind = "answer"


@dataclass(frozen=True, slots=True)
class Stats:
    """The measurements of reply ``id`` so far."""

    id: int
    live: Live


@dataclass(frozen=True, slots=True)
class Done:
    """Reply ``id`` has ended. Its whole text is repeated, so that what is kept is what the engine said."""

    id: int
    reason: FinishReason
    text: str
    thinking: str
    metrics: Metrics
    memory: MemoryUse = field(default_factory=MemoryUse)
    outliers: tuple[Outlier, ...] = ()
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Priced:
    """The answer to ``AskPrice`` of the same id; None where no price can be told: too long a conversation, say."""

    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer to ``AskWhatIf`` of the same id. None: ``error`` says why, or only ``done`` of ``total`` models are weighed."""

    id: int
    answer: Answer | None
    error: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """Something went wrong that the user should know of and that ends nothing; once for each loaded model."""

    text: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive, and busy."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed: reply ``id``, or (None) the loading of a model. The process goes on."""

    id: int | None
    error: str
    hint: str = ""


Reply = (
    Loading | Loaded | Unloaded | LeftOut | ShortOfMemory | Prefill | Text | Stats | Done | Priced | WhatIf | Notice
    | Heartbeat | Failed
)  # fmt: skip

_REQUESTS = {kind.__name__.lower(): kind for kind in get_args(Request)}
_REPLIES = {kind.__name__.lower(): kind for kind in get_args(Reply)}


def encode(message: Request | Reply) -> bytes:
    """Return ``message`` as one line, newline included."""
    fields = {"type": type(message).__name__.lower(), **asdict(message)}
    # ASCII, so that a reader may cut the line at any byte and lone surrogates survive as escapes.
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode_request(line: bytes) -> Request:
    """Return the request on ``line``; raise WireError if there is none."""
    message = _decode(line, _REQUESTS)
    assert isinstance(message, Request)
    return message


def decode_reply(line: bytes) -> Reply:
    """Return the reply on ``line``; raise WireError if there is none."""
    message = _decode(line, _REPLIES)
    assert isinstance(message, Reply)
    return message


def _decode(line: bytes, kinds: Mapping[str, type]) -> object:
    if len(line) > LONGEST_LINE:
        raise WireError(f"a line of {len(line)} bytes is too long", f"At most {LONGEST_LINE} are read.")
    try:
        fields = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}", str(error)[:120]) from error
    if not isinstance(fields, dict):
        raise WireError(f"not an object: {line[:80]!r}")
    name = fields.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"unknown type {name!r}"[:120])
    try:
        return build(kind, fields, str(name))
    except (ShapeError, TokamacError) as error:
        raise WireError(f"a bad message: {error}"[:200]) from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number here")

"""Wire protocol between the screen and the engine process: one JSON object per line, one frozen dataclass each."""

# ``ReplyEvent`` carries the events of ``Engine.generate``. Decoding is strict, with the classes' annotations as
# schema: an overlong line, bad JSON, an unknown kind, an unknown or missing field, or a wrong type is a
# ``WireError``. JSON escapes newlines, so no line holds a raw one.

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Event, Live, LoadProgress, Message, ModelSpec, Price, PromptText, StepTokens
from tokamac.engine.lab.passes import PassLog
from tokamac.engine.lab.without_cache import CacheWorth
from tokamac.engine.options import (
    FULL_PACE,
    PARALLEL,
    KVBits,
    KVSpec,
    Nodes,
    Sampling,
    TemplateOptions,
    ToolSpec,
    WiredMode,
)
from tokamac.engine.perf.diagnosis import Waits
from tokamac.engine.schedule.capacity import Capacity
from tokamac.engine.speculation.gain import ACCEPTANCE, SpeculationGain
from tokamac.engine.vision.cost import PicturePrice
from tokamac.engine.vision.picture import Picture

from ..text.strict_json import ShapeError, build, tag

# table: one thing changed at a time, decoding over contexts, and the roofline. at once: so many replies together.
# guesses: what guessing ahead would gain. cache: what a KV cache is worth. chips: the same case on every chip of the
# table. models: those of the catalogue, best first. disk: those that are named, in their order.
Wanted = Literal["table", "at once", "guesses", "cache", "chips", "models", "disk"]

# What makes a case of the table another one. as now: nothing, it is the chat's own.
Change = Literal["as now", "as asked", "weights", "keys and values", "context"]


@dataclass(frozen=True, slots=True)
class Where:
    """A machine: this one if ``chip`` is empty, else one of the chip table. memory_gb: as advertised."""

    chip: str = ""
    gpu_cores: int | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class ChatCase:
    """A chat's model and caches, at the context of its decode ceiling."""

    model: str
    kv: KVSpec
    context: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Question:
    """A what-if case of one model: a folder, id or catalogue name; nothing is downloaded.

    bits: None is as packed. context: tokens held while decoding; prompt: tokens of it prefilled first.
    names: local models to weigh. now: the chat's own case, shown before the table's. acceptance: probability
    that a draft token is accepted; draft: draft model, "" is one known to fit.
    """

    wanted: Wanted
    model: str
    bits: int | None = None
    kv: KVSpec = field(default_factory=KVSpec)
    context: int = 4096
    prompt: int = 4096
    where: Where = field(default_factory=Where)
    names: tuple[str, ...] = ()
    now: ChatCase | None = None
    acceptance: float = ACCEPTANCE
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Predicted bytes, tokens/s and seconds; None is unknown, ``reason`` says why.

    from_others: bytes that other programs must give up.
    """

    memory_bytes: int | None = None
    budget_bytes: int | None = None
    fits: bool | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    ttft_s: float | None = None
    reason: str = ""
    from_others: int = 0


@dataclass(frozen=True, slots=True)
class CaseLine:
    """A case with one change. bits: None is as packed."""

    change: Change
    bits: int | None
    key_bits: int
    value_bits: int
    context: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class ChipLine:
    chip: str
    bandwidth_gbs: float | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A catalogue or local model; None is unknown.

    context: tokens of prompt and context of the figures. text_only: its vision or audio is left out.
    """

    model: str
    download_bytes: int | None
    parameters: int | None
    active_parameters: int | None
    verdict: str
    figures: Figures
    bits_per_weight: float | None = None
    context: int | None = None
    text_only: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Decode speed at one context, tokens/s."""

    context: int
    ceiling_tps: float | None
    expected_tps: float | None


@dataclass(frozen=True, slots=True)
class Spot:
    """A phase on the roofline: operations per byte and TFLOP/s; None is unknown."""

    name: Literal["decode", "prefill"]
    intensity: float
    bound: Waits | None
    ceiling_tflops: float | None
    expected_tflops: float | None


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's roofline with both phases. ridge: operations per byte."""

    bandwidth_gbs: float
    peak_tflops: float
    ridge: float
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Weighing:
    """Progress: ``done`` of ``total`` models are weighed. line: the last one."""

    done: int
    total: int
    line: ModelLine


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer; parts that weren't asked for are empty. place: the machine's name.

    rule: how its budget is derived where it wasn't read. context_length: the model's trained length. notes: on
    all cases.
    """

    model: str
    place: str
    rule: str = ""
    context_length: int | None = None
    cases: tuple[CaseLine, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    roof: Roof | None = None
    chips: tuple[ChipLine, ...] = ()
    models: tuple[ModelLine, ...] = ()
    notes: tuple[str, ...] = ()
    cache: CacheWorth | None = None
    at_once: Capacity | None = None
    guesses: SpeculationGain | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load ``model`` in place of the current one, once no reply runs.

    memory: byte limit; None: the system's. unchecked: load despite unsupported config keys. adapter: folder or
    Hugging Face id. parallel: max parallel replies. draft: draft model. cpu_exact: no rounding on a CPU.
    text_every_s: text batching interval, None suits a screen. nodes: processes that share the model; None: one.
    forms: prepare constrained output at load. private: nothing of the prompts is written to the disk.
    """

    model: str
    kv: KVSpec = field(default_factory=KVSpec)
    prompt_cache: bool = True
    memory: int | None = None
    unchecked: bool = False
    adapter: str | None = None
    parallel: int = PARALLEL
    speculation: bool = True
    draft: str | None = None
    cpu_exact: bool = False
    wired: WiredMode = "auto"
    pace: int = FULL_PACE
    pace_on_battery: int | None = None
    text_every_s: float | None = None
    nodes: Nodes | None = None
    forms: bool = False
    private: bool = False

    def for_model(self, model: str, adapter: str | None, draft: str | None) -> "Load":
        """Return a request for another model with these settings; ``self`` for the same one."""
        # ``unchecked`` and what is loaded with this model don't carry over to another.
        return (
            self if model == self.model else replace(self, model=model, unchecked=False, adapter=adapter, draft=draft)
        )

    def same_engine(self, other: "Load") -> bool:
        """Whether an engine loaded by ``other`` computes the same and caches prompts alike."""
        return self._computing == other._computing

    @property
    def _computing(self) -> "Load":
        kv = self.kv if self.kv.rolls else replace(self.kv, keep=KVSpec().keep)
        return replace(
            self,
            kv=kv,
            memory=None,
            parallel=PARALLEL,
            pace=FULL_PACE,
            pace_on_battery=None,
            text_every_s=None,
            forms=False,
        )


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate a reply to a whole conversation: the engine process keeps no state that matters.

    Replies run in parallel, up to ``Load.parallel``. continues: the last message is a cut reply; generate the
    rest. background: yields to foreground replies. kv_bits: override of the loaded ones. tokens: a prompt in
    place of messages. watched: send live figures, and later passes. shows_guesses: report the characters of
    accepted draft tokens. load: number of the load whose model must reply; 0 is any.
    """

    id: int
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    continues: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)
    background: bool = False
    kv_bits: KVBits | None = None
    tokens: tuple[int, ...] = ()
    watched: bool = True
    shows_guesses: bool = False
    load: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """End reply ``id`` within one token, with the reason ``cancelled``."""

    id: int


@dataclass(frozen=True, slots=True)
class KeepGoing:
    """Let reply ``id`` continue despite its repetition loop."""

    id: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Pause the events of reply ``id``; the engine pauses it too once far ahead, without blocking others."""

    id: int


@dataclass(frozen=True, slots=True)
class GoOn:
    id: int


@dataclass(frozen=True, slots=True)
class Warm:
    """Prefill in idle time the certain part of a conversation still being typed; ends with ``Warmed``.

    Any request or another ``Warm`` ends it early. Does nothing where the prompt cache is off.
    """

    id: int
    messages: tuple[Message, ...]
    template: TemplateOptions = field(default_factory=TemplateOptions)


# Who wants to know a price: the draft, the menu of what could be done with older messages, or who tells it at once.
Asker = Literal["draft", "actions", "quote"]


@dataclass(frozen=True, slots=True)
class AskPrice:
    """Ask for the time to first token of a reply; a later question replaces a waiting one."""

    asker: Asker
    id: int
    messages: tuple[Message, ...]
    continues: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class AskCount:
    """Count the tokens of a text, of ``tools`` as the chat template writes them, or of one picture, with its price."""

    id: int
    text: str
    tools: tuple[ToolSpec, ...] = ()
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class AskTokens:
    """Ask for a prompt's tokens: of ``messages`` through the template, else of ``text`` with its BOS.

    continues: the conversation ends with an unfinished reply.
    """

    id: int
    text: str = ""
    messages: tuple[Message, ...] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class AskEmbeddings:
    """Ask for the vectors of texts; the arguments of ``Engine.embed``."""

    id: int
    texts: tuple[str, ...]
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class AskWhatIf:
    """Ask a what-if question; a later one of the same kind replaces it."""

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Recompute a reply's token probabilities; ``LookedAt`` comes in pieces while the engine is free.

    A foreground reply or another question ends it. passes, prompt_tokens, cached_tokens: as recorded; None: unknown.
    """

    id: int
    prompt: tuple[Message, ...]
    reply: Message
    passes: PassLog | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class StopLooking:
    """Cancel ``LookAgain``."""


@dataclass(frozen=True, slots=True)
class Share:
    path: str


@dataclass(frozen=True, slots=True)
class Join:
    """A guest's first message: subscribe to the loaded model.

    load: the expected model, else the guest is refused or disconnected; None is any.
    """

    load: Load | None = None
    text_every_s: float | None = None


@dataclass(frozen=True, slots=True)
class LimitMemory:
    """Set the model's byte limit; None: the system's limit."""

    memory: int | None


@dataclass(frozen=True, slots=True)
class SetPace:
    percent: int
    on_battery: int | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    """End the process, once no reply runs."""


Request = (
    Load | Generate | Cancel | KeepGoing | Hold | GoOn | Warm | AskPrice | AskCount | AskTokens | AskEmbeddings | AskWhatIf
    | LookAgain | StopLooking | Share | Join | LimitMemory | SetPace | Quit
)  # fmt: skip

# What a guest may ask.
GuestRequest = (
    Join | Generate | Cancel | KeepGoing | Hold | GoOn | Warm | AskPrice | AskCount | AskTokens | AskEmbeddings | AskWhatIf
    | LookAgain | StopLooking
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Engine memory in bytes: current, peak, budget; None is unknown.

    predicted_peak_bytes: prediction for the ended reply. budget_source: where the budget comes from.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_source: str = ""
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """The owner is loading another model: a guest's requests now go to that one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready. ceiling_tps: at an empty context. load: this load's number, from 1."""

    info: ModelSpec
    ceiling_tps: float | None = None
    bandwidth_gbs: float | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    bandwidth_note: str = ""
    load: int = 0


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """An engine event of reply ``id``; text pieces are merged. Live: measurements so far."""

    id: int
    event: Event | Live


@dataclass(frozen=True, slots=True)
class Warmed:
    """Warm-up ``id`` has ended. price: None if interrupted or it can't be sent."""

    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class Priced:
    """Answer to ``AskPrice``; None where there is no price (too long a conversation, say)."""

    asker: Asker
    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class Counted:
    id: int
    tokens: int | None
    picture: PicturePrice | None = None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Answer to ``AskTokens``. kind: class of the error."""

    id: int
    tokens: tuple[int, ...] = ()
    error: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Answer to ``AskEmbeddings``. vectors: little-endian float32 in base64. kind: class of the error."""

    id: int
    vectors: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    error: str = ""
    hint: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Answer to ``AskWhatIf``. None: an ``error``, or progress (``done`` of ``total``; ``line``: the last model)."""

    id: int
    answer: Answer | None
    error: str = ""
    done: int = 0
    total: int = 0
    line: ModelLine | None = None


@dataclass(frozen=True, slots=True)
class LookedAt:
    """Part of the answer to ``LookAgain``: the prompt, tokens or progress. error: why it ended early, or ""."""

    id: int
    prompt: PromptText | None = None
    tokens: StepTokens | None = None
    done: int = 0
    total: int = 0
    ended: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineMeasured:
    """The idle-time measurement updated the limits. Fields as in ``Loaded``."""

    ceiling_tps: float | None
    bandwidth_gbs: float | None
    bandwidth_note: str


@dataclass(frozen=True, slots=True)
class EngineNotice:
    """A warning for the user that ends nothing; sent once per load."""

    text: str


@dataclass(frozen=True, slots=True)
class Guests:
    count: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive, and busy."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Request ``id`` failed (None: not a reply, mostly a load); the process goes on. kind: error class."""

    id: int | None
    error: str
    hint: str = ""
    kind: str = ""


EngineMessage = (
    LoadProgress | Loading | Loaded | ReplyEvent | MemoryUse | Warmed | Priced | Counted | PromptTokens | Embedded | WhatIf
    | LookedAt | EngineNotice | Guests | Heartbeat | MachineMeasured | RequestFailed
)  # fmt: skip


class AnotherModelError(TokamacError):
    """Another model is loaded than the one a reply was asked of."""


LONGEST_LINE = 64 * 2**20  # a conversation that fills a context of a million tokens is about 5 MB


class WireError(TokamacError):
    """A line that is not a message."""


_REQUESTS = {tag(kind): kind for kind in get_args(Request)}

_MESSAGES = {tag(kind): kind for kind in get_args(EngineMessage)}


def encode(message: Request | EngineMessage) -> bytes:
    told = {"type": tag(type(message)), **_fields(message)}
    if isinstance(message, ReplyEvent):
        told["event"] = {"type": tag(type(message.event)), **_fields(message.event)}
    # ASCII, so that a reader may cut the line at any byte and lone surrogates survive as escapes.
    return json.dumps(told, allow_nan=False, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _plain(value: Any) -> Any:
    return _fields(value) if is_dataclass(value) else os.fspath(value)


def decode_request(line: bytes) -> Request:
    """Raises WireError."""
    message = _decode(line, _REQUESTS)
    assert isinstance(message, Request)
    return message


def decode_message(line: bytes) -> EngineMessage:
    """Raises WireError."""
    message = _decode(line, _MESSAGES)
    assert isinstance(message, EngineMessage)
    return message


def _decode(line: bytes, kinds: Mapping[str, type]) -> object:
    if len(line) > LONGEST_LINE:
        raise WireError(f"a line of {len(line)} bytes is too long", f"At most {LONGEST_LINE} are read.")
    try:
        given = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}", str(error)[:120]) from error
    if not isinstance(given, dict):
        raise WireError(f"not an object: {line[:80]!r}")
    name = given.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"unknown type {name!r}"[:120])
    try:
        return build(kind, given, str(name))
    except (ShapeError, TokamacError) as error:
        raise WireError(f"a bad message: {error}"[:200]) from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number here")

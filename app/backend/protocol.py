"""What the screen and the engine's process say to each other: one JSON object a line, one frozen dataclass a message.

A reply is told in the engine's own words: ``ReplyEvent`` carries the events that ``Engine.generate`` yields. Decoding is strict:
the types written in a class are the schema. A line that is too long, is not JSON, has an unknown kind, an unknown or missing
field, or a value of the wrong type is a ``WireError``, never a traceback further in. No line holds a raw newline: JSON escapes
them. The answers to "what if" are computed in the engine's process (advice.py), since the screen imports no MLX.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Event, Live, LoadProgress, Message, ModelNote, Price
from tokamac.engine.options import PARALLEL, KVBits, KVSpec, Nodes, Sampling, TemplateOptions, Thinking, ToolSpec
from tokamac.engine.passes.log import PassLog
from tokamac.engine.passes.tokens import PromptText, StepTokens
from tokamac.engine.passes.without_cache import CacheWorth
from tokamac.engine.perf.diagnosis import Waits
from tokamac.engine.schedule.capacity import Capacity
from tokamac.engine.speculation.gain import ACCEPTANCE, SpeculationGain

from ..strict_json import ShapeError, build, tag

Wanted = Literal["table", "at once", "guesses", "cache", "chips", "models", "disk"]
"""table: one thing changed at a time, decoding over contexts, and the roofline. at once: so many replies together. guesses: what
guessing ahead would gain. cache: what a KV cache is worth. chips: the same case on every chip of the table. models: those of the
catalogue, best first. disk: those that are named, in their order."""

Change = Literal["as now", "as asked", "weights", "keys and values", "context"]
"""What makes a case of the table another one. as now: nothing, it is the chat's own."""


@dataclass(frozen=True, slots=True)
class Where:
    """A machine: this one where ``chip`` is empty, else one of the chip table. memory_gb: as its maker says it."""

    chip: str = ""
    gpu_cores: int | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class ChatCase:
    """What a chat's panel speaks of: its model with its caches, at the context that its ceiling holds for."""

    model: str
    kv: KVSpec
    context: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Question:
    """One case of one model. model: a folder, an id or a name of the catalogue; nothing is downloaded.

    bits: None is as it is packed. context: tokens held while decoding; prompt: of them, computed before the first token.
    names: the models to weigh, where the question is about several that are here. now: the chat's own case, put before the table's.
    acceptance: how likely a guessed token is; draft: a model that guesses, "" is one that is known to fit.
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
    """What a machine makes of a case. Bytes, tokens a second, seconds; None is unknown, and ``reason`` then says why.

    fits: whether ``memory_bytes`` are within ``budget_bytes``. from_others: bytes that other programs have to give way by.
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
    """A case with one thing changed. bits: None is as the model is packed."""

    change: Change
    bits: int | None
    key_bits: int
    value_bits: int
    context: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class ChipLine:
    """The case on one chip."""

    chip: str
    bandwidth_gbs: float | None
    figures: Figures


Group = Literal["recommended", "speed unknown", "fit unknown", "slow", "does not fit"]
"""What a model to choose is listed under, best first (engine/perf/what_if.py)."""


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A model of the catalogue, or one that is here. Bytes, weights; None is unknown. verdict: in a few words.

    download_bytes: of one that is not here. context: tokens of the prompt, and of the context, that the figures are for. text_only:
    it sees or hears, too, and that is left out.
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
    group: Group = "fit unknown"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Decoding at one context, in tokens a second."""

    context: int
    ceiling_tps: float | None
    expected_tps: float | None


@dataclass(frozen=True, slots=True)
class Spot:
    """A phase under the roof: operations a byte, and what it does of 10^12 a second; None is unknown."""

    name: Literal["decode", "prefill"]
    intensity: float
    bound: Waits | None
    ceiling_tflops: float | None
    expected_tflops: float | None


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's roofline, and where both phases are under it. ridge: operations a byte."""

    bandwidth_gbs: float
    peak_tflops: float
    ridge: float
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Weighing:
    """The answer is not there yet: ``done`` of ``total`` models are weighed. line: the last of them."""

    done: int
    total: int
    line: ModelLine


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: of what it did not want, nothing. place: the machine's name.

    rule: how its budget is known, where it was not read. context_length: what the model was made for. notes: what is to be known
    of all cases together.
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
    """Load ``model`` in place of whatever is loaded, once no reply runs.

    memory: bytes that it may take; None is the system's limit. unchecked: although something of its config is computed otherwise.
    adapter: a folder or a Hugging Face id of what is added to it. parallel: replies at once at most. speculation: whether tokens
    are guessed, and several verified at once; draft: a smaller model that guesses. cpu_exact: a CPU rounds nothing.
    text_every_s: how long text of a reply may wait for more of it; None is as suits a screen. nodes: the processes that hold the
    model together; None is the engine's alone. forms: whether what holds replies to a form is made now, while no other reply runs.
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
    text_every_s: float | None = None
    nodes: Nodes | None = None
    forms: bool = False

    def of(self, model: str, adapter: str | None, draft: str | None) -> "Load":
        """Return the request for another model with the same settings; for the same one, this.

        That this one may be unchecked, and what is loaded with it, says nothing of the other.
        """
        return (
            self if model == self.model else replace(self, model=model, unchecked=False, adapter=adapter, draft=draft)
        )

    def same_engine(self, other: "Load") -> bool:
        """Whether an engine that was loaded by the other would do for this: it computes the same, and keeps prompts alike."""
        return self._computing == other._computing

    @property
    def _computing(self) -> "Load":
        kv = self.kv if self.kv.rolls else replace(self.kv, keep=KVSpec().keep)
        return replace(self, kv=kv, memory=None, parallel=PARALLEL, text_every_s=None, forms=False)


@dataclass(frozen=True, slots=True)
class Generate:
    """Reply to a conversation. It is always whole: the engine's process remembers nothing that matters.

    Others may be asked for before it ends: they are made at the same time, as many as ``Load.parallel`` says.

    continues: the conversation ends with a reply that was cut; generate the rest of it. template: what the chat template is told.
    background: nobody waits for it: it gives way to what somebody waits for. kv_bits: of keys and values, other than the model was
    loaded with. tokens: a prompt in place of a conversation. watched: somebody looks at its figures while it is written, and at its
    passes later; else they are left out. shows_guesses: which characters were guessed is told, too. load: the number of the load
    whose model is to reply, and no other; 0 is any.
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
    """End reply ``id`` alone, within one token; it finishes with the reason ``cancelled``."""

    id: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Tell no more of reply ``id`` for now: its reader is behind. Some way ahead of it the engine rests, and holds up nobody."""

    id: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """Tell more of reply ``id`` again."""

    id: int


@dataclass(frozen=True, slots=True)
class Warm:
    """Compute in idle time what is certain of a conversation whose last message is still being written; ``Warmed`` tells the end.

    Any request ends it early, and so does another ``Warm``. Where the prompt cache is off nothing is computed. template: as for
    ``Generate``.
    """

    id: int
    messages: tuple[Message, ...]
    template: TemplateOptions = field(default_factory=TemplateOptions)


Asker = Literal["draft", "actions"]
"""Who wants to know a price: the draft, or the menu of what could be done with older messages."""


@dataclass(frozen=True, slots=True)
class AskPrice:
    """Tell what a reply to a conversation would take until its first token: ``Priced`` comes when the engine is free.

    A later question of the same asker replaces one that still waits. continues, template: as for ``Generate``.
    """

    asker: Asker
    id: int
    messages: tuple[Message, ...]
    continues: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class AskCount:
    """Tell how many tokens a text is: ``Counted`` comes when the engine is free.

    tools: instead of the text, what the model's chat template writes of their definitions.
    """

    id: int
    text: str
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class AskTokens:
    """Tell the tokens of a prompt: ``PromptTokens`` comes when the engine is free.

    messages, template: a conversation, as the chat template writes it; where there is none, ``text`` is the prompt, after what the
    tokenizer puts before every text. continues: the conversation ends with a reply that goes on.
    """

    id: int
    text: str = ""
    messages: tuple[Message, ...] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class AskWhatIf:
    """Tell what a model would do otherwise, or elsewhere: ``WhatIf`` comes when the engine is free.

    A later question of the same kind replaces one that is not answered yet.
    """

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Compute how likely the tokens of a reply were; ``LookedAt`` comes piece by piece, when the engine is free.

    Any reply that somebody waits for ends it, and so does another. prompt: the messages that the reply answers. passes,
    prompt_tokens, cached_tokens: what was recorded of it; None is not known. template: as for ``Generate``.
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
    """Nobody waits any more for what ``LookAgain`` asked."""


@dataclass(frozen=True, slots=True)
class Share:
    """Let other programs of the user ask this process, as guests, over a socket at ``path``."""

    path: str


@dataclass(frozen=True, slots=True)
class Join:
    """What a guest says first: tell what is loaded, now and later.

    load: what it expects; where another model is loaded the guest is refused, or let go. None takes any. text_every_s: as of
    ``Load``.
    """

    load: Load | None = None
    text_every_s: float | None = None


@dataclass(frozen=True, slots=True)
class LimitMemory:
    """Let the loaded model take so many bytes from now on: others come or go beside it. None: the system's limit."""

    memory: int | None


@dataclass(frozen=True, slots=True)
class Quit:
    """End the process, once no reply runs."""


Request = (
    Load | Generate | Cancel | Hold | GoOn | Warm | AskPrice | AskCount | AskTokens | AskWhatIf | LookAgain | StopLooking
    | Share | Join | LimitMemory | Quit
)  # fmt: skip

GuestRequest = (
    Join | Generate | Cancel | Hold | GoOn | Warm | AskPrice | AskCount | AskTokens | AskWhatIf | LookAgain | StopLooking
)  # fmt: skip
"""What a guest may ask."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use by the engine, now and at most, and the bytes it may use; None is unknown.

    predicted_peak_bytes: what the peak of a reply that has ended was expected to be. budget_source: in words, where the bytes it
    may use come from. total_bytes: the memory there is.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_source: str = ""
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the screen shows of a loaded model; None is unknown.

    device: what computes: "metal", "cuda" or "cpu". capacity: tokens that the context holds at once; rolls: whether the oldest make
    room then. later_system: whether its chat template takes system messages that follow others; else they are left out of prompts.
    recommended: what its makers suggest, else the defaults. model_notes: what the user should know of it.
    advice: what to do about the installation, where that holds the model up. memory_notes: what loading it cost other programs.
    doubts: what of its config is computed otherwise, where it was loaded unchecked.
    adapter: what is added to it, as it was asked for; adapter_digest: of all its bytes.
    draft: the draft model beside it, as it was asked for; draft_bytes: of its weights.
    heads: its own heads that guess further tokens, in words; heads_bytes: of their weights, and at most of their keys and values.
    thinking_modes: what its chat template can be told of thinking; template_names: all that it reads beside the messages.
    takes_tools: whether it can call tools; else calls of earlier replies are given to it as text.
    rounded: what rounding on a CPU costs it, in words, and so whether it is done; "" where none can be, or none may.
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
    later_system: bool = False
    capacity: int | None = None
    rolls: bool = False
    recommended: Sampling = field(default_factory=Sampling)
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
    rounded: str = ""


@dataclass(frozen=True, slots=True)
class Loading:
    """Another model is about to be loaded, for who owns the process: what a guest asks for now is for the next model."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready.

    ceiling_tps: of an empty context. bandwidth_note: how it was measured, or why it is unknown. load: this load's number, from 1.
    """

    info: ModelInfo
    ceiling_tps: float | None = None
    bandwidth_gbs: float | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    bandwidth_note: str = ""
    load: int = 0


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """An event of reply ``id``, as the engine said it; of pieces of text several in one. Live: what is measured so far."""

    id: int
    event: Event | Live


@dataclass(frozen=True, slots=True)
class Warmed:
    """The warm-up ``id`` has ended. price: what the conversation takes now; None where it was interrupted or can't be sent."""

    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class Priced:
    """The answer to ``AskPrice`` of the same asker and id; None where no price can be told: too long a conversation, say."""

    asker: Asker
    id: int
    price: Price | None


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to ``AskCount`` of the same id; None where nothing can count."""

    id: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The answer to ``AskTokens`` of the same id. error: why there are none; "" where there are."""

    id: int
    tokens: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer to ``AskWhatIf`` of the same id. None: ``error`` says why, or only ``done`` of ``total`` models are weighed.

    line: the last that was.
    """

    id: int
    answer: Answer | None
    error: str = ""
    done: int = 0
    total: int = 0
    line: ModelLine | None = None


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A part of the answer to ``LookAgain`` of the same id: the prompt, or some tokens; or how far it is, of ``total``.

    ended: nothing more comes. error: why it ended early; "" where it did not.
    """

    id: int
    prompt: PromptText | None = None
    tokens: StepTokens | None = None
    done: int = 0
    total: int = 0
    ended: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineMeasured:
    """The machine was measured in idle time, and its limits with the loaded model are known better. Fields as of ``Loaded``."""

    ceiling_tps: float | None
    bandwidth_gbs: float | None
    bandwidth_note: str


@dataclass(frozen=True, slots=True)
class EngineNotice:
    """Something the user should know that ends nothing; sent once for each loaded model."""

    text: str


@dataclass(frozen=True, slots=True)
class Guests:
    """So many guests ask this process now."""

    count: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive, and busy."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request failed: reply ``id``, or (None) another one, most often the loading of a model. The process goes on.

    kind: the class of the engine's error.
    """

    id: int | None
    error: str
    hint: str = ""
    kind: str = ""


EngineMessage = (
    LoadProgress | Loading | Loaded | ReplyEvent | MemoryUse | Warmed | Priced | Counted | PromptTokens | WhatIf | LookedAt
    | EngineNotice | Guests | Heartbeat | MachineMeasured | RequestFailed
)  # fmt: skip


class AnotherModelError(TokamacError):
    """The model that a reply was asked of is not the one that is loaded now."""


LONGEST_LINE = 64 * 2**20  # a conversation that fills a context of a million tokens is about 5 MB


class WireError(TokamacError):
    """A line that is not a message."""


_REQUESTS = {tag(kind): kind for kind in get_args(Request)}

_MESSAGES = {tag(kind): kind for kind in get_args(EngineMessage)}


def encode(message: Request | EngineMessage) -> bytes:
    """Return ``message`` as one line, newline included."""
    fields = {"type": tag(type(message)), **asdict(message)}
    if isinstance(message, ReplyEvent):
        fields["event"]["type"] = tag(type(message.event))
    # ASCII, so that a reader may cut the line at any byte and lone surrogates survive as escapes.
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode_request(line: bytes) -> Request:
    """Return the request on ``line``; raise WireError if there is none."""
    message = _decode(line, _REQUESTS)
    assert isinstance(message, Request)
    return message


def decode_message(line: bytes) -> EngineMessage:
    """Return the reply on ``line``; raise WireError if there is none."""
    message = _decode(line, _MESSAGES)
    assert isinstance(message, EngineMessage)
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
    raise ValueError(f"{name} is not a number here")

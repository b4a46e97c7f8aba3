"""The figures of the side panel: their values, and each explained by its formula, inputs, source and meaning.

Pure: a reply that was measured in, words out. It is the session's own, running or last, or an earlier one as it is stored with its
message (``EarlierReply``). No rate is computed here; those that a reply measured are shown with their inputs. The ceiling has one
source: the bandwidth that the engine believes now, for replies of earlier days too (``EngineConnection.with_ceiling``).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol, get_args

from tokamac.engine import metrics as rates
from tokamac.engine.events import Live, PrefillProgress
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import RECENT_GAPS, Cause, Metrics, Outlier, PromptBeside
from tokamac.engine.perf.diagnosis import Diagnosis

from .. import units
from ..backend.protocol import Load, MemoryUse, ModelInfo
from ..sanitise import sanitise_line
from ..settings import is_new
from ..verdict import BOUND, READING_TPS, headline, sentence, value_text, words
from .actions import Keymap
from .conversation import Reply
from .session import Session
from .steps import EnginePhase


class EngineState(Protocol):
    """What figures need to know of the engine. ``EngineConnection`` has all of it."""

    @property
    def load(self) -> Load:
        """The model that is wanted, with its settings."""

    @property
    def phase(self) -> EnginePhase:
        """What the engine is doing."""

    @property
    def info(self) -> ModelInfo | None:
        """The model that made the reply, where it is loaded."""

    @property
    def memory(self) -> MemoryUse:
        """Memory now, and as it was predicted for the reply."""

    @property
    def ceiling_tps(self) -> float | None:
        """The ceiling at an empty context."""

    @property
    def bandwidth_gbs(self) -> float | None:
        """The bandwidth that is believed now."""

    @property
    def bandwidth_note(self) -> str:
        """On what that rests, or why there is none."""


class Measured(Protocol):
    """A reply and what was measured of it. ``Session`` is one: its running reply, or its last."""

    @property
    def engine(self) -> EngineState:
        """The engine, as far as it concerns this reply."""

    @property
    def keymap(self) -> Keymap:
        """The keys that hold."""

    @property
    def replying(self) -> bool:
        """Whether it is being made."""

    @property
    def prefill(self) -> PrefillProgress | None:
        """How far its prompt is read."""

    @property
    def live(self) -> Live | None:
        """What was said of it last while it was written."""

    @property
    def metrics(self) -> Metrics | None:
        """What it cost so far."""

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """Its slowest gaps."""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Why it took that long."""

    @property
    def left_out(self) -> int:
        """Tokens that its prompt was shortened by."""

    @property
    def which(self) -> str:
        """Which reply it is, in a word or two."""

    @property
    def at_once(self) -> str:
        """How many are being written together with it, and how fast; "" where it is alone."""


@dataclass(frozen=True, slots=True)
class PastEngine:
    """The engine, for a reply that it made earlier. info: None where another model made it."""

    load: Load
    info: ModelInfo | None
    memory: MemoryUse
    ceiling_tps: float | None
    bandwidth_gbs: float | None
    bandwidth_note: str
    phase: EnginePhase = EnginePhase.IDLE


@dataclass(frozen=True, slots=True)
class EarlierReply:
    """A reply before the last one, as it is stored with its message. See ``Measured`` for the attributes."""

    engine: PastEngine
    keymap: Keymap
    metrics: Metrics
    outliers: tuple[Outlier, ...]
    diagnosis: Diagnosis | None
    which: str
    prefill: PrefillProgress | None = None
    live: Live | None = None
    left_out: int = 0
    replying: bool = False
    at_once: str = ""


def pointed_at(session: Session, key: int | None) -> Measured:
    """Return the reply ``key`` as it was measured, or the one to the prompt ``key``; the running or last one for None.

    A reply of which nothing was measured is no answer either: then it is the session's own.
    """
    node = None if key is None else session.conversation.reply_at(key)
    replies = [turn.reply_key for turn in session.turns if turn.reply_key]
    if node is None or node.reply is None or node.reply.metrics is None or node.key == replies[-1]:
        return session
    engine = session.engine
    reply = engine.with_ceiling(node.reply)
    assert reply.metrics is not None
    same = engine.info is not None and engine.info.name == reply.model
    return EarlierReply(
        PastEngine(
            load=engine.load if same else replace(engine.load, model=reply.model),
            info=engine.info if same else None,
            memory=replace(engine.memory, predicted_peak_bytes=None) if same else MemoryUse(),
            ceiling_tps=engine.ceiling_tps if same else None,
            bandwidth_gbs=engine.bandwidth_gbs if same else None,
            bandwidth_note=engine.bandwidth_note if same else "",
        ),
        session.keymap,
        reply.metrics,
        reply.outliers,
        reply.diagnosis,
        f"earlier reply · {replies.index(node.key) + 1} of {len(replies)}",
    )


def decode_now(reply: Measured) -> float | None:
    """Return the decode rate over the last few gaps, in tokens a second, while a reply is written."""
    if not reply.replying or reply.live is None or reply.engine.phase is EnginePhase.PREFILL:
        return None
    return rates.recent_rate(reply.live.gaps_ms)


def achieved_gbs(reply: Measured) -> float | None:
    """Return the bandwidth that decoding uses, in GB/s: of the last few gaps while a reply is written, else of the whole reply."""
    if reply.replying and reply.live is not None and reply.engine.phase is not EnginePhase.PREFILL:
        return reply.live.achieved_gbs
    return reply.metrics.achieved_gbs if reply.metrics is not None else None


def context_used(reply: Measured) -> int | None:
    """Return the tokens of the conversation, as far as known."""
    if reply.live is not None and reply.replying:
        return reply.live.context_tokens
    if reply.metrics is not None:
        return reply.metrics.prompt_tokens + reply.metrics.generated_tokens
    if reply.prefill is not None:
        return reply.prefill.done
    return None


def context_held(reply: Measured) -> int | None:
    """Return the tokens of the conversation that the model still sees."""
    used, capacity = context_used(reply), capacity_of(reply)
    return used if used is None or capacity is None else min(used, capacity)


def tokens_out_of_sight(reply: Measured) -> int:
    """Return the tokens of the conversation that the model no longer sees: left out of the prompt, or rolled out since."""
    used, capacity = context_used(reply), capacity_of(reply)
    rolled = max(0, used - capacity) if used is not None and capacity is not None else 0
    return reply.left_out + rolled


@dataclass(frozen=True, slots=True)
class Context:
    """The conversation in tokens: those in the context, and those no longer in it.

    cached: found in the prompt cache. computed: read for this reply. written: by the reply. free: space left; None: no limit.
    """

    cached: int
    computed: int
    written: int
    free: int | None
    out_of_sight: int

    @property
    def held(self) -> int:
        """Tokens that the model sees."""
        return self.cached + self.computed + self.written


def context_of(reply: Measured) -> Context | None:
    """Return what is in the context; None while nothing is known. The oldest tokens roll out: cached ones first."""
    used, metrics, prefill = context_used(reply), reply.metrics, reply.prefill
    if used is None:
        return None
    cached = metrics.cached_tokens if metrics is not None else prefill.cached if prefill is not None else 0
    written = metrics.generated_tokens if metrics is not None else 0
    capacity = capacity_of(reply)
    gone = 0 if capacity is None else max(0, used - capacity)
    seen = []
    for part in (min(cached, used), max(0, used - cached - written), min(written, used)):
        left = max(0, part - gone)
        gone -= part - left
        seen.append(left)
    free = None if capacity is None else max(0, capacity - sum(seen))
    return Context(seen[0], seen[1], seen[2], free, tokens_out_of_sight(reply))


def peak_bytes(reply: Measured) -> int | None:
    """Return the peak memory in bytes: of the reply, else since the model was loaded, else what is in use now."""
    memory, metrics = reply.engine.memory, reply.metrics
    return (metrics.peak_memory_bytes if metrics is not None else None) or memory.peak_bytes or memory.active_bytes


def capacity_of(reply: Measured) -> int | None:
    """Return the tokens that fit into the context."""
    return reply.engine.info.capacity if reply.engine.info is not None else None


def share_of_ceiling(metrics: Metrics) -> float | None:
    """Return the rate of passes as a share of the ceiling; None where either is unknown."""
    return rates.share(metrics.steps_tps, metrics.ceiling_tps)


def share_of_expected(metrics: Metrics) -> float | None:
    """Return the rate of passes as a share of the expected rate; None where either is unknown."""
    return rates.share(metrics.steps_tps, metrics.expected_tps)


def gap_and_cause(outlier: Outlier) -> str:
    """Return an outlier in words: ``41 ms at token 257: pool cleared``."""
    return f"{units.milliseconds(outlier.gap_ms)} at token {units.count(outlier.token)}: {causes(outlier)}"


def causes(outlier: Outlier) -> str:
    """Return the causes of an outlier, as far as known."""
    return ", ".join(_cause(each, outlier.prompt) for each in outlier.causes) or f"cause {units.UNKNOWN}"


def _cause(cause: Cause, prompt: PromptBeside | None) -> str:
    if cause != "another prompt" or prompt is None:
        return cause
    return f"another prompt of {units.count(prompt.tokens)} tokens" + (
        " in the background" if prompt.background else ""
    )


def prefill_eta_s(session: Session, now: float) -> float | None:
    """Return the seconds for the rest of the prompt at the rate so far; None until there is one."""
    prefill = session.prefill
    if prefill is None:
        return None
    speed = rates.rate(prefill.done - prefill.cached, now - session.engine.phase_since)
    return None if speed is None else (prefill.total - prefill.done) / speed


CLOCK = "the engine's clock"
COUNTED = "counted by the engine"
MEASURED = f"measured by {CLOCK}"
ALLOCATOR = "MLX's allocator"
NO_REPLY = "there is no reply yet"
NOT_YET = "the reply has not got that far"
UNMEASURED = Metrics(*[None] * len(fields(Metrics)))  # type: ignore[arg-type]  # nothing is known, not even what is counted


@dataclass(frozen=True, slots=True)
class Input:
    """A number that goes into a figure: with its unit, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A figure in words.

    Attributes:
        value: with its unit, or "unknown".
        source: where the figure itself comes from.
        meaning: one sentence.
        why: why it is unknown; "" where it is known.
    """

    name: str
    value: str
    formula: str
    inputs: tuple[Input, ...]
    source: str
    meaning: str
    why: str = ""


def _terms(reply: Measured, *keys: str) -> tuple[Input, ...]:
    """Return terms of the diagnosis, as far as it has them."""
    terms = () if reply.diagnosis is None else reply.diagnosis.terms
    wanted = (term for term in terms if term.key in keys)
    return tuple(Input(term.name, value_text(term.value, term.unit), words(term, terms)) for term in wanted)


def _bandwidth(reply: Measured) -> tuple[Input, ...]:
    """Return the memory's bandwidth, and its source."""
    source = reply.engine.bandwidth_note or "the table of chips, or measured on this machine"
    known = Input("bandwidth", units.bandwidth(reply.engine.bandwidth_gbs), source)
    return _terms(reply, "bandwidth") or (known,)


def _step(reply: Measured) -> tuple[Input, ...]:
    """Return what a step reads: the last step while a reply is written, else the one in its middle."""
    if reply.live is not None and reply.replying:
        read = units.size(reply.live.bytes_per_step)
        return (Input("bytes a step", read, "weights, keys and values: the last step's"),)
    m = reply.metrics or UNMEASURED
    return (
        Input("weights a step", units.size(m.weight_bytes_per_token), "counted from the tensors"),
        Input("keys and values", units.size(m.kv_bytes_per_step), "in the middle of the reply"),
    )


def _model(reply: Measured) -> Explained:
    info = reply.engine.info
    bits = None if info is None else info.bits_per_weight
    weights, parameters = (None, None) if info is None else (info.weight_bytes, info.parameters)
    return Explained(
        "weights",
        units.size(weights),
        "the bytes of all tensors as loaded",
        (
            Input("parameters", units.short(parameters), "counted in the model's files"),
            Input("bits per weight", units.UNKNOWN if bits is None else f"{bits:.2f}", "stored bits ÷ weights"),
            Input("model", sanitise_line(reply.engine.load.model if info is None else info.name), "your choice"),
            *_rounding(info),
        ),
        "counted from the loaded tensors",
        "The memory that the model takes before it reads a word. Nearly all of it is read for each token it writes.",
        "" if info is not None else "no model is loaded",
    )


def _rounding(info: ModelInfo | None) -> tuple[Input, ...]:
    """Return what a CPU rounds, and what that costs the model."""
    if info is None or not info.rounded:
        return ()
    return (Input("what they multiply", info.rounded, "measured when it was first loaded"),)


def _ttft(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    waited = None if m.ttft_s is None or m.prefill_s is None else max(0.0, m.ttft_s - m.prefill_s)
    return Explained(
        "time to first token",
        units.seconds(m.ttft_s),
        "first token reaches the host − request accepted",
        (
            Input("waiting", units.seconds(waited), "the queue, tokenizing, restoring the cache"),
            Input("reading the prompt", units.seconds(m.prefill_s), CLOCK),
        ),
        CLOCK,
        "How long you wait until text appears, without the time to draw it.",
    )


def _prefill(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    return Explained(
        "prefill rate",
        units.rate(m.prefill_tps),
        "computed tokens ÷ seconds of prefill",
        (
            Input("computed tokens", units.count(m.prefill_tokens), COUNTED),
            Input("seconds of prefill", units.seconds(m.prefill_s), CLOCK),
            *_terms(reply, "operations", "least", "wanted"),
        ),
        MEASURED,
        "How fast the prompt is read: many tokens at once, so arithmetic is usually the limit. Cached tokens never count.",
    )


def _cached(reply: Measured) -> Explained:
    m, prefill = reply.metrics, reply.prefill
    cached = m.cached_tokens if m is not None else None if prefill is None else prefill.cached
    prompt = m.prompt_tokens if m is not None else None if prefill is None else prefill.total
    return Explained(
        "cached tokens",
        units.count(cached),
        "tokens of the longest prefix that is in the prompt cache",
        (Input("prompt", units.count(prompt), "counted after the model's chat template"),),
        "the prompt cache",
        "The part of the prompt that need not be read again. Only the rest delays the first token.",
    )


def _now(reply: Measured) -> Explained:
    recent = () if reply.live is None else reply.live.gaps_ms[-RECENT_GAPS:]
    now = decode_now(reply)
    return Explained(
        "decode rate now",
        units.rate(now),
        "gaps ÷ their total time",
        (
            Input("gaps", units.count(len(recent)) if recent else units.UNKNOWN, f"the last {RECENT_GAPS} at most"),
            Input("their time", units.milliseconds(sum(recent) if recent else None), CLOCK),
        ),
        MEASURED,
        "How fast the reply is being written at this moment. The mean covers all of it.",
        "" if now is not None or reply.replying else "no reply is running",
    )


def _mean(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    between_s = None
    if m.total_s is not None and m.ttft_s is not None and m.generated_tokens >= 2:
        between_s = m.total_s - m.ttft_s
    return Explained(
        "decode rate",
        units.rate(m.decode_tps),
        "(generated tokens − 1) ÷ (last token − first token)",
        (
            Input("generated tokens", units.count(m.generated_tokens), COUNTED),
            Input("last − first token", units.seconds(between_s), CLOCK),
        ),
        MEASURED,
        "How fast the reply was written, not counting the wait for its first token. It takes two tokens to have a rate.",
    )


def _gaps(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    itl, written = m.itl_ms, m.generated_tokens
    count = None if reply.metrics is None or written < 2 else written - 1
    shown = (("p50", itl.p50), ("p95", itl.p95), ("p99", itl.p99), ("longest", itl.max)) if itl is not None else ()
    return Explained(
        "gaps between tokens (ITL)",
        units.milliseconds(None if itl is None else itl.p50),
        "the gap that 50, 95 and 99 % of the gaps do not exceed (nearest rank)",
        (
            Input("gaps", units.count(count), "between each token and the next"),
            *(Input(name, units.milliseconds(value), CLOCK) for name, value in shown),
        ),
        MEASURED,
        "How steadily the text appears: the median gap is the pace, the rare long ones are what you see as a stutter."
        + (" Tokens that were guessed come several in a pass: no time is between them." if m.accepted_tokens else ""),
    )


def _slowest(reply: Measured) -> Explained:
    outliers = reply.outliers
    inputs = (
        Input(f"token {units.count(each.token)}", units.milliseconds(each.gap_ms), causes(each)) for each in outliers
    )
    return Explained(
        "slowest gap",
        units.milliseconds(outliers[0].gap_ms) if outliers else units.UNKNOWN,
        "the longest outlier among the gaps",
        tuple(inputs),
        "recorded while the token was made; a cause is named only if it explains half of the gap",
        "Where the reply stuttered, and what the engine was doing then.",
        "" if outliers else "there are no outliers" if reply.metrics is not None else NO_REPLY,
    )


def context_of_ceiling(reply: Measured) -> tuple[int, int]:
    """Return the tokens of context that a reply's ceiling holds for, the middle of the reply, and those of its prompt."""
    m = reply.metrics
    return (0, 0) if m is None else (m.prompt_tokens + m.generated_tokens // 2, m.prompt_tokens)


def _at_context(reply: Measured) -> str:
    at, _ = context_of_ceiling(reply)
    return f", at {units.count(at)} tokens of context" if at else ", at an empty context"


def _ceiling(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    ceiling = reply.engine.ceiling_tps if reply.metrics is None else m.ceiling_tps
    return Explained(
        "share of the ceiling",
        units.percent(share_of_ceiling(m)),
        "decode rate ÷ (bandwidth ÷ bytes a step)",
        (
            Input("decode rate", units.rate(m.decode_tps), MEASURED),
            Input("ceiling", units.rate(ceiling), f"bandwidth ÷ bytes a step{_at_context(reply)}"),
            *_bandwidth(reply),
            *_step(reply),
        ),
        "computed from the above",
        "How close the reply came to the limit that memory bandwidth sets: 100 % is the hardware limit. "
        "The longer the context, the lower that limit, because each step reads all of it.",
        f"the memory's speed is {reply.engine.bandwidth_note}"
        if ceiling is None and reply.engine.bandwidth_note
        else "",
    )


def _expected(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    how = next((term.source for term in _terms(reply, "expected")), "what good kernels reach")
    unmeasured = reply.metrics is not None and m.expected_tps is None
    return Explained(
        "share of the expected",
        units.percent(share_of_expected(m)),
        "decode rate ÷ expected rate",
        (
            Input("decode rate", units.rate(m.decode_tps), MEASURED),
            Input("expected rate", units.rate(m.expected_tps), how),
            *_terms(reply, "weights", "kv", "launching", "host"),
        ),
        "fitted to published speeds of this chip, and no faster than the host builds a step; or timed in parts on this machine",
        "Whether this machine is as fast as it should be. Far below 100 %, something else is slowing it down.",
        "this machine's speed is not measured yet; that happens when it is idle" if unmeasured else "",
    )


DRAFTERS = {
    "lookup": "from the chat",
    "branches": "from other versions",
    "draft": "by the draft model",
    "mtp": "by the model's extra layer",
    "medusa": "by Medusa heads",
}
"""Who guessed, by the name of the source."""


def guessed_right(metrics: Metrics) -> str:
    """Return how many of the tokens that were guessed ahead came true: ``64 of 80``, or ``none guessed``."""
    if not metrics.drafted_tokens:
        return "none guessed"
    return f"{units.count(metrics.accepted_tokens)} of {units.count(metrics.drafted_tokens)}"


def _guessed(reply: Measured) -> Explained:
    m = reply.metrics or UNMEASURED
    saved = () if m.saved_s is None else (Input("saved", f"{m.saved_s:,.2f} s", "against plain steps, as measured"),)
    by_source = tuple(
        Input(
            DRAFTERS.get(each.source, each.source),
            f"{units.count(each.accepted)} of {units.count(each.drafted)}",
            COUNTED,
        )
        for each in m.drafts or ()
    )
    return Explained(
        "guessed right",
        units.UNKNOWN if reply.metrics is None else guessed_right(m),
        "tokens that came true ÷ tokens guessed",
        (*by_source, *saved, Input("decode rate", units.rate(m.decode_tps), MEASURED)),
        COUNTED,
        "Tokens guessed ahead are verified several at a time, where that is faster; the text stays the same."
        + ("" if m.undrafted is None else f" Why no more: {m.undrafted}."),
    )


def _achieved(reply: Measured) -> Explained:
    decode = Input("decode rate", units.rate((reply.metrics or UNMEASURED).decode_tps), MEASURED)
    return Explained(
        "achieved bandwidth",
        units.bandwidth(achieved_gbs(reply)),
        "bytes a step × decode rate",
        (*_step(reply), decode, *_bandwidth(reply)),
        "computed from measurements; while a reply is written, from the last gaps",
        "How much data decoding really reads from memory each second.",
    )


def _context(reply: Measured) -> Explained:
    context = context_of(reply)
    parts: tuple[Input, ...] = ()
    if context is not None:
        parts = (
            Input("cached", units.count(context.cached), "found in the prompt cache"),
            Input("read", units.count(context.computed), "for this reply"),
            Input("written", units.count(context.written), "by the reply"),
            Input("free", units.count(context.free), "space left"),
        )
    return Explained(
        "context",
        units.UNKNOWN if context is None else f"{units.count(context.held)} tokens",
        "cached + read + written",
        (*parts, Input("context length", units.count(capacity_of(reply)), "the model's, or the KV window's")),
        COUNTED,
        "What the model sees of the conversation. All of these tokens are read again for each token it writes.",
    )


def _out_of_sight(reply: Measured) -> Explained:
    context = context_of(reply)
    gone = None if context is None else context.out_of_sight
    rolled = None if gone is None else gone - reply.left_out
    rolls = reply.engine.info is not None and reply.engine.info.rolls
    full = "when the context is full, the oldest tokens are dropped"
    if not rolls:
        full = f"what happens when the context is full is a setting ({reply.keymap.key('settings')})"
    return Explained(
        "forgotten",
        units.UNKNOWN if gone is None else f"{units.count(gone)} tokens",
        "left out of the prompt + dropped since",
        (
            Input("left out", units.count(reply.left_out), "of the middle, because the prompt did not fit"),
            Input("dropped", units.count(rolled), f"the oldest tokens ({_kept(reply)})"),
        ),
        COUNTED,
        f"The part of the conversation that the model no longer sees: {full}.",
    )


def _kept(reply: Measured) -> str:
    """Return which of the first tokens are never dropped."""
    keep = reply.engine.load.kv.keep
    return "the system prompt is kept" if keep == "system" else f"the first {keep} are kept"


def _kv(reply: Measured) -> Explained:
    kv = reply.engine.load.kv
    bits = f"{kv.key_bits} and {kv.value_bits} bits" if kv.quantized else "the model's own type"
    return Explained(
        "KV cache",
        units.size((reply.metrics or UNMEASURED).kv_bytes),
        "the bytes of all cached keys and values",
        (
            Input("tokens held", units.count(context_held(reply)), COUNTED),
            Input("keys and values", bits, f"settings ({reply.keymap.key('settings')})"),
        ),
        "counted from the caches",
        "The memory that the context takes. Each step reads it along with the weights, so long contexts are slower.",
    )


def _peak(reply: Measured) -> Explained:
    memory, info = reply.engine.memory, reply.engine.info
    weights = None if info is None else info.weight_bytes
    return Explained(
        "peak memory",
        units.size(peak_bytes(reply)),
        "the most memory in use at once: of the reply, or of loading the model before there is one",
        (
            Input("weights", units.size(weights), "counted"),
            *_draft_inputs(info),
            Input("KV cache", units.size((reply.metrics or UNMEASURED).kv_bytes), "counted"),
            Input("in use now", units.size(memory.active_bytes), ALLOCATOR),
            Input("limit", units.size(memory.budget_bytes), memory.budget_source or units.UNKNOWN),
        ),
        ALLOCATOR,
        f"{_loading_peak(reply)}Beyond the limit, prompts are refused; a setting changes it ({reply.keymap.key('settings')}). "
        "Below it, other programs may still have to give up memory. Earlier prompts stay for reuse, in up to a tenth of the limit.",
    )


def _draft_inputs(info: ModelInfo | None) -> tuple[Input, ...]:
    """Return what guesses beside the model: its own heads, and a draft model, where there are any."""
    found: list[Input] = []
    if info is not None and info.heads is not None:
        found.append(Input("own heads", units.size(info.heads_bytes), f"{sanitise_line(info.heads)}, for guesses"))
    if info is not None and info.draft is not None:
        beside = f"{sanitise_line(info.draft)}, beside its keys and values"
        found.append(Input("draft model", units.size(info.draft_bytes), beside))
    return tuple(found)


def _loading_peak(reply: Measured) -> str:
    """Return why loading took more than the model does now, where it did, as a sentence and a space."""
    memory, peak = reply.engine.memory, peak_bytes(reply)
    if reply.metrics is not None or peak is None or memory.active_bytes is None or peak < 1.5 * memory.active_bytes:
        return ""
    return (
        f"While it was loaded, the model took {units.size(peak)} for a moment, because weights were in memory as they are stored, "
        f"and as they are computed with; now it takes {units.size(memory.active_bytes)}. "
    )


def _predicted(reply: Measured) -> Explained:
    return Explained(
        "expected peak",
        units.size(reply.engine.memory.predicted_peak_bytes),
        "weights + caches as they grow + the largest temporaries of a chunk",
        (Input("measured peak", units.size(peak_bytes(reply)), ALLOCATOR),),
        "computed before the prompt was read",
        "The prediction made before the reply. A prompt that does not fit is refused instead of crashing the chat.",
    )


def _diagnosis(reply: Measured) -> Explained:
    m, diagnosis = reply.metrics, reply.diagnosis
    parts = () if diagnosis is None else diagnosis.parts
    done = m is not None and not reply.replying
    return Explained(
        "diagnosis",
        sentence(m, diagnosis) if m is not None and done else units.UNKNOWN,
        "the longest of waiting, reading and writing, and the limit that it hit first",
        tuple(
            Input(part.name, units.seconds(part.seconds), BOUND[part.bound] if part.bound is not None else CLOCK)
            for part in parts
        ),
        "computed from the reply's metrics and the limits of this machine",
        f"Why the reply took as long as it did. {reply.keymap.key('explain')} shows the details and what would help.",
        "" if done else "a reply is running" if reply.replying else NO_REPLY,
    )


Figure = Literal[
    "model",
    "diagnosis",
    "ttft",
    "prefill",
    "cached",
    "now",
    "mean",
    "guessed",
    "gaps",
    "slowest",
    "ceiling",
    "expected",
    "achieved",
    "context",
    "out of sight",
    "kv",
    "peak",
    "predicted",
]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""In the order of the panel with all of them."""
PRIMER = (
    ("first token (TTFT)", "the wait until the answer begins, most of it for reading your prompt"),
    ("tok/s (decode)", f"how fast the answer is written; people read about {sum(READING_TPS) / 2:.0f} tok/s"),
    ("ceiling", "the fastest this machine could write it: memory speed ÷ bytes read for each token"),
    ("expected", "what good software reaches here; far below it, something holds the machine up"),
)
"""What the figures mean."""
PRIMED = "what the figures mean"
"""Under what it is remembered that this was told."""


def primer_is_new(reply: Reply) -> bool:
    """Whether the user is to be told what the figures mean: with the first reply that has any, once on each machine."""
    return reply.metrics is not None and reply.metrics.decode_tps is not None and is_new(PRIMED)


def verdict(reply: Measured) -> tuple[str, ...]:
    """Return how the reply went, in short sentences, the plainest first; what the engine is doing while it is made."""
    if reply.replying:
        return (DOING_NOW.get(reply.engine.phase) or reply.at_once or "Writing …",)
    if reply.metrics is None:
        return ("Nothing measured yet.",)
    said = headline(reply.metrics, reply.diagnosis)
    if reply.engine.load.model != GUIDE:
        return said
    return said[0], f"The built-in guide is tiny. {reply.keymap.key('choose_model')} gets a model for real chats."


DOING_NOW = {EnginePhase.PREFILL: "Reading the prompt …", EnginePhase.STOPPING: "Stopping …"}


def explain(figure: Figure, reply: Measured) -> Explained:
    """Return ``figure`` of a reply, explained."""
    found = _EXPLAIN[figure](reply)
    if found.value != units.UNKNOWN or found.why:
        return found
    return replace(found, why=NO_REPLY if reply.metrics is None and not reply.replying else NOT_YET)


_EXPLAIN: dict[Figure, Callable[[Measured], Explained]] = {
    "model": _model,
    "ttft": _ttft,
    "prefill": _prefill,
    "cached": _cached,
    "now": _now,
    "mean": _mean,
    "guessed": _guessed,
    "gaps": _gaps,
    "slowest": _slowest,
    "ceiling": _ceiling,
    "expected": _expected,
    "achieved": _achieved,
    "context": _context,
    "out of sight": _out_of_sight,
    "kv": _kv,
    "peak": _peak,
    "predicted": _predicted,
    "diagnosis": _diagnosis,
}

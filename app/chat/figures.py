"""Side panel figures: values, and explanations by formula, inputs, source and meaning. Pure."""

# Input is the session's running or last reply, or a stored one (``EarlierReply``). No rate is computed here. The
# ceiling always uses the current bandwidth estimate (``EngineConnection.with_ceiling``).

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol, get_args

from tokamac.engine import metrics as rates
from tokamac.engine.events import ModelSpec
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import SHOWN_S, SHOWN_TOKENS, Cause, Metrics, Outlier, PromptBeside

from ..backend.protocol import Load, MemoryUse
from ..reports.verdict import BOUND, READING_TPS, headline, sentence, value_text, words
from ..settings import is_new
from ..text import units
from ..text.sanitise import sanitise_line
from .actions import Keymap
from .conversation import Reply, ReplyProgress
from .session import Session
from .steps import EnginePhase


class EngineState(Protocol):
    """Engine state needed by figures; ``EngineConnection`` implements it."""

    @property
    def load(self) -> Load:
        """The wanted model and its settings."""

    @property
    def phase(self) -> EnginePhase:
        """The engine's phase."""

    @property
    def info(self) -> ModelSpec | None:
        """The reply's model, if loaded."""

    @property
    def memory(self) -> MemoryUse:
        """Memory now, and predicted for the reply."""

    @property
    def ceiling_tps(self) -> float | None:
        """The ceiling at an empty context."""

    @property
    def bandwidth_gbs(self) -> float | None:
        """The current bandwidth estimate, GB/s."""

    @property
    def bandwidth_note(self) -> str:
        """How it was measured, or why it is unknown."""


class Measured(Protocol):
    """A measured reply; ``Session`` is one for its running or last reply."""

    @property
    def engine(self) -> EngineState:
        """The engine's state for this reply."""

    @property
    def keymap(self) -> Keymap:
        """The key bindings."""

    @property
    def replying(self) -> bool:
        """Whether it is running."""

    @property
    def progress(self) -> ReplyProgress:
        """What is measured of it so far."""

    @property
    def which(self) -> str:
        """Which reply it is, in a few words."""

    @property
    def at_once(self) -> str:
        """Count and joint speed of replies written in parallel; "" for one."""


@dataclass(frozen=True, slots=True)
class PastEngine:
    """The engine of an earlier reply. info: None if another model made it."""

    load: Load
    info: ModelSpec | None
    memory: MemoryUse
    ceiling_tps: float | None
    bandwidth_gbs: float | None
    bandwidth_note: str
    phase: EnginePhase = EnginePhase.IDLE


@dataclass(frozen=True, slots=True)
class EarlierReply:
    engine: PastEngine
    keymap: Keymap
    progress: ReplyProgress
    which: str
    replying: bool = False
    at_once: str = ""


def pointed_at(session: Session, key: int | None) -> Measured:
    """Return the reply at or after ``key``; the session's own for None or one without figures."""
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
        ReplyProgress(metrics=reply.metrics, outliers=reply.outliers, diagnosis=reply.diagnosis),
        f"earlier reply · {replies.index(node.key) + 1} of {len(replies)}",
    )


def decode_now(reply: Measured) -> float | None:
    if not reply.replying or reply.progress.live is None or reply.engine.phase is EnginePhase.PREFILL:
        return None
    return reply.progress.live.now_tps


def achieved_gbs(reply: Measured) -> float | None:
    """Decode bandwidth, GB/s: of the last second while running, else of the whole reply."""
    if reply.replying and reply.progress.live is not None and reply.engine.phase is not EnginePhase.PREFILL:
        return reply.progress.live.achieved_gbs
    m = reply.progress.metrics
    return None if m is None or m.shown_decode_tps is None else m.achieved_gbs


def context_used(reply: Measured) -> int | None:
    if reply.progress.live is not None and reply.replying:
        return reply.progress.live.context_tokens
    if reply.progress.metrics is not None:
        return reply.progress.metrics.prompt_tokens + reply.progress.metrics.generated_tokens
    if reply.progress.prefill is not None:
        return reply.progress.prefill.done
    return None


def context_held(reply: Measured) -> int | None:
    used, capacity = context_used(reply), capacity_of(reply)
    return used if used is None or capacity is None else min(used, capacity)


def tokens_out_of_sight(reply: Measured) -> int:
    used, capacity = context_used(reply), capacity_of(reply)
    rolled = max(0, used - capacity) if used is not None and capacity is not None else 0
    return reply.progress.left_out + rolled


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens in and out of context. cached: prompt cache hits. computed: prefilled. free: None: no limit."""

    cached: int
    computed: int
    written: int
    free: int | None
    out_of_sight: int

    @property
    def held(self) -> int:
        return self.cached + self.computed + self.written


def context_of(reply: Measured) -> Context | None:
    """Return the context's contents; None if unknown. The oldest tokens, cached ones first, are evicted."""
    used, metrics, prefill = context_used(reply), reply.progress.metrics, reply.progress.prefill
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
    """Peak bytes of the reply, else since load, else current use."""
    memory, metrics = reply.engine.memory, reply.progress.metrics
    return (metrics.peak_memory_bytes if metrics is not None else None) or memory.peak_bytes or memory.active_bytes


def capacity_of(reply: Measured) -> int | None:
    return reply.engine.info.capacity if reply.engine.info is not None else None


def gap_and_cause(outlier: Outlier) -> str:
    """Describe an outlier: ``41 ms at token 257: pool cleared``."""
    return f"{units.milliseconds(outlier.gap_ms)} at token {units.count(outlier.token)}: {causes(outlier)}"


def causes(outlier: Outlier) -> str:
    return ", ".join(_cause(each, outlier.prompt) for each in outlier.causes) or f"cause {units.UNKNOWN}"


def _cause(cause: Cause, prompt: PromptBeside | None) -> str:
    if cause != "another prompt" or prompt is None:
        return cause
    return f"another prompt of {units.count(prompt.tokens)} tokens" + (
        " in the background" if prompt.background else ""
    )


def prefill_eta_s(session: Session, now: float) -> float | None:
    """Seconds left of the prefill at its rate so far; None before there is one."""
    prefill = session.progress.prefill
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
    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A figure in words. why: why it is unknown, or ""."""

    name: str
    value: str
    formula: str
    inputs: tuple[Input, ...]
    source: str
    meaning: str
    why: str = ""


def _terms(reply: Measured, *keys: str) -> tuple[Input, ...]:
    terms = () if reply.progress.diagnosis is None else reply.progress.diagnosis.terms
    wanted = (term for term in terms if term.key in keys)
    return tuple(Input(term.name, value_text(term.value, term.unit), words(term, terms)) for term in wanted)


def _bandwidth(reply: Measured) -> tuple[Input, ...]:
    source = reply.engine.bandwidth_note or "the table of chips, or measured on this machine"
    known = Input("bandwidth", units.bandwidth(reply.engine.bandwidth_gbs), source)
    return _terms(reply, "bandwidth") or (known,)


def _step(reply: Measured) -> tuple[Input, ...]:
    """Bytes read per step: the last while running, else the middle one."""
    if reply.progress.live is not None and reply.replying:
        read = units.size(reply.progress.live.bytes_per_step)
        return (Input("bytes a step", read, "weights, keys and values: the last step's"),)
    m = reply.progress.metrics or UNMEASURED
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


def _rounding(info: ModelSpec | None) -> tuple[Input, ...]:
    if info is None or info.rounding is None:
        return ()
    return (Input("what they multiply", str(info.rounding), "measured when it was first loaded"),)


def _ttft(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    known_s = None if m.prefill_s is None else m.prefill_s + (m.image_s or 0.0)
    waited = None if m.ttft_s is None or known_s is None else max(0.0, m.ttft_s - known_s)
    seen = () if m.image_s is None else (Input("seeing pictures", units.seconds(m.image_s), CLOCK),)
    return Explained(
        "time to first token",
        units.seconds(m.ttft_s),
        "first token reaches the host − request accepted",
        (
            Input("waiting", units.seconds(waited), "the queue, tokenizing, restoring the cache"),
            *seen,
            Input("reading the prompt", units.seconds(m.prefill_s), CLOCK),
        ),
        CLOCK,
        "How long you wait until text appears, without the time to draw it.",
    )


def _prefill(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    return Explained(
        "prefill rate",
        units.rate(m.shown_prefill_tps),
        "computed tokens ÷ seconds of prefill",
        (
            Input("computed tokens", units.count(m.prefill_tokens), COUNTED),
            Input("seconds of prefill", units.seconds(m.prefill_s), CLOCK),
            *_terms(reply, "operations", "least", "wanted"),
        ),
        MEASURED,
        "How fast the prompt is read: many tokens at once, so arithmetic is usually the limit. Cached tokens never count.",
        f"a rate is shown from {SHOWN_S:.0f} s and {SHOWN_TOKENS} tokens on"
        if m.prefill_tps is not None and m.shown_prefill_tps is None
        else "",
    )


def _cached(reply: Measured) -> Explained:
    m, prefill = reply.progress.metrics, reply.progress.prefill
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
    now = decode_now(reply)
    return Explained(
        "decode rate now",
        units.rate(now),
        f"tokens ÷ seconds, of the last {SHOWN_S:.0f} s, and of {SHOWN_TOKENS} tokens at least",
        (),
        MEASURED,
        "How fast the reply is being written at this moment. The mean covers all of it.",
        "" if now is not None or reply.replying else "no reply is running",
    )


def _mean(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    return Explained(
        "decode rate",
        units.rate(m.shown_decode_tps),
        "(generated tokens − 1) ÷ (last token − first token)",
        (
            Input("generated tokens", units.count(m.generated_tokens), COUNTED),
            Input("last − first token", units.seconds(m.decode_s), CLOCK),
        ),
        MEASURED,
        "How fast the reply was written, not counting the wait for its first token.",
        _too_short(reply),
    )


def _too_short(reply: Measured) -> str:
    m = reply.progress.metrics
    if m is None or m.decode_tps is None or m.shown_decode_tps is not None:
        return ""
    return f"a rate is shown from {SHOWN_S:.0f} s and {SHOWN_TOKENS} tokens on"


def _gaps(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    itl, written = m.itl_ms, m.generated_tokens
    count = None if reply.progress.metrics is None or written < 2 else written - 1
    shown = (("p50", itl.p50), ("p95", itl.p95), ("p99", itl.p99), ("longest", itl.max)) if itl is not None else ()
    several = bool(m.accepted_tokens)
    return Explained(
        "time per token (ITL)",
        units.UNKNOWN if itl is None or several else units.milliseconds(itl.p50),
        "the gap that 50, 95 and 99 % of the gaps do not exceed (nearest rank)",
        (
            Input("gaps", units.count(count), "between each token and the next"),
            *(Input(name, units.milliseconds(value), CLOCK) for name, value in shown),
        ),
        MEASURED,
        "How steadily the text appears: the median gap is the pace, the rare long ones are what you see as a stutter.",
        "guessed tokens come several in a pass, so no time lies between them" if several else "",
    )


def _slowest(reply: Measured) -> Explained:
    outliers = reply.progress.outliers
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
        "" if outliers else "there are no outliers" if reply.progress.metrics is not None else NO_REPLY,
    )


def context_of_ceiling(reply: Measured) -> tuple[int, int]:
    """Return the context of the ceiling (mid-reply) and the prompt's tokens."""
    m = reply.progress.metrics
    return (0, 0) if m is None else (m.prompt_tokens + m.generated_tokens // 2, m.prompt_tokens)


def _at_context(reply: Measured) -> str:
    at, _ = context_of_ceiling(reply)
    return f", at {units.count(at)} tokens of context" if at else ", at an empty context"


def _ceiling(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    ceiling = reply.engine.ceiling_tps if reply.progress.metrics is None else m.ceiling_tps
    return Explained(
        "share of the ceiling",
        units.percent(m.share_of_ceiling),
        "decode rate ÷ (bandwidth ÷ bytes a step)",
        (
            Input("decode rate", units.rate(m.shown_decode_tps), MEASURED),
            Input("ceiling", units.rate(ceiling), f"bandwidth ÷ bytes a step{_at_context(reply)}"),
            *_bandwidth(reply),
            *_step(reply),
        ),
        "computed from the above",
        "How close the reply came to the limit that memory bandwidth sets: 100 % is the hardware limit. "
        "The longer the context, the lower that limit, because each step reads all of it.",
        f"the memory's speed is {reply.engine.bandwidth_note}"
        if ceiling is None and reply.engine.bandwidth_note
        else GUESSED
        if m.accepted_tokens
        else _too_short(reply),
    )


def _expected(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
    how = next((term.source for term in _terms(reply, "expected")), "what good kernels reach")
    unmeasured = reply.progress.metrics is not None and m.expected_tps is None
    return Explained(
        "share of the expected",
        units.percent(m.share_of_expected),
        "decode rate ÷ expected rate",
        (
            Input("decode rate", units.rate(m.shown_decode_tps), MEASURED),
            Input("expected rate", units.rate(m.expected_tps), how),
            *_terms(reply, "weights", "kv", "launching", "host"),
        ),
        "fitted to published speeds of this chip, and no faster than the host builds a step; or timed in parts on this machine",
        "Whether this machine is as fast as it should be. Far below 100 %, something else is slowing it down.",
        "this machine's speed is not measured yet; that happens when it is idle"
        if unmeasured
        else GUESSED
        if m.drafted_tokens
        else _too_short(reply),
    )


GUESSED = "guesses were verified, several tokens in a pass; this is of a pass that makes one"

# Who guessed, by the name of the source.
DRAFTERS = {
    "lookup": "from the chat",
    "branches": "from other versions",
    "draft": "by the draft model",
    "mtp": "by the model's extra layer",
    "medusa": "by Medusa heads",
}


def guessed_right(metrics: Metrics) -> str:
    """Describe accepted draft tokens: ``64 of 80 right``, or ``none``."""
    if not metrics.drafted_tokens:
        return "none"
    return f"{units.count(metrics.accepted_tokens)} of {units.count(metrics.drafted_tokens)} right"


def _guessed(reply: Measured) -> Explained:
    m = reply.progress.metrics or UNMEASURED
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
        "guesses",
        units.UNKNOWN if reply.progress.metrics is None else guessed_right(m),
        "tokens that came true ÷ tokens guessed",
        (*by_source, *saved, Input("decode rate", units.rate(m.shown_decode_tps), MEASURED)),
        COUNTED,
        "Tokens guessed ahead are verified several at a time, where that is faster; the text stays the same."
        + ("" if m.undrafted is None else f" Why no more: {m.undrafted}."),
    )


def _achieved(reply: Measured) -> Explained:
    decode = Input("decode rate", units.rate((reply.progress.metrics or UNMEASURED).shown_decode_tps), MEASURED)
    return Explained(
        "achieved bandwidth",
        units.bandwidth(achieved_gbs(reply)),
        "bytes a step × decode rate",
        (*_step(reply), decode, *_bandwidth(reply)),
        "computed from measurements; while a reply is written, from those of the last second",
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
    rolled = None if gone is None else gone - reply.progress.left_out
    rolls = reply.engine.info is not None and reply.engine.info.rolls
    full = "when the context is full, the oldest tokens are dropped"
    if not rolls:
        full = f"what happens when the context is full is a setting ({reply.keymap.key('settings')})"
    return Explained(
        "forgotten",
        units.UNKNOWN if gone is None else f"{units.count(gone)} tokens",
        "left out of the prompt + dropped since",
        (
            Input("left out", units.count(reply.progress.left_out), "of the middle, because the prompt did not fit"),
            Input("dropped", units.count(rolled), f"the oldest tokens ({_kept(reply)})"),
        ),
        COUNTED,
        f"The part of the conversation that the model no longer sees: {full}.",
    )


def _kept(reply: Measured) -> str:
    keep = reply.engine.load.kv.keep
    return "the system prompt is kept" if keep == "system" else f"the first {keep} are kept"


def _kv(reply: Measured) -> Explained:
    kv = reply.engine.load.kv
    bits = f"{kv.key_bits} and {kv.value_bits} bits" if kv.quantized else "the model's own type"
    return Explained(
        "KV cache",
        units.size((reply.progress.metrics or UNMEASURED).kv_bytes),
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
            Input("KV cache", units.size((reply.progress.metrics or UNMEASURED).kv_bytes), "counted"),
            Input("in use now", units.size(memory.active_bytes), ALLOCATOR),
            Input("limit", units.size(memory.budget_bytes), memory.budget_source or units.UNKNOWN),
        ),
        ALLOCATOR,
        f"{_loading_peak(reply)}Beyond the limit, prompts are refused; a setting changes it ({reply.keymap.key('settings')}). "
        "Below it, other programs may still have to give up memory. Earlier prompts stay for reuse, in up to a tenth of the limit.",
    )


def _draft_inputs(info: ModelSpec | None) -> tuple[Input, ...]:
    found: list[Input] = []
    if info is not None and info.heads is not None:
        found.append(Input("own heads", units.size(info.heads_bytes), f"{sanitise_line(info.heads)}, for guesses"))
    if info is not None and info.draft is not None:
        beside = f"{sanitise_line(info.draft)}, beside its keys and values"
        found.append(Input("draft model", units.size(info.draft_bytes), beside))
    return tuple(found)


def _loading_peak(reply: Measured) -> str:
    memory, peak = reply.engine.memory, peak_bytes(reply)
    if (
        reply.progress.metrics is not None
        or peak is None
        or memory.active_bytes is None
        or peak < 1.5 * memory.active_bytes
    ):
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
    m, diagnosis = reply.progress.metrics, reply.progress.diagnosis
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
FIGURES: tuple[Figure, ...] = get_args(Figure)  # in the order of the panel with all of them
# What the figures mean.
PRIMER = (
    ("first token (TTFT)", "the wait until the answer begins, most of it for reading your prompt"),
    ("tok/s (decode)", f"how fast the answer is written; people read about {sum(READING_TPS) / 2:.0f} tok/s"),
    ("ceiling", "the fastest this machine could write it: memory speed ÷ bytes read for each token"),
    ("expected", "what good software reaches here; far below it, something holds the machine up"),
)
PRIMED = "what the figures mean"  # under what it is remembered that this was told


def primer_is_new(reply: Reply) -> bool:
    """Whether to explain the figures: the first reply with any, once per machine."""
    return reply.metrics is not None and reply.metrics.decode_tps is not None and is_new(PRIMED)


def verdict(reply: Measured) -> tuple[str, ...]:
    if reply.replying:
        return (DOING_NOW.get(reply.engine.phase) or reply.at_once or "Writing …",)
    if reply.progress.metrics is None:
        return ("Nothing measured yet.",)
    said = headline(reply.progress.metrics, reply.progress.diagnosis)
    if reply.engine.load.model != GUIDE:
        return said
    return said[0], f"The built-in guide is tiny. {reply.keymap.key('choose_model')} gets a model for real chats."


DOING_NOW = {EnginePhase.PREFILL: "Reading the prompt …", EnginePhase.STOPPING: "Stopping …"}


def explain(figure: Figure, reply: Measured) -> Explained:
    found = _EXPLAIN[figure](reply)
    if found.value != units.UNKNOWN or found.why:
        return found
    return replace(found, why=NO_REPLY if reply.progress.metrics is None and not reply.replying else NOT_YET)


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


# a current rate is nobody's once it is listed
LISTED_FIGURES = tuple(figure for figure in FIGURES if figure != "now")
# with some of their inputs
BESIDE: Mapping[Figure, tuple[str, ...]] = {
    "cached": ("prompt",),
    "gaps": ("p95", "p99"),
    "ceiling": ("ceiling",),
    "expected": ("expected rate",),
    "context": ("context length",),
    "peak": ("limit",),
}


def listed(reply: Measured, *, known: bool) -> str:
    found = {figure: explain(figure, reply) for figure in LISTED_FIGURES}
    shown = {figure: each for figure, each in found.items() if not known or each.value != units.UNKNOWN}
    return "\n".join(_figure_line(figure, each) for figure, each in shown.items())


def _figure_line(figure: Figure, known: Explained) -> str:
    beside = [f"{each.name} {each.value}" for each in known.inputs if each.name in BESIDE.get(figure, ())]
    told = ", ".join([*([known.why] if known.why else []), *beside])
    return f"{known.name}: {known.value}" + (f" ({told})" if told else "")

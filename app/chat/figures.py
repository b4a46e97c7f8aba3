"""The figures of the side panel: their values, and each explained by its formula, inputs, source and meaning.

Pure: a session in, words out. No rate is computed here; those that a reply measured are shown with their inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from tokamac.engine import metrics as rates
from tokamac.engine.metrics import RECENT_GAPS, Metrics, Outlier

from .. import units
from ..sanitise import sanitise_line
from ..verdict import BOUND, sentence, value_text, words
from .session import Session
from .steps import EnginePhase


def decode_now(session: Session) -> float | None:
    """Return the decode rate over the last few gaps, in tokens a second, while a reply is written."""
    if not session.replying or session.live is None or session.engine.phase is EnginePhase.PREFILL:
        return None
    return rates.recent_rate(session.live.gaps_ms)


def achieved_gbs(session: Session) -> float | None:
    """Return the bandwidth that decoding uses, in GB/s: of the last few gaps while a reply is written, else of the whole reply."""
    if session.replying and session.live is not None and session.engine.phase is not EnginePhase.PREFILL:
        return session.live.achieved_gbs
    return session.metrics.achieved_gbs if session.metrics is not None else None


def context_used(session: Session) -> int | None:
    """Return the tokens of the conversation, as far as known."""
    if session.live is not None and session.replying:
        return session.live.context_tokens
    if session.metrics is not None:
        return session.metrics.prompt_tokens + session.metrics.generated_tokens
    if session.prefill is not None:
        return session.prefill.done
    return None


def context_held(session: Session) -> int | None:
    """Return the tokens of the conversation that the model still sees."""
    used, capacity = context_used(session), capacity_of(session)
    return used if used is None or capacity is None else min(used, capacity)


def tokens_out_of_sight(session: Session) -> int:
    """Return the tokens of the conversation that the model no longer sees: left out of the prompt, or rolled out since."""
    used, capacity = context_used(session), capacity_of(session)
    rolled = max(0, used - capacity) if used is not None and capacity is not None else 0
    return session.left_out + rolled


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


def context_of(session: Session) -> Context | None:
    """Return what is in the context; None while nothing is known. The oldest tokens roll out: cached ones first."""
    used, metrics, prefill = context_used(session), session.metrics, session.prefill
    if used is None:
        return None
    cached = metrics.cached_tokens if metrics is not None else prefill.cached if prefill is not None else 0
    written = metrics.generated_tokens if metrics is not None else 0
    capacity = capacity_of(session)
    gone = 0 if capacity is None else max(0, used - capacity)
    seen = []
    for part in (min(cached, used), max(0, used - cached - written), min(written, used)):
        left = max(0, part - gone)
        gone -= part - left
        seen.append(left)
    free = None if capacity is None else max(0, capacity - sum(seen))
    return Context(seen[0], seen[1], seen[2], free, tokens_out_of_sight(session))


def peak_bytes(session: Session) -> int | None:
    """Return the peak memory in bytes: of the reply, else since the model was loaded, else what is in use now."""
    memory, metrics = session.engine.memory, session.metrics
    return (metrics.peak_memory_bytes if metrics is not None else None) or memory.peak_bytes or memory.active_bytes


def capacity_of(session: Session) -> int | None:
    """Return the tokens that fit into the context."""
    return session.engine.info.capacity if session.engine.info is not None else None


def share_of_ceiling(metrics: Metrics) -> float | None:
    """Return the decode rate as a share of the ceiling; None where either is unknown."""
    return rates.share(metrics.decode_tps, metrics.ceiling_tps)


def share_of_expected(metrics: Metrics) -> float | None:
    """Return the decode rate as a share of the expected rate; None where either is unknown."""
    return rates.share(metrics.decode_tps, metrics.expected_tps)


def gap_and_cause(outlier: Outlier) -> str:
    """Return an outlier in words: ``41 ms at token 257: pool cleared``."""
    return f"{units.milliseconds(outlier.gap_ms)} at token {units.count(outlier.token)}: {causes(outlier)}"


def causes(outlier: Outlier) -> str:
    """Return the causes of an outlier, as far as known."""
    return ", ".join(outlier.causes) or f"cause {units.UNKNOWN}"


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
NOT_YET = "the reply has not come that far"
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


def _terms(session: Session, *keys: str) -> tuple[Input, ...]:
    """Return terms of the diagnosis, as far as it has them."""
    terms = () if session.diagnosis is None else session.diagnosis.terms
    wanted = (term for term in terms if term.key in keys)
    return tuple(Input(term.name, value_text(term.value, term.unit), words(term, terms)) for term in wanted)


def _bandwidth(session: Session) -> tuple[Input, ...]:
    """Return the memory's bandwidth, and its source."""
    source = session.engine.bandwidth_note or "the table of chips, or measured on this machine"
    known = Input("bandwidth", units.bandwidth(session.engine.bandwidth_gbs), source)
    return _terms(session, "bandwidth") or (known,)


def _step(session: Session) -> tuple[Input, ...]:
    """Return what a step reads: the last step while a reply is written, else the one in its middle."""
    if session.live is not None and session.replying:
        read = units.size(session.live.bytes_per_step)
        return (Input("bytes a step", read, "weights, keys and values: the last step's"),)
    m = session.metrics or UNMEASURED
    return (
        Input("weights a step", units.size(m.weight_bytes_per_token), "counted from the tensors"),
        Input("keys and values", units.size(m.kv_bytes_per_step), "in the middle of the reply"),
    )


def _model(session: Session) -> Explained:
    info = session.engine.info
    bits = None if info is None else info.bits_per_weight
    weights, parameters = (None, None) if info is None else (info.weight_bytes, info.parameters)
    return Explained(
        "weights",
        units.size(weights),
        "the bytes of all tensors as loaded",
        (
            Input("parameters", units.short(parameters), "counted in the model's files"),
            Input("bits per weight", units.UNKNOWN if bits is None else f"{bits:.2f}", "stored bits ÷ weights"),
            Input("model", sanitise_line(session.engine.load.model if info is None else info.name), "your choice"),
        ),
        "counted from the loaded tensors",
        "The memory that the model takes before it reads a word. Nearly all of it is read for each token it writes.",
        "" if info is not None else "no model is loaded",
    )


def _ttft(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
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


def _prefill(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
    return Explained(
        "prefill rate",
        units.rate(m.prefill_tps),
        "computed tokens ÷ seconds of prefill",
        (
            Input("computed tokens", units.count(m.prefill_tokens), COUNTED),
            Input("seconds of prefill", units.seconds(m.prefill_s), CLOCK),
            *_terms(session, "operations", "least", "wanted"),
        ),
        MEASURED,
        "How fast the prompt is read: many tokens at once, so arithmetic is usually the limit. Cached tokens never count.",
    )


def _cached(session: Session) -> Explained:
    m, prefill = session.metrics, session.prefill
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


def _now(session: Session) -> Explained:
    recent = () if session.live is None else session.live.gaps_ms[-RECENT_GAPS:]
    now = decode_now(session)
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
        "" if now is not None or session.replying else "no reply is running",
    )


def _mean(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
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
        "How fast the reply was written, without the wait for its first token. Below two tokens there is no rate.",
    )


def _gaps(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
    itl, written = m.itl_ms, m.generated_tokens
    count = None if session.metrics is None or written < 2 else written - 1
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
        "How steadily the text appears: the median gap is the pace, the rare long ones are what you see as a stutter.",
    )


def _slowest(session: Session) -> Explained:
    outliers = session.outliers
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
        "" if outliers else "there are no outliers" if session.metrics is not None else NO_REPLY,
    )


def _ceiling(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
    ceiling = session.engine.ceiling_tps if session.metrics is None else m.ceiling_tps
    return Explained(
        "share of the ceiling",
        units.percent(share_of_ceiling(m)),
        "decode rate ÷ (bandwidth ÷ bytes a step)",
        (
            Input("decode rate", units.rate(m.decode_tps), MEASURED),
            Input("ceiling", units.rate(ceiling), "bandwidth ÷ bytes a step"),
            *_bandwidth(session),
            *_step(session),
        ),
        "computed from the above",
        "How close the reply came to the limit that memory bandwidth sets. 100 % is the hardware limit.",
        f"the memory's speed is {session.engine.bandwidth_note}"
        if ceiling is None and session.engine.bandwidth_note
        else "",
    )


def _expected(session: Session) -> Explained:
    m = session.metrics or UNMEASURED
    how = next((term.source for term in _terms(session, "expected")), "what good kernels reach")
    unmeasured = session.metrics is not None and m.expected_tps is None
    return Explained(
        "share of the expected",
        units.percent(share_of_expected(m)),
        "decode rate ÷ expected rate",
        (
            Input("decode rate", units.rate(m.decode_tps), MEASURED),
            Input("expected rate", units.rate(m.expected_tps), how),
            *_terms(session, "weights", "kv", "launching", "host"),
        ),
        "fitted to published speeds of this chip, and no faster than the host builds a step; or timed in parts on this machine",
        "Whether this machine is as fast as it should be. Far below 100 %, something else takes its time.",
        "this machine's speed is not measured yet; that happens when it is idle" if unmeasured else "",
    )


def _achieved(session: Session) -> Explained:
    decode = Input("decode rate", units.rate((session.metrics or UNMEASURED).decode_tps), MEASURED)
    return Explained(
        "achieved bandwidth",
        units.bandwidth(achieved_gbs(session)),
        "bytes a step × decode rate",
        (*_step(session), decode, *_bandwidth(session)),
        "computed from measurements; while a reply is written, from the last gaps",
        "How much data decoding really reads from memory each second.",
    )


def _context(session: Session) -> Explained:
    context = context_of(session)
    parts: tuple[Input, ...] = ()
    if context is not None:
        parts = (
            Input("cached", units.count(context.cached), "found in the prompt cache"),
            Input("computed", units.count(context.computed), "read for this reply"),
            Input("written", units.count(context.written), "by the reply"),
            Input("free", units.count(context.free), "space left"),
        )
    return Explained(
        "context",
        units.UNKNOWN if context is None else f"{units.count(context.held)} tokens",
        "cached + computed + written",
        (*parts, Input("context length", units.count(capacity_of(session)), "the model's, or the KV window's")),
        COUNTED,
        "What the model sees of the conversation. All of these tokens are read again for each token it writes.",
    )


def _out_of_sight(session: Session) -> Explained:
    context = context_of(session)
    gone = None if context is None else context.out_of_sight
    rolled = None if gone is None else gone - session.left_out
    rolls = session.engine.info is not None and session.engine.info.rolls
    full = "when the context is full, the oldest tokens go"
    if not rolls:
        full = f"what happens when the context is full is a setting ({session.keymap.key('settings')})"
    return Explained(
        "out of sight",
        units.UNKNOWN if gone is None else f"{units.count(gone)} tokens",
        "left out of the prompt + rolled out since",
        (
            Input("left out", units.count(session.left_out), "of the middle, where the prompt did not fit"),
            Input("rolled out", units.count(rolled), "the oldest, except the sinks"),
        ),
        COUNTED,
        f"The part of the conversation that the model no longer sees: {full}.",
    )


def _kv(session: Session) -> Explained:
    kv = session.engine.load.kv
    bits = f"{kv.key_bits} and {kv.value_bits} bits" if kv.quantized else "the model's own type"
    return Explained(
        "KV cache",
        units.size((session.metrics or UNMEASURED).kv_bytes),
        "the bytes of all cached keys and values",
        (
            Input("tokens held", units.count(context_held(session)), COUNTED),
            Input("keys and values", bits, f"settings ({session.keymap.key('settings')})"),
        ),
        "counted from the caches",
        "The memory that the context takes. Each step reads it along with the weights, so long contexts are slower.",
    )


def _peak(session: Session) -> Explained:
    memory, info = session.engine.memory, session.engine.info
    return Explained(
        "peak memory",
        units.size(peak_bytes(session)),
        "the most memory in use at once during the reply",
        (
            Input("weights", units.size(None if info is None else info.weight_bytes), "counted"),
            Input("KV cache", units.size((session.metrics or UNMEASURED).kv_bytes), "counted"),
            Input("in use now", units.size(memory.active_bytes), ALLOCATOR),
            Input("limit", units.size(memory.budget_bytes), memory.budget_source or units.UNKNOWN),
        ),
        ALLOCATOR,
        "How close the model comes to the limit, beyond which prompts are refused; a setting changes it "
        f"({session.keymap.key('settings')}). Below it, other programs may still have to give up memory. Earlier prompts stay in "
        "memory for reuse, up to a tenth of the limit.",
    )


def _predicted(session: Session) -> Explained:
    return Explained(
        "expected peak",
        units.size(session.engine.memory.predicted_peak_bytes),
        "weights + caches as they grow + the largest temporaries of a chunk",
        (Input("measured peak", units.size(peak_bytes(session)), ALLOCATOR),),
        "computed before the prompt was read",
        "The prediction before the reply. If it had not fitted, the chat would have said so instead of crashing.",
    )


def _diagnosis(session: Session) -> Explained:
    m, diagnosis = session.metrics, session.diagnosis
    parts = () if diagnosis is None else diagnosis.parts
    done = m is not None and not session.replying
    return Explained(
        "diagnosis",
        sentence(m, diagnosis) if m is not None and done else units.UNKNOWN,
        "the longest of waiting, reading and writing; and which limit of the roofline it hit first",
        tuple(
            Input(part.name, units.seconds(part.seconds), BOUND[part.bound] if part.bound is not None else CLOCK)
            for part in parts
        ),
        "computed from the reply's metrics and the limits of this machine",
        f"Why the reply took as long as it did. {session.keymap.key('explain')} shows the details, and what would help.",
        "" if done else "a reply is running" if session.replying else NO_REPLY,
    )


Figure = Literal[
    "model",
    "ttft",
    "prefill",
    "cached",
    "now",
    "mean",
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
    "diagnosis",
]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""In the order of the panel."""


def explain(figure: Figure, session: Session) -> Explained:
    """Return ``figure`` of a session, explained."""
    found = _EXPLAIN[figure](session)
    if found.value != units.UNKNOWN or found.why:
        return found
    return replace(found, why=NO_REPLY if session.metrics is None and not session.replying else NOT_YET)


_EXPLAIN: dict[Figure, Callable[[Session], Explained]] = {
    "model": _model,
    "ttft": _ttft,
    "prefill": _prefill,
    "cached": _cached,
    "now": _now,
    "mean": _mean,
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

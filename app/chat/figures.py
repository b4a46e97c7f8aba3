"""Every figure of the side panel, explained: how it is computed, from what, where that comes from, and what it means.

Pure: a session in, words out. No rate is computed here; those that a reply measured are named with their inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tokamac.app import units
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.sanitise import sanitise_line
from tokamac.app.verdict import BOUND, sentence, value_text, words
from tokamac.engine import metrics as rates
from tokamac.engine.metrics import RECENT_GAPS, Metrics, Outlier


def decode_now(session: Session) -> float | None:
    """Return the decode rate over the last few gaps, while a reply is written."""
    if session.live is None or session.engine.phase not in (EnginePhase.DECODING, EnginePhase.STOPPING):
        return None
    return rates.recent_rate(session.live.gaps_ms)


def achieved_gbs(session: Session) -> float | None:
    """Return the bandwidth that decoding amounts to: of the last few gaps while a reply is written, else of the whole reply."""
    if session.live is not None and session.engine.phase in (EnginePhase.DECODING, EnginePhase.STOPPING):
        return session.live.achieved_gbs
    return session.metrics.achieved_gbs if session.metrics is not None else None


def context_used(session: Session) -> int | None:
    """Return the tokens that the conversation takes, as far as known."""
    if session.live is not None and session.engine.replying:
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
    """What the tokens of the conversation are that the model sees, and what it no longer sees.

    cached: found in the prompt cache. computed: read for this reply. written: by the reply. free: room that is left; None where
    there is no bound.
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
    """Return what the context holds; None while nothing is known of it. What rolls out is the oldest: of the cached ones first."""
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
    """Return the most memory that was in use: during the reply, else since the model was loaded, else what is in use now."""
    memory, metrics = session.engine.memory, session.metrics
    return (metrics.peak_memory_bytes if metrics is not None else None) or memory.peak_bytes or memory.active_bytes


def capacity_of(session: Session) -> int | None:
    """Return the tokens that the context holds at once."""
    return session.engine.info.capacity if session.engine.info is not None else None


def share_of_ceiling(metrics: Metrics) -> float | None:
    """Return the decode rate as a share of the ceiling; None where either is unknown."""
    return rates.share(metrics.decode_tps, metrics.ceiling_tps)


def share_of_expected(metrics: Metrics) -> float | None:
    """Return the decode rate as a share of what good kernels reach here; None where either is unknown."""
    return rates.share(metrics.decode_tps, metrics.expected_tps)


def gap_and_cause(outlier: Outlier) -> str:
    """Return a gap that stands out in words: ``41 ms at token 257: pool cleared``."""
    return f"{units.milliseconds(outlier.gap_ms)} at token {units.count(outlier.token)}: {causes(outlier)}"


def causes(outlier: Outlier) -> str:
    """Return why a gap stands out, as far as it is known."""
    return ", ".join(outlier.causes) or f"cause {units.UNKNOWN}"


def prefill_eta_s(session: Session, now: float) -> float | None:
    """Return the seconds that the rest of the prompt will take at the rate so far; None until there is one."""
    prefill = session.prefill
    if prefill is None:
        return None
    speed = rates.rate(prefill.done - prefill.cached, now - session.engine.phase_since)
    return None if speed is None else (prefill.total - prefill.done) / speed


CLOCK = "the engine's clock"
COUNTED = "counted by the engine"
MEASURED = f"measured by {CLOCK}"
NO_REPLY = "no reply has been made yet"
NOT_YET = "the reply has not come that far"


@dataclass(frozen=True, slots=True)
class Input:
    """A number that goes into a figure: with its unit, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A figure in words. value: with its unit, "unknown" where it is. why: why it is unknown; "" where it is known.

    source: where the figure itself comes from. meaning: one sentence.
    """

    name: str
    value: str
    formula: str
    inputs: tuple[Input, ...]
    source: str
    meaning: str
    why: str = ""


def terms(session: Session, *keys: str) -> tuple[Input, ...]:
    """Return numbers of the diagnosis, as far as it has them."""
    terms = () if session.diagnosis is None else session.diagnosis.terms
    return tuple(
        Input(term.name, value_text(term.value, term.unit), words(term, terms)) for term in terms if term.key in keys
    )


def bandwidth(session: Session) -> tuple[Input, ...]:
    """Return the memory's bandwidth, and who says so."""
    known = terms(session, "bandwidth")
    source = "the table of chips, or measured on this machine"
    return known or (Input("bandwidth", units.bandwidth(session.engine.bandwidth_gbs), source),)


def step(session: Session) -> tuple[Input, ...]:
    """Return what a step reads: of the last step while a reply is written, else of the one in its middle."""
    if session.live is not None and session.engine.replying:
        return (
            Input("bytes a step", units.size(session.live.bytes_per_step), "weights, keys and values: the last step's"),
        )
    m = session.metrics
    return (
        Input(
            "weights a step", units.size(None if m is None else m.weight_bytes_per_token), "counted from the tensors"
        ),
        Input("keys and values", units.size(None if m is None else m.kv_bytes_per_step), "in the middle of the reply"),
    )


def ceiling(session: Session) -> Explained:
    """How near decode came to what the bandwidth allows."""
    m = session.metrics
    reached = None if m is None else share_of_ceiling(m)
    ceiling = session.engine.ceiling_tps if m is None else m.ceiling_tps
    return Explained(
        "share of the ceiling",
        units.percent(reached),
        "decode rate ÷ (bandwidth ÷ bytes a step)",
        (
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            Input("ceiling", units.rate(ceiling), "bandwidth ÷ bytes a step"),
            *bandwidth(session),
            *step(session),
        ),
        "computed from the above",
        "How near the reply came to what the memory's bandwidth allows: no program can be faster than all of it.",
    )


def expected(session: Session) -> Explained:
    """How near it came to what is expected here."""
    m = session.metrics
    share = None if m is None else share_of_expected(m)
    how = next((term.source for term in terms(session, "expected")), "what good kernels reach")
    return Explained(
        "share of the expected",
        units.percent(share),
        "decode rate ÷ expected rate",
        (
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            Input("expected rate", units.rate(None if m is None else m.expected_tps), how),
            *terms(session, "weights", "kv", "launching", "host"),
        ),
        "fitted to published speeds of this chip, and no faster than the host builds a step; or timed in parts on this machine",
        "Whether this machine does as well as it should: far below means that something else takes its time.",
        ""
        if m is None or m.expected_tps is not None
        else "this machine's pace has not been measured yet; idle time does it",
    )


def achieved(session: Session) -> Explained:
    """What it drew from memory."""
    achieved = achieved_gbs(session)
    m = session.metrics
    return Explained(
        "achieved bandwidth",
        units.bandwidth(achieved),
        "bytes a step × decode rate",
        (
            *step(session),
            Input("decode rate", units.rate(None if m is None else m.decode_tps), MEASURED),
            *bandwidth(session),
        ),
        "computed from what was measured; while a reply is written, of the last gaps",
        "What decoding really draws from memory each second.",
    )


def diagnosis(session: Session) -> Explained:
    """What the reply waited for."""
    m, diagnosis = session.metrics, session.diagnosis
    done = m is not None and not session.engine.replying
    parts = () if diagnosis is None else diagnosis.parts
    return Explained(
        "diagnosis",
        sentence(m, diagnosis) if m is not None and done else units.UNKNOWN,
        "the longest of waiting, reading and writing; the roof of the roofline that it met first",
        tuple(
            Input(part.name, units.seconds(part.seconds), BOUND[part.bound] if part.bound is not None else CLOCK)
            for part in parts
        ),
        "computed from the reply's metrics and what this machine allows",
        f"Why the reply took as long as it did; {session.keymap.key('explain')} shows all of it, and what would help.",
        "" if done else "a reply is being made" if session.engine.replying else NO_REPLY,
    )


def model(session: Session) -> Explained:
    """What the model weighs."""
    info = session.engine.info
    bits = None if info is None else info.bits_per_weight
    return Explained(
        "weights",
        units.size(None if info is None else info.weight_bytes),
        "the bytes of all tensors as they are held",
        (
            Input("parameters", units.short(None if info is None else info.parameters), "counted in the model's files"),
            Input("bits per weight", units.UNKNOWN if bits is None else f"{bits:.2f}", "stored bits ÷ weights"),
            Input("model", sanitise_line(session.engine.load.model if info is None else info.name), "what you chose"),
        ),
        "counted from the tensors that are loaded",
        "What the model takes in memory before a word is read, and nearly all of it is read for each token that is written.",
        "" if info is not None else "no model is loaded",
    )


def context(session: Session) -> Explained:
    """What the model sees."""
    context = context_of(session)
    capacity = capacity_of(session)
    held = None if context is None else context.held
    parts = (
        ()
        if context is None
        else (
            Input("cached", units.count(context.cached), "found in the prompt cache"),
            Input("computed", units.count(context.computed), "read for this reply"),
            Input("written", units.count(context.written), "by the reply"),
            Input("free", units.count(context.free), "room that is left"),
        )
    )
    return Explained(
        "context",
        units.UNKNOWN if held is None else f"{units.count(held)} tokens",
        "cached + computed + written",
        (*parts, Input("context length", units.count(capacity), "the model's, or the KV window's")),
        COUNTED,
        "What the model sees of the conversation; each of these tokens is read again for every token that is written.",
    )


def out_of_sight(session: Session) -> Explained:
    """What it no longer sees."""
    context = context_of(session)
    gone = None if context is None else context.out_of_sight
    rolls = session.engine.info is not None and session.engine.info.rolls
    return Explained(
        "out of sight",
        units.UNKNOWN if gone is None else f"{units.count(gone)} tokens",
        "left out of the prompt + rolled out since",
        (
            Input("left out", units.count(session.left_out), "of the middle, where the prompt did not fit"),
            Input(
                "rolled out",
                units.count(None if gone is None else gone - session.left_out),
                "the oldest, but the sinks",
            ),
        ),
        COUNTED,
        "What was said but the model no longer sees; "
        + (
            "when the context is full the oldest go."
            if rolls
            else f"what happens at a full context is a setting ({session.keymap.key('settings')})."
        ),
    )


def kv(session: Session) -> Explained:
    """What the context takes."""
    m, kv = session.metrics, session.engine.load.kv
    bits = "the model's own type" if not kv.quantized else f"{kv.key_bits} and {kv.value_bits} bits"
    return Explained(
        "KV cache",
        units.size(None if m is None else m.kv_bytes),
        "the bytes of all keys and values that are held",
        (
            Input("tokens held", units.count(context_held(session)), COUNTED),
            Input("keys and values", bits, f"settings ({session.keymap.key('settings')})"),
        ),
        "counted from the caches",
        "What the context takes in memory; a step reads it as well as the weights, so long contexts are slower.",
    )


def peak(session: Session) -> Explained:
    """The most that was in use."""
    memory, m = session.engine.memory, session.metrics
    peak = peak_bytes(session)
    return Explained(
        "peak memory",
        units.size(peak),
        "the most that was in use at once during the reply",
        (
            Input(
                "weights",
                units.size(None if session.engine.info is None else session.engine.info.weight_bytes),
                "counted",
            ),
            Input("KV cache", units.size(None if m is None else m.kv_bytes), "counted"),
            Input("in use now", units.size(memory.active_bytes), "MLX's allocator"),
            Input("limit", units.size(memory.budget_bytes), memory.budget_source or units.UNKNOWN),
        ),
        "MLX's allocator",
        "How near the model comes to the limit, beyond which prompts are refused; a setting changes it "
        f"({session.keymap.key('settings')}). Below it, other programs may have to give way. Earlier prompts stay in memory for "
        "reuse, up to a tenth of the limit.",
    )


def predicted(session: Session) -> Explained:
    """What was expected of that."""
    predicted = session.engine.memory.predicted_peak_bytes
    return Explained(
        "expected peak",
        units.size(predicted),
        "weights + caches as they grow + the largest temporaries of a chunk",
        (Input("measured peak", units.size(peak_bytes(session)), "MLX's allocator"),),
        "arithmetic, before the prompt was read",
        "The promise that was made before the reply: if it had not fitted, the chat would have said so instead of crashing.",
    )


def ttft(session: Session) -> Explained:
    """How long the first token took."""
    m = session.metrics
    waited = None if m is None or m.ttft_s is None or m.prefill_s is None else max(0.0, m.ttft_s - m.prefill_s)
    return Explained(
        "time to first token",
        units.seconds(None if m is None else m.ttft_s),
        "first token reaches the host − request accepted",
        (
            Input("waiting", units.seconds(waited), "its turn, tokenizing, restoring the cache"),
            Input("reading the prompt", units.seconds(None if m is None else m.prefill_s), CLOCK),
        ),
        CLOCK,
        "How long you wait before anything appears, without the drawing of it.",
    )


def prefill(session: Session) -> Explained:
    """How fast the prompt was read."""
    m = session.metrics
    return Explained(
        "prefill rate",
        units.rate(None if m is None else m.prefill_tps),
        "computed tokens ÷ seconds of prefill",
        (
            Input("computed tokens", units.count(None if m is None else m.prefill_tokens), COUNTED),
            Input("seconds of prefill", units.seconds(None if m is None else m.prefill_s), CLOCK),
            *terms(session, "operations", "least", "wanted"),
        ),
        MEASURED,
        "How fast the prompt is read: many tokens at once, so as a rule it waits for arithmetic; cached tokens never count.",
    )


def cached(session: Session) -> Explained:
    """What of the prompt was there already."""
    m, prefill = session.metrics, session.prefill
    cached = m.cached_tokens if m is not None else None if prefill is None else prefill.cached
    prompt = m.prompt_tokens if m is not None else None if prefill is None else prefill.total
    return Explained(
        "cached tokens",
        units.count(cached),
        "tokens of the longest beginning that was computed before and is still kept",
        (Input("prompt", units.count(prompt), "counted after the model's chat template"),),
        "the prompt cache",
        "What of the prompt need not be read again; only the rest costs time before the first token.",
    )


def now(session: Session) -> Explained:
    """How fast the reply is being written."""
    live = session.live
    recent = () if live is None else live.gaps_ms[-RECENT_GAPS:]
    now = decode_now(session)
    return Explained(
        "decode rate now",
        units.rate(now),
        "gaps ÷ the time that they took",
        (
            Input("gaps", units.count(len(recent)) if recent else units.UNKNOWN, f"the last {RECENT_GAPS} at most"),
            Input("their time", units.milliseconds(sum(recent) if recent else None), CLOCK),
        ),
        MEASURED,
        "How fast the reply is being written at this moment; the mean is of all of it.",
        "" if now is not None or session.engine.replying else "nothing is being written",
    )


def mean(session: Session) -> Explained:
    """How fast it was written."""
    m = session.metrics
    return Explained(
        "decode rate",
        units.rate(None if m is None else m.decode_tps),
        "(generated tokens − 1) ÷ (last token − first token)",
        (
            Input("generated tokens", units.count(None if m is None else m.generated_tokens), COUNTED),
            Input("last − first token", units.seconds(_between_s(m)), CLOCK),
        ),
        MEASURED,
        "How fast the reply was written, without the wait for its first token; below two tokens there is no rate.",
    )


def gaps(session: Session) -> Explained:
    """How steadily."""
    m = session.metrics
    itl = None if m is None else m.itl_ms
    count = None if m is None or m.generated_tokens < 2 else m.generated_tokens - 1
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
        "How steadily the text flows: the middle gap is the pace, the rare long ones are what you see as a stutter.",
    )


def slowest(session: Session) -> Explained:
    """The gaps that stand out."""
    outliers = session.outliers
    why = "" if outliers else "no gap stands out" if session.metrics is not None else NO_REPLY
    return Explained(
        "slowest gap",
        units.milliseconds(outliers[0].gap_ms) if outliers else units.UNKNOWN,
        "the longest of the gaps that stand out from the others",
        tuple(
            Input(f"token {units.count(each.token)}", units.milliseconds(each.gap_ms), causes(each))
            for each in outliers
        ),
        "recorded while the token was made; a cause is named only if it explains half of the gap",
        "Where the reply stuttered, and what the engine was doing then.",
        why,
    )


def _between_s(metrics: Metrics | None) -> float | None:
    if metrics is None or metrics.total_s is None or metrics.ttft_s is None or metrics.generated_tokens < 2:
        return None
    return metrics.total_s - metrics.ttft_s


__all__ = ["FIGURES", "Explained", "Figure", "Input", "explain"]

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
"""In the order in which the panel shows them."""


def explain(figure: Figure, session: Session) -> Explained:
    """Return ``figure`` of a session, explained."""
    found = _EXPLAIN[figure](session)
    if found.value != units.UNKNOWN or found.why:
        return found
    why = NO_REPLY if session.metrics is None and not session.engine.replying else NOT_YET
    return replace(found, why=why)


_EXPLAIN: dict[Figure, Callable[[Session], Explained]] = {
    "model": model,
    "ttft": ttft,
    "prefill": prefill,
    "cached": cached,
    "now": now,
    "mean": mean,
    "gaps": gaps,
    "slowest": slowest,
    "ceiling": ceiling,
    "expected": expected,
    "achieved": achieved,
    "context": context,
    "out of sight": out_of_sight,
    "kv": kv,
    "peak": peak,
    "predicted": predicted,
    "diagnosis": diagnosis,
}

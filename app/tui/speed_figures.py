"""The figures of a reply's two phases, explained: the wait for the first token, and the writing."""

from tokamac.app.tui import measures, units
from tokamac.app.tui.explained import CLOCK, COUNTED, MEASURED, NO_REPLY, Explained, Input, terms
from tokamac.app.tui.session import Session
from tokamac.engine.limits.metrics import RECENT_GAPS, Metrics


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
    now = measures.decode_now(session)
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
        "" if now is not None or session.replying else "nothing is being written",
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
            Input(f"token {units.count(each.token)}", units.milliseconds(each.gap_ms), measures.causes(each))
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

"""What the gauges read off a session: figures the engine measured, picked and named. Rates come from limits.metrics alone."""

from dataclasses import dataclass

from tokamac.app.tui import units
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.session import Session
from tokamac.engine.limits import metrics as rates
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics


def decode_now(session: Session) -> float | None:
    """Return the decode rate over the last few gaps, while a reply is written."""
    if session.live is None or session.phase not in (Phase.DECODING, Phase.STOPPING):
        return None
    return rates.recent_rate(session.live.gaps_ms)


def achieved_gbs(session: Session) -> float | None:
    """Return the bandwidth that decoding amounts to: of the last few gaps while a reply is written, else of the whole reply."""
    if session.live is not None and session.phase in (Phase.DECODING, Phase.STOPPING):
        return session.live.achieved_gbs
    return session.metrics.achieved_gbs if session.metrics is not None else None


def context_used(session: Session) -> int | None:
    """Return the tokens that the conversation takes, as far as known."""
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


def out_of_sight(session: Session) -> int:
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
    return Context(seen[0], seen[1], seen[2], free, out_of_sight(session))


def peak_bytes(session: Session) -> int | None:
    """Return the most memory that was in use: during the reply, else since the model was loaded, else what is in use now."""
    memory, metrics = session.memory, session.metrics
    return (metrics.peak_memory_bytes if metrics is not None else None) or memory.peak_bytes or memory.active_bytes


def capacity_of(session: Session) -> int | None:
    """Return the tokens that the context holds at once."""
    return session.info.capacity if session.info is not None else None


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
    speed = rates.rate(prefill.done - prefill.cached, now - session.phase_since)
    return None if speed is None else (prefill.total - prefill.done) / speed

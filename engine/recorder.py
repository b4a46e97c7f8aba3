"""Takes the time stamps of one reply where they happen, and what may hold a token up; metrics.py turns them into rates."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokamac.engine.limits import metrics
from tokamac.engine.limits.gaps import Cause, GapLog, Mark, Outlier, Throttle, outliers
from tokamac.engine.limits.metrics import Metrics

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decoded token reads: bytes of weights and of keys and values, and the bandwidth it is read with (GB/s).

    expected_tps: tokens a second that good kernels reach at this cost.
    """

    weight_bytes: int | None
    kv_bytes: int | None
    bandwidth_gbs: float | None
    expected_tps: float | None = None

    @property
    def bytes_per_step(self) -> int | None:
        """All bytes read for one token."""
        if self.weight_bytes is None:
            return None
        return self.weight_bytes + (self.kv_bytes or 0)


@dataclass(slots=True)
class Recorder:
    """The time stamps (seconds, one monotonic clock) and counts of one reply.

    marks: what happened between its tokens, in order.
    """

    clock: Clock = time.perf_counter
    accepted_s: float = 0.0
    prefill_began_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled: int = 0
    token_times: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ended_s: float | None = None
    _gaps: GapLog = field(default_factory=GapLog)

    def accept(self) -> None:
        """The request has arrived."""
        self.accepted_s = self.clock()

    def begin_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The caches are ready; the rest of the prompt is about to be computed."""
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.prefill_began_s = self.clock()

    def token(self) -> None:
        """A token has reached the host."""
        self.token_times.append(self.clock())

    def mark(self, cause: Cause, most_ms: float = math.inf) -> None:
        """Something happened since the last token that may hold the next one up, by ``most_ms`` at most."""
        self.marks.append(Mark(len(self.token_times) + 1, cause, most_ms))

    def end(self) -> None:
        """The reply is over."""
        self.ended_s = self.clock()

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and of the reply so far."""
        return self.prompt_tokens + len(self.token_times)

    def outliers(self, *, ahead: bool, throttled: Sequence[Throttle] = ()) -> tuple[Outlier, ...]:
        """Return the longest gaps that stand out so far, and what is known of why; see ``gaps.outliers``."""
        gaps, longest = self._gaps.read(self.token_times)
        return () if gaps is None else outliers(longest, gaps.p50, self.marks, ahead=ahead, throttled=throttled)

    def metrics(self, cost: StepCost, *, kv_bytes: int | None, peak_memory_bytes: int | None) -> Metrics:
        """Return what is known so far."""
        times = list(self.token_times)  # a copy: the engine's thread may be appending
        first = times[0] if times else None
        # The first token's step computes the last of the prompt; a reply cancelled before it computed fewer.
        prefill_tokens = self.prompt_tokens - self.cached_tokens if times else self.prefilled
        prefill_s = None if first is None or self.prefill_began_s is None else first - self.prefill_began_s
        decode_tps = metrics.decode_rate(times)
        return Metrics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefill_tokens=prefill_tokens,
            generated_tokens=len(times),
            ttft_s=None if first is None else first - self.accepted_s,
            prefill_s=prefill_s,
            total_s=times[-1] - self.accepted_s if times else None,
            prefill_tps=metrics.rate(prefill_tokens, prefill_s),
            decode_tps=decode_tps,
            itl_ms=self._gaps.read(self.token_times)[0],
            kv_bytes=kv_bytes,
            weight_bytes_per_token=cost.weight_bytes,
            kv_bytes_per_step=cost.kv_bytes,
            achieved_gbs=metrics.achieved_gbs(cost.bytes_per_step, decode_tps),
            ceiling_tps=metrics.ceiling_tps(cost.bandwidth_gbs, cost.bytes_per_step),
            expected_tps=cost.expected_tps,
            peak_memory_bytes=peak_memory_bytes,
        )

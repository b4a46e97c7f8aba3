"""What a step costs the host, beside what it costs the device: Python builds each step's graph, however little there is to compute.

    decode   t = max(device, host)                  the host builds the next step while the device is at this one
    prefill  t = max(device, calls × host) + calls × wait

The device's share is fitted to published measurements (fitted.py). The host's is measured where the model runs, in milliseconds: a
step's graph is built and dropped, nothing is computed. It is a lower bound: MLX encodes the kernels on the host as well, which the
fitted launches hold. Of a machine that is only named nobody measured it, so where a model is smaller than all that the shares are
fitted to, its speed there is unknown.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from tokamac.engine.limits.fitted import Fitted, range_of
from tokamac.engine.limits.work import Work

BUDGET_S, LEAST_TRIES = 0.02, 3
"""Seconds of trials, and how many at least: the quickest counts."""

WAITS = 5
"""Round trips to the device that are timed."""

MATTERS_S = 0.02
"""Seconds of a device's step above which no host is the slower of the two: a slow one builds the longest in less."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host's part. step_s: building one call of the model. wait_s: a round trip to the device that does nothing."""

    step_s: float
    wait_s: float = 0.0

    def reading_s(self, calls: int) -> float:
        """Seconds of so many calls, each waited for."""
        return calls * (self.step_s + self.wait_s)


@dataclass(frozen=True, slots=True)
class HostLimited:
    """A pace that knows the host: never faster than it builds steps. host: None where it was not measured, or no longer matters."""

    device: Fitted
    host: Host | None = None

    def decode_s(self, work: Work, context: int, batch: int = 1) -> float | None:
        """Seconds of a decode step; None also for a model so small that the host decides, where that is unknown."""
        device_s = self.device.decode_s(work, context, batch)
        if device_s is None or self.host is None:
            return device_s if _is_fitted(work) else None
        return max(device_s, self.host.step_s)

    def prefill_s(self, work: Work, tokens: int, cached: int, chunk: int) -> float | None:
        """Seconds of reading ``tokens`` after ``cached``; None as for decoding."""
        device_s = self.device.prefill_s(work, tokens, cached, chunk)
        if device_s is None or self.host is None:
            return device_s if _is_fitted(work) else None
        calls = calls_of(tokens, chunk)
        return max(device_s + calls * self.host.wait_s, self.host.reading_s(calls))


def decodes_by_host(pace: object, expected_s: float | None) -> bool:
    """Whether a step takes as long as it is expected to because the host does."""
    return isinstance(pace, HostLimited) and pace.host is not None and expected_s == pace.host.step_s


def reads_by_host(pace: object, expected_s: float | None, calls: int) -> bool:
    """Whether a prompt of so many calls takes as long as it is expected to because the host does."""
    return isinstance(pace, HostLimited) and pace.host is not None and expected_s == pace.host.reading_s(calls)


def calls_of(tokens: int, chunk: int) -> int:
    """Return how often the model is called for a prompt: for its chunks, and for its last token, which makes the reply's first."""
    return ceil((tokens - 1) / chunk) + 1


def measure_host(model: Any, new_caches: Callable[[], list[Any]]) -> Host | None:
    """Time building a decode step of mlx-lm's ``model``, loaded or hollow, and a round trip. Computes nothing of the model.

    new_caches: makes empty caches for it. None where its step can't be built. The thread's own time counts: what other programs
    take of a busy machine is not the host's part.
    """
    import mlx.core as mx

    steps: list[float] = []
    until = time.perf_counter() + BUDGET_S
    try:
        while len(steps) < LEAST_TRIES or time.perf_counter() < until:
            caches = new_caches()
            began = time.thread_time()
            logits = model(mx.array([[0]]), cache=caches)
            mx.argmax(logits[:, -1, :], axis=-1)
            steps.append(time.thread_time() - began)
    except (RuntimeError, ValueError):
        return None
    return Host(min(steps), min(_wait_s() for _ in range(WAITS)))


def _wait_s() -> float:
    import mlx.core as mx

    one = mx.array(1.0)
    began = time.perf_counter()
    mx.eval(one + 1.0)
    return time.perf_counter() - began


def _is_fitted(work: Work) -> bool:
    return range_of().covers(work) is True

"""Every rate the product shows is computed here, from time stamps, and nowhere else.

The words are defined as follows (seconds from one monotonic clock; token stamps are taken where the token reaches the host):

    TTFT          accepted → first token
    prefill rate  prompt tokens actually computed ÷ seconds spent computing them; cached tokens never count
    ITL           each gap between consecutive tokens
    decode rate   (n − 1) ÷ (t_last − t_first); undefined below two tokens
    total         accepted → last token

What is not known is None, never 0 and never infinity.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

RECENT_GAPS = 16
"""Gaps that are "now": the last quarter of a second at 60 tok/s, steady to the eye and quick to follow."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Percentiles of the gaps between tokens, in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """What one reply cost. Times in seconds, rates in tokens a second, sizes in bytes; None is unknown."""

    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    generated_tokens: int
    ttft_s: float | None
    prefill_s: float | None
    total_s: float | None
    prefill_tps: float | None
    decode_tps: float | None
    itl_ms: Gaps | None
    kv_bytes: int | None
    weight_bytes_per_token: int | None
    kv_bytes_per_step: int | None
    achieved_gbs: float | None
    ceiling_tps: float | None
    expected_tps: float | None
    peak_memory_bytes: int | None


def rate(count: float, seconds: float | None) -> float | None:
    """Return count ÷ seconds, or None where there is nothing to divide."""
    if seconds is None or seconds <= 0 or count <= 0:
        return None
    return count / seconds


def share(part: float | None, whole: float | None) -> float | None:
    """Return part ÷ whole; None where either is unknown, or the whole is nothing."""
    return None if part is None or not whole else part / whole


def decode_rate(token_times: Sequence[float]) -> float | None:
    """Return (n − 1) ÷ (t_last − t_first) for n token times in seconds; None below two tokens."""
    if len(token_times) < 2:
        return None
    return rate(len(token_times) - 1, token_times[-1] - token_times[0])


def recent_rate(gaps: Sequence[float]) -> float | None:
    """Return the decode rate of the last few ``gaps`` (ms): what "now" means. None where there is none."""
    recent = gaps[-RECENT_GAPS:]
    return rate(len(recent), sum(recent) / 1e3)


def gaps_ms(token_times: Sequence[float]) -> tuple[float, ...]:
    """Return the gaps between consecutive token times, in milliseconds."""
    return tuple((b - a) * 1e3 for a, b in itertools.pairwise(token_times))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile: the smallest value that at least ``share`` (0…1) of ``ordered`` reach.

    ``ordered`` is sorted and not empty.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gap_percentiles(gaps: Sequence[float]) -> Gaps | None:
    """Return p50, p95, p99 and the largest of the gaps; None where there is no gap."""
    return percentiles(sorted(gaps))


def percentiles(ordered: Sequence[float]) -> Gaps | None:
    """Return those of gaps that are sorted already."""
    if not ordered:
        return None
    return Gaps(percentile(ordered, 0.50), percentile(ordered, 0.95), percentile(ordered, 0.99), ordered[-1])


def ceiling_tps(bandwidth_gbs: float | None, bytes_per_step: int | None) -> float | None:
    """Return bandwidth ÷ bytes read per decoded token: no kernel can be faster. GB are 10^9 bytes."""
    if bandwidth_gbs is None or not bytes_per_step:
        return None
    return bandwidth_gbs * 1e9 / bytes_per_step


def achieved_gbs(bytes_per_step: int | None, decode_tps: float | None) -> float | None:
    """Return the bandwidth that a decode rate amounts to, in GB/s."""
    if bytes_per_step is None or decode_tps is None:
        return None
    return bytes_per_step * decode_tps / 1e9

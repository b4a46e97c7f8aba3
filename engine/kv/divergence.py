"""What packing a cache costs in quality, and which setting to recommend: values and arithmetic, no model.

    KL      Σ p (ln p − ln q) over the vocabulary, in nats, the mean over positions: p is the next-token distribution with the
            16-bit cache, q with the setting's, after the same tokens
    top-1   share of the positions at which the likeliest token is the same

``recommend`` documents its rule. The limits below are choices, with what they were measured against.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import mlx.core as mx


MOST_KL = 0.01
"""Mean KL in nats up to which a cache is good enough. Storing the weights of Llama 3 8B in some 6 bits moves its distribution by
0.0055, in some 5 bits by 0.0108 (https://github.com/ggml-org/llama.cpp/pull/6936): a 4-bit model has paid more already."""

LEAST_TOP1 = 0.95
"""Share of matching top tokens from which a cache is good enough. Where the two likeliest are almost even, which one leads says
little; on a text of 1,500 tokens the share is known to about half a per cent."""

FASTER = 1.1
"""A cache is faster when it decodes at this multiple of another's rate. Less may be noise, and is not worth more memory."""

SMALL_SHARE = 0.1
"""Memory is no issue while the 16-bit cache of a whole context takes at most this share of what the weights leave."""

Why = Literal["exact", "smallest", "faster", "alone"]
"""exact: 16 bits, as memory is no issue and nothing is faster. smallest: of those good enough. faster: than a smaller one that is
good enough. alone: no packed one is good enough."""


@dataclass(frozen=True, slots=True)
class KVDivergence:
    """Difference from the 16-bit cache over ``positions``. kl_nats: None where the values were not numbers. top1: 0 to 1."""

    kl_nats: float | None
    top1: float
    positions: int

    @property
    def good(self) -> bool:
        """Whether it is within both limits."""
        return self.kl_nats is not None and self.kl_nats <= MOST_KL and self.top1 >= LEAST_TOP1


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens decoded a second, at a context of ``depth`` tokens."""

    depth: int
    tps: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting on one model. bytes_per_token: while nothing has reached its window. context_bytes: at the model's whole context.

    refused: why the model can't take it; all else is None or empty then. notes: where the plan differs from what was asked.
    """

    key_bits: int
    value_bits: int
    bytes_per_token: int | None = None
    context_bytes: int | None = None
    quality: KVDivergence | None = None
    decode: tuple[Speed, ...] = ()
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return self.key_bits == self.value_bits == 16

    @property
    def bits(self) -> str:
        """What ``--kv-bits`` takes: "8", or "8,4"."""
        return str(self.key_bits) if self.key_bits == self.value_bits else f"{self.key_bits},{self.value_bits}"

    @property
    def deep_tps(self) -> float | None:
        """The decode rate at the greatest depth."""
        return self.decode[-1].tps if self.decode else None


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """How far a comparison has come, in tokens. bits: the current setting, "" while the text is read with all of them."""

    bits: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The setting to use, and why. smallest: the smallest that is good enough, which may be ``pick`` itself."""

    pick: Trial
    why: Why
    smallest: Trial


@dataclass(slots=True)
class Tally:
    """Sums over the positions compared so far."""

    kl: float = 0.0
    same: int = 0
    positions: int = 0

    def add(self, kl: Sequence[float], same: Sequence[bool]) -> None:
        """Add what ``differences`` found."""
        self.kl += math.fsum(kl)
        self.same += sum(same)
        self.positions += len(kl)

    def quality(self) -> KVDivergence:
        """Return the means. At least one position was added."""
        mean = self.kl / self.positions
        return KVDivergence(mean if math.isfinite(mean) else None, self.same / self.positions, self.positions)


def differences(reference: "mx.array", other: "mx.array") -> tuple["mx.array", "mx.array"]:
    """Compare log-probabilities (n, V) by position: return KL in nats (n,), and whether the likeliest is the same (n,)."""
    import mlx.core as mx

    p = mx.exp(reference)
    terms = mx.where(p > 0, p * (reference - other), 0)  # a token ruled out by the reference adds nothing
    kl = mx.maximum(mx.sum(terms, axis=-1), 0)  # rounding alone makes it negative
    return kl, mx.argmax(reference, axis=-1) == mx.argmax(other, axis=-1)


def mean_with_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None for what is not finite or not known."""
    if not values or not all(math.isfinite(value) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def exponential(mean: float | None, error: float | None) -> tuple[float | None, float | None]:
    """Return exp(mean) and its standard error, to first order; None where it is more than a float holds."""
    if mean is None or mean > 700:
        return None, None
    return math.exp(mean), None if error is None else math.exp(mean) * error


def fit_depths(depths: Iterable[int], room: int | None) -> tuple[int, ...]:
    """Return the depths in order, each once, none beyond ``room`` tokens (None: unbounded): what is deeper is measured there."""
    return tuple(sorted({max(1, depth if room is None else min(depth, room)) for depth in depths}))


def recommend(trials: Sequence[Trial], room_bytes: int | None) -> Advice:
    """Choose among ``trials``, of which one is exact.

    Good enough is what lies within MOST_KL and LEAST_TOP1. Of those, what another beats by FASTER at the greatest depth is out.
    Of the rest, 16 bits if its cache of a whole context takes at most SMALL_SHARE of ``room_bytes`` (what the weights leave;
    None is unknown, and then memory counts as an issue); else the smallest, and of two equal ones the nearer to 16 bits.
    """
    good = [trial for trial in trials if trial.refused is None and trial.quality is not None and trial.quality.good]
    fastest = max((trial.deep_tps for trial in good if trial.deep_tps is not None), default=None)
    quick = [trial for trial in good if not _beaten(trial.deep_tps, fastest)]
    exact = next((trial for trial in quick if trial.exact), None)
    smallest = min(good, key=_size)
    if len(good) == 1:
        return Advice(smallest, "alone", smallest)
    if exact is not None and _is_small(exact.context_bytes, room_bytes):
        return Advice(exact, "exact", smallest)
    pick = min(quick, key=_size)
    return Advice(pick, "smallest" if pick is smallest else "faster", smallest)


def _beaten(tps: float | None, fastest: float | None) -> bool:
    return tps is not None and fastest is not None and fastest >= FASTER * tps


def _is_small(needed: int | None, room: int | None) -> bool:
    return needed is not None and room is not None and needed <= SMALL_SHARE * room


def _size(trial: Trial) -> tuple[float, ...]:
    kl = trial.quality.kl_nats if trial.quality else None
    return tuple(math.inf if value is None else value for value in (trial.bytes_per_token, kl))

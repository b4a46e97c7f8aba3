"""How far a converted model is from its source on a text: values and arithmetic, no model.

    KL           mean over positions of Σ p (ln p − ln q), in nats: p is the reference's next-token distribution, q the other's
    top-1        share of the positions at which both hold the same token for the likeliest
    perplexity   exp of the mean of −ln p(the token that comes), over all tokens but the first; the ratio is other ÷ reference

Standard errors take positions for independent. The ratio's comes from the differences token by token, because both models find
the same tokens hard: it is far smaller than the perplexities' own.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokamac.engine.errors import OptionError
from tokamac.engine.kv.quality import differences

if TYPE_CHECKING:
    import mlx.core as mx

TYPICAL_KL = (
    (8.5, 0.00136),
    (6.6, 0.00545),
    (5.6, 0.0222),
    (4.6, 0.0719),
    (3.6, 0.228),
    (3.2, 0.445),
    (2.0, 2.21),
)
"""(bits per weight, mean KL in nats) of Llama 3 8B on Wikitext-2 in llama.cpp's formats q8_0, q6_K, q5_0, q4_0, q3_K_S, q2_K and
iq1_S (https://github.com/ggml-org/llama.cpp/pull/6936). From q5_0 on, the perplexity ratio's logarithm is within 6 % of the KL."""

TOLERATED = 4.0
"""Times the typical KL up to which nothing is said. In the same formats Llama 2 7B is at a quarter to a half of Llama 3 8B's KL, so
models of one size differ by that much. What is beyond it, the bits alone don't explain."""

MOST_KL = 0.5
"""Nats from which a model is poor whatever its bits: q2_K of the same table, at 0.445, has 1.56 times the perplexity."""

SURE = 2.0
"""Standard errors by which a figure must be beyond a limit: on a short text the mean itself is uncertain."""

TOKENS = 512
"""Compared unless said otherwise. Log-probabilities of 150,000 words then take 300 MB a model."""

BLOCK = 32
"""Positions compared at once, so that temporaries stay small beside the log-probabilities: 20 MB each for 150,000 words."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one model against a reference over ``positions`` tokens. kl in nats; top1 is 0 to 1; se: standard error.

    None: the value is no finite number, or there were too few tokens to know it.
    """

    kl: float | None
    kl_se: float | None
    top1: float | None
    reference_perplexity: float | None
    reference_perplexity_se: float | None
    perplexity: float | None
    perplexity_se: float | None
    perplexity_ratio: float | None
    perplexity_ratio_se: float | None
    positions: int


@dataclass(slots=True)
class Gathered:
    """What was found at the positions that were looked at so far."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    hers: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    numbers: bool = True

    def add(self, reference: "mx.array", other: "mx.array", ids: Sequence[int], first: int = 0) -> None:
        """Compare log-probabilities (n, vocabulary) float32 of what follows each of ``ids`` (n,), from position ``first`` on.

        Of the tokens that come, those from ``first`` on count, but for the very first. Raises OptionError where the vocabularies
        differ in size.
        """
        import mlx.core as mx

        if reference.shape != other.shape:
            raise OptionError(
                f"their vocabularies differ: {reference.shape[-1]:,} and {other.shape[-1]:,} tokens",
                "Compare conversions of one model.",
            )
        for begin in range(first, len(ids), BLOCK):
            part = slice(begin, begin + BLOCK)
            found, equal = differences(reference[part], other[part])
            self.numbers &= not bool(mx.any(mx.isnan(reference[part]) | mx.isnan(other[part])).item())
            self.kl += found.tolist()  # type: ignore[arg-type]  # lists, of the one axis
            self.same += equal.tolist()  # type: ignore[arg-type]
        self.hers += _surprises(reference, ids)[max(0, first - 1) :]
        self.ours += _surprises(other, ids)[max(0, first - 1) :]

    def quality(self) -> Quality:
        """Return the means over all positions."""
        kl_mean, kl_se = _mean(self.kl)
        pairs = zip(self.hers, self.ours, strict=True)
        return Quality(
            kl_mean,
            kl_se,
            sum(self.same) / len(self.same) if self.numbers else None,
            *_exponential(*_mean(self.hers)),
            *_exponential(*_mean(self.ours)),
            *_exponential(*_mean([b - a for a, b in pairs])),
            len(self.kl),
        )


def compare(reference: "mx.array", other: "mx.array", ids: Sequence[int]) -> Quality:
    """Compare log-probabilities (n, vocabulary) float32 of what follows each of ``ids`` (n,). Raises OptionError.

    The vocabularies must be of one size; ids: at least one.
    """
    found = Gathered()
    found.add(reference, other, ids)
    return found.quality()


def with_error(value: float | None, error: float | None = None) -> str:
    """Return a figure as people read it, with its standard error where that is known."""
    if value is None:
        return "unknown"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def typical_kl(bits_per_weight: float) -> float:
    """Return the KL in nats that so many bits usually cost: between the rows of TYPICAL_KL on a logarithmic scale."""
    rows = TYPICAL_KL
    bits = min(max(bits_per_weight, rows[-1][0]), rows[0][0])
    for (above, low), (below, high) in itertools.pairwise(rows):
        if bits >= below:
            share = (above - bits) / (above - below)
            return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return rows[-1][1]


def concerns(quality: Quality, bits_per_weight: float) -> tuple[str, ...]:
    """Return what a user must be told: a sentence for each figure that is worse than so many bits explain.

    bits_per_weight: of the other model. Empty where all is as it should be.
    """
    if quality.kl is None or quality.perplexity_ratio is None:
        return ("Its probabilities are not all finite numbers, or the text was too short: it can't be vouched for.",)
    typical = typical_kl(bits_per_weight)
    limit, bits = min(TOLERATED * typical, MOST_KL), f"{bits_per_weight:.2f} bits per weight"
    found = []
    if quality.kl - SURE * (quality.kl_se or 0.0) > limit:
        found.append(
            f"Its distribution is {quality.kl:.3g} nats (KL) from the source's, where {bits} usually cost {typical:.2g}:"
            " expect clearly worse answers, and convert with more bits."
        )
    surprise, error = (
        math.log(quality.perplexity_ratio),
        (quality.perplexity_ratio_se or 0.0) / quality.perplexity_ratio,
    )
    if surprise - SURE * error > limit:
        found.append(
            f"Its perplexity is {quality.perplexity_ratio:.3g} times the source's, where {bits} usually make it"
            f" {math.exp(typical):.3g} times: expect clearly worse answers, and convert with more bits."
        )
    return tuple(found)


def _surprises(log_probabilities: "mx.array", ids: Sequence[int]) -> list[float]:
    """Return −ln p of each token after the first, in nats."""
    import mlx.core as mx

    if len(ids) < 2:
        return []
    found = mx.take_along_axis(log_probabilities[:-1], mx.array(list(ids[1:]))[:, None], axis=-1)
    values: list[float] = (-found[:, 0]).tolist()  # type: ignore[assignment]
    return values


def _mean(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None for what is not finite or not known."""
    if not values or not all(math.isfinite(value) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _exponential(mean: float | None, error: float | None) -> tuple[float | None, float | None]:
    """Return exp(mean) and its standard error, to first order; None where it is more than a float holds."""
    if mean is None or mean > 700:
        return None, None
    return math.exp(mean), None if error is None else math.exp(mean) * error

"""Why a reply took as long as it did, and what would help: a pure function of its metrics and of what the machine allows.

    wait     accepted → prefill begins: the queue, tokenizing, restoring the cache
    prefill  → the first token
    decode   → the last token

The longest of the three is the part that counts. What a phase waited for is told by the roofline, as far as its roofs are known:

    decode   the roof that it meets first, where it comes half as far or more; else neither, but what lies around a step
    prefill  the roof that it meets first: memory below the ridge, arithmetic above it; neither, where one pass is far below both
"""

from dataclasses import dataclass
from typing import Literal

from tokamac.engine.limits.gaps import Throttle
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.metrics import Metrics, share
from tokamac.engine.limits.prediction import Pace, decode_phase, prefill_phase
from tokamac.engine.limits.remedies import BEHIND, Machinery, Remedy, remedies
from tokamac.engine.limits.situation import Foretold, Situation
from tokamac.engine.limits.terms import Term, terms_of
from tokamac.engine.limits.work import Work

PartName = Literal["wait", "prefill", "decode"]
Waits = Literal["memory", "compute", "host", "overhead", "not memory"]
"""What a phase waited for. host: Python, which builds each step, and launching its kernels. overhead: neither roof, so what lies
around the kernels. not memory: the peak of the arithmetic is not known, so it may have been that, or overhead."""

NEAR = 0.5
"""Share of the roofline from which decode is said to wait for a roof: all else that it does then takes less time."""

FAR = 0.1
"""Share of the roofline below which one pass over a prompt waits for neither roof: kernels reach more (assets/roofline.json).
Of many passes, what lies around them is a small part."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a reply's time.

    of_ceiling, of_expected: how much it reached of the speed that physics allows, and of the one to expect: 1 is all, None unknown.
    """

    name: PartName
    seconds: float
    bound: Waits | None = None
    of_ceiling: float | None = None
    of_expected: float | None = None

    @property
    def behind(self) -> bool:
        """Whether it was much slower than this machine makes it as a rule. What waits for the host is expected at its least."""
        return self.bound != "host" and self.of_expected is not None and self.of_expected < BEHIND


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a reply. parts: wait, prefill and decode. terms: the numbers it was computed from.

    remedies: what would help a reply like this one, best first, three at most. throttles: what the system slowed the chip down for.
    """

    parts: tuple[Part, ...]
    remedies: tuple[Remedy, ...]
    terms: tuple[Term, ...]
    throttles: tuple[Throttle, ...] = ()

    @property
    def slowest(self) -> Part:
        """The part that took longest; of two alike, the later."""
        return max(reversed(self.parts), key=lambda part: part.seconds)

    def part(self, name: PartName) -> Part:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)


def diagnose(metrics: Metrics, work: Work, chip: Chip, pace: Pace | None, situation: Situation) -> Diagnosis | None:
    """Return the verdict on a reply; None where no token came, so that there is nothing to explain."""
    ttft_s, prefill_s, total_s = metrics.ttft_s, metrics.prefill_s, metrics.total_s
    if ttft_s is None or prefill_s is None or total_s is None:
        return None
    context = metrics.prompt_tokens + metrics.generated_tokens // 2
    foretold = Foretold(
        prefill=prefill_phase(
            work, chip, pace, max(metrics.prefill_tokens, 1), metrics.cached_tokens, chunk=situation.chunk
        ),
        decode=decode_phase(work, chip, pace, context),
        context=context,
        chunk=situation.chunk,
    )
    parts = (
        Part("wait", max(ttft_s - prefill_s, 0.0)),
        _prefill(prefill_s, foretold, chip),
        _decode(max(total_s - ttft_s, 0.0), metrics, foretold, chip),
    )
    found = () if pace is None else remedies(metrics, foretold, Machinery(work, chip, pace), situation)
    return Diagnosis(parts, found, terms_of(metrics, work, chip, pace, foretold), situation.throttles)


def _prefill(seconds: float, foretold: Foretold, chip: Chip) -> Part:
    phase = foretold.prefill
    of_least, of_expected = share(phase.ceiling_s, seconds), share(phase.expected_s, seconds)
    if phase.bound is None:  # one roof is unknown, and then the other says little of a prompt
        return Part("prefill", seconds, _by_memory_alone(of_least, chip), None, of_expected)
    far = phase.tokens <= foretold.chunk and of_least is not None and of_least < FAR
    if phase.by_host and of_least is not None and of_least < NEAR:
        return Part("prefill", seconds, "host", of_least, of_expected)
    return Part("prefill", seconds, "overhead" if far else phase.bound, of_least, of_expected)


def _decode(seconds: float, metrics: Metrics, foretold: Foretold, chip: Chip) -> Part:
    measured, phase = metrics.decode_tps, foretold.decode
    of_least = share(measured, phase.ceiling_tps)
    waits = _by_memory_alone(of_least, chip)
    if phase.bound is not None and of_least is not None:
        around: Waits = "host" if phase.by_host else "overhead"
        waits = phase.bound if of_least >= NEAR else around
    return Part("decode", seconds, waits, share(measured, metrics.ceiling_tps), share(measured, metrics.expected_tps))


def _by_memory_alone(of_least: float | None, chip: Chip) -> Waits | None:
    """Return what a phase waited for, by the bandwidth alone; None where that is unknown too."""
    if of_least is None or chip.bandwidth_gbs is None:
        return None
    return "memory" if of_least >= NEAR else "not memory"

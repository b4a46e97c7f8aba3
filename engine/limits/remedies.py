"""What would have made a reply faster, and by how many seconds: each change is predicted as the reply itself was.

    saved = (predicted without the change − predicted with it) × min(1, measured ÷ predicted without it)

So what is wrong in both predictions cancels, a reply that was quicker than predicted is promised no more than its share, and
nothing is promised that the machine's bandwidth or arithmetic forbids. Where the pace is unknown nothing is promised at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.metrics import Metrics, rate
from tokamac.engine.limits.prediction import Pace, Phase, decode_phase, prefill_phase
from tokamac.engine.limits.situation import KV_BITS, Foretold, Situation
from tokamac.engine.limits.work import Work

RemedyName = Literal[
    "packed keys and values",
    "packed weights",
    "prompt cache",
    "shorter context",
    "quiet machine",
    "full power",
    "cool chip",
]

MOST = 3
WORTH_S = 0.1
"""Seconds below which a change is not worth a sentence."""
WORTH_SHARE = 0.03
"""Share of the reply below which it is not either."""

WEIGHT_BITS, WEIGHT_GROUP = 4, 64
PACKED_BITS = WEIGHT_BITS + 32 / WEIGHT_GROUP
"""Bits a weight of ``tokamac convert``'s default: a scale and a bias of 16 bits in each group."""

LONG = 512
"""Prompt tokens below which nobody would shorten it."""

BEHIND = 0.8
"""Share of the expected speed below which something holds the machine up; the errors of what is expected are smaller
(assets/roofline.json)."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change. gain_s: predicted seconds less for a reply alike. ``to``: bits, or tokens of prompt, where that says something.

    before_tps, after_tps: the decode rate measured, and the one predicted with the change; None where decoding stays as it is.
    before_s, after_s: the seconds of prefill, likewise. gain_s is the difference of these, and of the steps at those rates.
    """

    name: RemedyName
    gain_s: float
    to: int | None = None
    before_tps: float | None = None
    after_tps: float | None = None
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Machinery:
    """What a reply is predicted from: a model's work, the chip that does it, and how fast that really is."""

    work: Work
    chip: Chip
    pace: Pace

    def step(self, context: int) -> Phase:
        """Predict a decode step."""
        return decode_phase(self.work, self.chip, self.pace, context)

    def reading(self, tokens: int, cached: int, chunk: int) -> Phase:
        """Predict the reading of ``tokens``, one at least, after ``cached``."""
        return prefill_phase(self.work, self.chip, self.pace, max(tokens, 1), cached, chunk=chunk)


def remedies(metrics: Metrics, foretold: Foretold, machinery: Machinery, situation: Situation) -> tuple[Remedy, ...]:
    """Return up to three changes worth their sentence, best first."""
    if metrics.total_s is None:
        return ()
    least = max(WORTH_S, WORTH_SHARE * metrics.total_s)
    found = _Weighing(metrics, foretold, machinery, situation).all()
    worth = [remedy for remedy in found if remedy.gain_s >= least]
    return tuple(sorted(worth, key=lambda remedy: -remedy.gain_s)[:MOST])


@dataclass(frozen=True, slots=True)
class _Weighing:
    """A reply, how it was predicted, and what predicts it with a change."""

    metrics: Metrics
    foretold: Foretold
    machinery: Machinery
    situation: Situation

    def all(self) -> Iterator[Remedy]:
        """Yield every change there is, worth it or not."""
        work, bits = self.machinery.work, self.situation.bits_per_weight
        if self.situation.packed_kv is not None:
            yield self._lighter("packed keys and values", KV_BITS, replace(work, kv=self.situation.packed_kv))
        if bits is not None and bits > PACKED_BITS:
            yield self._lighter("packed weights", WEIGHT_BITS, _with_weights(work, PACKED_BITS / bits))
        if self.metrics.prompt_tokens >= LONG:
            yield self._shorter()
        if not self.situation.keeps_prompts and self.metrics.prompt_tokens > 1:
            yield self._kept()
        yield self._quiet()

    @property
    def _steps(self) -> int:
        return max(self.metrics.generated_tokens - 1, 0)

    def _lighter(self, name: RemedyName, to: int, work: Work) -> Remedy:
        """Steps that read less."""
        return self._with_step(name, to, replace(self.machinery, work=work).step(self.foretold.context))

    def _shorter(self) -> Remedy:
        """Half the prompt, as much of it cached in proportion."""
        m, half = self.metrics, self.metrics.prompt_tokens // 2
        prompt = self.machinery.reading(m.prefill_tokens // 2, m.cached_tokens // 2, self.foretold.chunk)
        sooner_s = _saved_s(m.prefill_s, self.foretold.prefill, prompt)
        return self._with_step("shorter context", half, self.machinery.step(self.foretold.context - half), sooner_s)

    def _kept(self) -> Remedy:
        """The next time, or in the next turn, all but the last token of this prompt would be there already."""
        last = self.machinery.reading(1, self.metrics.prompt_tokens - 1, self.foretold.chunk)
        return self._with_both("prompt cache", None, _saved_s(self.metrics.prefill_s, self.foretold.prefill, last), 0.0)

    def _quiet(self) -> Remedy:
        """What both phases lost to whatever else held the machine up, where that was much; by the name of a cause that is known."""
        reading_s = _behind_s(self.metrics.prefill_s, self.foretold.prefill)
        step_s = _behind_s(_step_s(self.metrics), self.foretold.decode)
        throttles = self.situation.throttles
        name: RemedyName = "quiet machine"
        if throttles:
            name = "full power" if "low power" in throttles else "cool chip"
        return self._with_both(name, None, reading_s, step_s)

    def _with_step(self, name: RemedyName, to: int, after: Phase, sooner_s: float = 0.0) -> Remedy:
        """Return a change after which a step is ``after``, and the first token comes ``sooner_s``."""
        return self._with_both(name, to, sooner_s, _saved_s(_step_s(self.metrics), self.foretold.decode, after))

    def _with_both(self, name: RemedyName, to: int | None, sooner_s: float, saved_s: float) -> Remedy:
        """Return a change after which the first token comes ``sooner_s``, and each step takes ``saved_s`` less."""
        step_s, prefill_s = _step_s(self.metrics), self.metrics.prefill_s
        changed = Remedy(name, sooner_s + self._steps * saved_s, to)
        if saved_s and step_s is not None:
            changed = replace(changed, before_tps=self.metrics.decode_tps, after_tps=rate(1, step_s - saved_s))
        if sooner_s and prefill_s is not None:
            changed = replace(changed, before_s=prefill_s, after_s=prefill_s - sooner_s)
        return changed


def _step_s(metrics: Metrics) -> float | None:
    return None if metrics.decode_tps is None else 1 / metrics.decode_tps


def _saved_s(measured_s: float | None, before: Phase, after: Phase) -> float:
    """Return the seconds that a change saves of what was measured; 0 where that is unknown."""
    if measured_s is None or not before.expected_s or after.expected_s is None:
        return 0.0
    saved = (before.expected_s - after.expected_s) * min(1.0, measured_s / before.expected_s)
    return max(min(saved, measured_s - (after.ceiling_s or 0.0)), 0.0)


def _behind_s(measured_s: float | None, phase: Phase) -> float:
    """Return the seconds beyond what is expected, where they are too many to be an error of that; else 0.

    Of the host only the least is known: what it takes beyond that, on a quiet machine too, is not.
    """
    expected_s = None if phase.by_host else phase.expected_s
    if measured_s is None or expected_s is None or expected_s >= BEHIND * measured_s:
        return 0.0
    return measured_s - expected_s


def _with_weights(work: Work, share: float) -> Work:
    return replace(work, shared_bytes=round(work.shared_bytes * share), expert_bytes=round(work.expert_bytes * share))

"""Whether a draft pays: what passes over several rows take, acceptance rates, and the account of a reply."""

import functools
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from ..perf.hardware import Chip, generation_of
from ..perf.roofline import LatencyModel, decode_phase

if TYPE_CHECKING:
    from ..device import DeviceKind
    from ..perf.roofline import Workload

# From assets/small_batches.json; a ledger begins with these and then measures.

# Decode is memory-bound, so rows should be nearly free; kernels for packed weights pay per row all the same,
# differently by generation and bits.


@dataclass(frozen=True, slots=True)
class DraftTuning:
    """Constants of speculation. ``tests/bench/speculation.py`` measures what they lead to (BENCHMARKS.md, Speculation).

    A field whose value a measurement has set names it; of the others none is on record.
    """

    # The account of a reply, in plain steps.
    credit: float = 2.0  # lost at most at the beginning; 3 until 0.4 ms steps of the guide on a CPU, 2026-11-28
    cap: float = 6.0  # the balance at most: long matches must not fund losses on other text
    share: float = 0.01  # of the reply so far, lost at most as well
    worth: float = 1.03  # tokens for the time of a step from which on a round pays

    # Tokens of a draft.
    short: tuple[int, ...] = tuple(range(1, 8))  # to choose from, usually
    long: int = 31  # after a match of ``sure`` tokens: with the last token known, a tile of a matrix product
    half: int = 15  # half of that, where nothing is tiled
    sure: int = 16
    usually_read: int = 2  # tokens a draft model lacks after an accepted draft: its last, and one more

    # Acceptance rates, from 0 to 1: what is kept of the counts with each outcome, and rates before any.
    forgets: float = 1 - 1 / 14
    long_forgets: float = 1 - 1 / 150  # of long matches, of which a draft brings many
    untried: float = 1 - 1 / 56  # with an outcome of another kind
    priors: tuple[float, ...] = (0.45, 0.55, 0.6, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97)  # by bucket of the match
    computed: Mapping[str, float] = field(default_factory=lambda: {"draft": 0.7, "mtp": 0.7, "medusa": 0.6})
    prior_weight: float = 1.0  # outcomes that a prior counts for

    # Costs of passes and drafts, in plain steps unless said otherwise.
    plain_samples: int = 8  # plain steps of which the median counts once
    keeps: float = 0.7  # of the believed cost of a plain step, after another measurement
    pass_samples: int = 4  # remembered passes of a width; the prediction counts as one more
    outlier: float = 3.0  # a pass counts as at most this multiple of its prediction
    forgets_after: int = 128  # plain steps without a wider pass, after which the oldest of each width is forgotten
    least_rise: float = (
        0.05  # predicted for more rows, below which no timing tells: found with a host-bound draft model
    )
    pass_overhead: float = 0.5  # of a pass beside its rows; from five rows on a CPU's kernels, 2026-11-28
    context_step: int = 512  # tokens; costs are kept by its powers of two
    least_step: float = 0.05  # of a draft model's step until measured, however few its bytes


TUNING = DraftTuning()


UNNAMED = 3  # the generation whose timings are taken of a GPU that is of none
UNPACKED_BITS = 16


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Timings of one kind of weights on one kind of chip.

    generations: of Apple's chips, ascending; empty for others. bits: from, to. rows: (rows of a pass, steps).
    """

    device: str
    generations: tuple[int, ...]
    bits: tuple[int, int]
    timed_on: str
    rows: tuple[tuple[int, float], ...]
    source: str

    @property
    def most(self) -> int:
        return self.rows[-1][0]

    def distance(self, generation: int) -> int:
        return min((abs(each - generation) for each in self.generations), default=generation)

    def steps(self, rows: int) -> float:
        return interpolated(self.rows, rows)


@functools.cache
def timings() -> tuple[RowCosts, ...]:
    text = resources.files("tokamac.assets").joinpath("small_batches.json").read_text(encoding="utf-8")
    return tuple(
        RowCosts(
            device=row["device"],
            generations=tuple(row["generations"]),
            bits=(row["bits"][0], row["bits"][1]),
            timed_on=row["timed_on"],
            rows=tuple((rows, steps) for rows, steps in row["rows"]),
            source=row["source"],
        )
        for row in json.loads(text)
    )


def row_costs(device: "DeviceKind", chip: Chip, work: "Workload") -> RowCosts:
    bits, kind = weight_bits(work), "cpu" if device == "cpu" else "metal"
    generation = generation_of(chip.name) or UNNAMED
    fitting = (each for each in timings() if each.device == kind and each.bits[0] <= bits <= each.bits[1])
    return min(fitting, key=lambda each: (each.distance(generation), len(each.generations), each.generations))


def weight_bits(work: "Workload") -> int:
    counted: Counter[int] = Counter()
    for product in work.products:
        counted[product.bits or UNPACKED_BITS] += product.parameters
    return counted.most_common(1)[0][0] if counted else UNPACKED_BITS


def pass_steps(
    work: "Workload", latency: LatencyModel | None, chip: Chip, context: int, rows: int, *, device: "DeviceKind"
) -> float:
    """Return the plain steps of a pass over ``rows``: the larger of timing and roofline."""
    costs = row_costs(device, chip, work)
    alone, several = (decode_phase(work, chip, latency, context, each).expected_s for each in (1, rows))
    if alone and several:
        return max(costs.steps(rows), several / alone)
    return costs.steps(rows) * max(1.0, rows / costs.most)


def read_steps(
    work: "Workload", latency: LatencyModel | None, chip: Chip, *, device: "DeviceKind"
) -> Callable[[int], float]:
    return functools.cache(lambda rows: pass_steps(work, latency, chip, 1, rows, device=device))


def draft_step(
    draft: tuple["Workload", LatencyModel | None],
    model: tuple["Workload", LatencyModel | None],
    chip: Chip,
    context: int,
) -> float:
    own, other = (decode_phase(work, chip, latency, context).expected_s for work, latency in (draft, model))
    if own and other:
        return own / other
    read, wanted = draft[0].step_bytes(context), model[0].step_bytes(context)
    return max(TUNING.least_step, read / wanted) if read and wanted else 1.0


def interpolated(table: Sequence[tuple[int, float]], rows: int) -> float:
    above = next((index for index, (at, _) in enumerate(table) if at >= rows), len(table) - 1)
    if above == 0:
        return table[0][1]
    (low, before), (high, after) = table[above - 1], table[above]
    return before + (after - before) * min(1.0, (rows - low) / (high - low))


# A round that commits n tokens in the time of c plain steps adds n − c to the balance, which starts with a
# credit and is capped: drafts cost at most 1 % of a reply plus the credit, on any text.
# Drafts are also compared with plain steps' tokens, so that learning when to begin costs nothing.


_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, *[6] * 4, *[7] * 4, *[8] * 16)
_LAST = 9
_FIRST_OF = [*(_BUCKETS.index(bucket) for bucket in range(_LAST)), len(_BUCKETS)]


def bucket_of(match: int) -> int:
    return _BUCKETS[match] if match < len(_BUCKETS) else _LAST


class Acceptance:
    """Acceptance rates of draft tokens, which decay when not tried."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[float, float, int]] = {}  # true ones, all, and when the last was
        self._outcomes = 0

    def observe(self, source: str, match: int, *, true: bool) -> None:
        key = source, bucket_of(match)
        hits, count = self._faded(*key)
        fade = TUNING.long_forgets if match >= TUNING.sure else TUNING.forgets
        self._outcomes += 1
        self._counts[key] = hits * fade + true, count * fade + 1, self._outcomes

    def rate(self, source: str, match: int) -> float:
        bucket = bucket_of(match)
        prior = TUNING.priors[bucket] if source not in TUNING.computed else self._before(source, bucket)
        hits, count = self._faded(source, bucket)
        return (hits + TUNING.prior_weight * prior) / (count + TUNING.prior_weight)

    def passed(self) -> None:
        self._outcomes += 1

    def _before(self, source: str, bucket: int) -> float:
        return self.rate(source, _FIRST_OF[bucket - 1]) if bucket else TUNING.computed[source]

    def _faded(self, source: str, bucket: int) -> tuple[float, float]:
        hits, count, at = self._counts.get((source, bucket), (0.0, 0.0, 0))
        fade: float = TUNING.untried ** (self._outcomes - at)
        return hits * fade, count * fade


@dataclass(slots=True)
class _AtContext:
    plain_s: float | None = None
    samples: list[float] = field(default_factory=list)
    passes: dict[int, deque[float]] = field(default_factory=dict)


class PassCosts:
    """The cost of passes over several rows in plain steps: predicted, then measured. Shared by replies.

    prior: (rows, cached tokens) → plain steps. changes: counts updates.
    """

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._measured: dict[int, _AtContext] = {}
        self._steps: dict[tuple[int, int], float] = {}  # what ``steps`` found since the last change
        self._priors: dict[tuple[int, int], float] = {}  # by rows and bucket: they take a while to reckon
        self._since_pass = 0
        self.changes = 0

    def observe_plain(self, context: int, seconds: float) -> None:
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.samples.append(seconds)
        if len(at.samples) < (TUNING.plain_samples if at.plain_s is not None else TUNING.plain_samples // 2):
            return
        found = median(at.samples)
        self._since_pass += len(at.samples)
        at.samples.clear()
        at.plain_s = found if at.plain_s is None else TUNING.keeps * at.plain_s + (1 - TUNING.keeps) * found
        if self._since_pass >= TUNING.forgets_after:
            self._forget()

    def measured_again(self, context: int, seconds: float) -> None:
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.plain_s = seconds
        at.samples.clear()

    def observe_pass(self, rows: int, context: int, steps: float) -> None:
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.passes.setdefault(rows, deque(maxlen=TUNING.pass_samples)).append(steps)
        self._since_pass = 0
        self._changed()

    def plain_s(self, context: int) -> float | None:
        bucket = _bucket(context)
        if (at := self._measured.get(bucket)) is not None and at.plain_s is not None:
            return at.plain_s
        known = [(abs(each - bucket), at.plain_s) for each, at in self._measured.items() if at.plain_s is not None]
        return min(known, default=(0, None))[1]

    def steps(self, rows: int, context: int) -> float:
        key = rows, _bucket(context)
        if (known := self._steps.get(key)) is None:
            known = self._steps[key] = self._reckoned(rows, context)
        return known

    def _reckoned(self, rows: int, context: int) -> float:
        predicted, bucket = self._predicted(rows, context), _bucket(context)
        alike = {
            each: [width for width in at.passes if (width == 1) == (rows == 1)] for each, at in self._measured.items()
        }
        near = min((each for each, known in alike.items() if known), key=lambda at: abs(at - bucket), default=-1)
        if near < 0:
            return predicted
        passes = self._measured[near].passes
        width = min(alike[near], key=lambda other: abs(other - rows) / max(other, rows))
        expected = self._predicted(width, context)
        measured = fmean([*passes[width], expected])
        if width == rows:
            return max(1.0, measured)
        rise, off = expected - 1, 1.0
        if rise >= TUNING.least_rise:
            off = (measured - 1 + TUNING.pass_overhead) / (
                rise + TUNING.pass_overhead
            )  # how far all are under- or overrated
        # What a pass takes beside its rows, one of fewer may take, too.
        beside = measured + (predicted - expected) if rows < width else 1.0
        return max(1.0, beside, 1 + (predicted - 1) * off)

    def _predicted(self, rows: int, context: int) -> float:
        key = rows, _bucket(context)
        if (known := self._priors.get(key)) is None:
            known = self._priors[key] = max(1.0, self._prior(rows, context))
        return known

    def _forget(self) -> None:
        self._since_pass = 0
        self._priors.clear()  # what is known of the machine may be more by now
        for at in self._measured.values():
            for passes in at.passes.values():
                passes.popleft()
            at.passes = {rows: passes for rows, passes in at.passes.items() if passes}
        self._changed()

    def _changed(self) -> None:
        self._steps.clear()
        self.changes += 1


class DraftingCosts:
    """A model's drafting cost in the verifier's plain steps: predicted, then measured."""

    def __init__(self, rows: Callable[[int], float]) -> None:
        self._rows = rows
        self.step = 1.0
        self._drafts: deque[float] = deque(maxlen=TUNING.pass_samples)  # a step of the draft model, as drafts took
        self._reads: deque[float] = deque(maxlen=TUNING.pass_samples)  # the same as long reading took
        self._rested = 0

    def drafting(self, width: int) -> float:
        return self._steps(TUNING.usually_read, width) * self._found(self._drafts)

    def reading(self, tokens: int) -> float:
        if tokens <= TUNING.usually_read:
            return 0.0
        return max(0.0, self._rows(tokens) - self._rows(TUNING.usually_read)) * self._found(self._reads)

    def observe(self, read: int, width: int, steps: float) -> None:
        beyond = self._rows(read) - self._rows(TUNING.usually_read)
        if read <= TUNING.short[-1] + 1 or beyond < TUNING.least_rise:
            self._drafts.append(steps / self._steps(read, width))
        else:
            self._reads.append(max(0.0, steps - self.drafting(width)) / beyond)
        self._rested = 0

    def rested(self) -> None:
        self._rested += 1
        if self._rested >= TUNING.forgets_after:
            self._rested = 0
            for each in (self._drafts, self._reads):
                if each:
                    each.popleft()

    def _steps(self, read: int, width: int) -> float:
        return self._rows(read) + width - 1

    def _found(self, measured: Sequence[float]) -> float:
        return fmean([*measured, self.step])


def _bucket(context: int) -> int:
    return (context // TUNING.context_step).bit_length()


class DraftPlan(NamedTuple):
    width: int
    worth: float


class DraftLedger:
    """The account of one reply. balance: plain steps. tokens: committed so far."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.balance = TUNING.credit
        self.tokens = 0
        self._least: dict[int, float] = {}  # by context: the likelihood below which no width is worth it
        self._least_at = -1

    @property
    def spare(self) -> float:
        return self.balance + TUNING.share * self.tokens

    def choose(
        self,
        source: str,
        match: int,
        drafted: int,
        context: int,
        *,
        drafting: Callable[[int], float] = lambda _: 0.0,
        reading: float = 0.0,
    ) -> DraftPlan:
        """Return how many of ``drafted`` tokens to verify; none where a plain step is as good."""
        best, most = 0, TUNING.worth
        if drafted < 1 or not self.may_pay(source, match, context):
            return DraftPlan(0, 0.0)
        spare = self.spare
        likely, committed, width = 1.0, 1.0, 0
        for wanted in _widths(match, drafted):
            while width < wanted:
                likely *= self.acceptance.rate(source, match + width)
                committed += likely
                width += 1
            cost = self.costs.steps(wanted + 1, context) + drafting(wanted)
            if cost + reading - 1 <= spare and committed > most * cost:
                best, most = wanted, committed / cost
        return DraftPlan(best, most if best else 0.0)

    def may_pay(self, source: str, match: int, context: int) -> bool:
        return self.acceptance.rate(source, match) >= self._least_likely(context)

    def spent(self, committed: int, steps: float) -> None:
        self.tokens += committed
        self.balance = min(TUNING.cap, self.balance + committed - steps)

    def stepped(self, steps: int = 1) -> None:
        self.tokens += steps

    def _least_likely(self, context: int) -> float:
        if self._least_at != self.costs.changes:
            self._least.clear()
            self._least_at = self.costs.changes
        bucket = _bucket(context)
        if bucket not in self._least:
            self._least[bucket] = min(
                (TUNING.worth * self.costs.steps(width + 1, context) - 1) / width
                for width in (*TUNING.short, TUNING.long)
            )
        return self._least[bucket]


def _widths(match: int, drafted: int) -> Sequence[int]:
    if match >= TUNING.sure and drafted > TUNING.short[-1]:
        return (*TUNING.short, *((TUNING.half,) if drafted > TUNING.half else ()), min(drafted, TUNING.long))
    return TUNING.short[:drafted]

"""Whether a draft pays, and how long it may be: arithmetic on outcomes and measured seconds, with neither MLX nor a clock inside.

A reply's account is in plain steps. A round that commits n tokens and takes as long as c steps adds n − c. It begins with a credit,
and is never larger than a cap, so what long matches have gained is not lost to a text without any:

    allowed      balance + 1 % of the reply so far ≥ c − 1           what a round loses where nothing is accepted
    therefore    time lost to drafts ≤ 1 % of a reply + the credit   on any text, as far as a pass takes what others did before

Of the widths that are allowed, the one with the most tokens for its time is taken, where that is worth it. How likely a token is
to come true is counted by who guessed it and after how long a match, and forgotten within some 14 outcomes. A guess is also
compared with what plain steps bring, so that it costs nothing to learn when to begin.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

CREDIT = 2.0
"""Plain steps that a reply may lose at once."""
CAP = 6.0
"""Plain steps that the balance reaches at most."""
SHARE = 0.01
"""Of the reply so far, which may be lost as well."""
WORTH = 1.03
"""Tokens for the time of a step from which on a round is worth it."""

SHORT = tuple(range(1, 8))
"""Tokens of a draft, usually."""
LONG = 31
"""The same after a match of ``SURE`` tokens: with the last token known, it fills a tile of a matrix product."""
HALF = 15
"""Half of that, where nothing is tiled."""
SURE = 16

FORGETS, LONG_FORGETS = 1 - 1 / 14, 1 - 1 / 150
"""What an outcome counts once the next comes; of long matches, of which a draft brings many at once."""
UNTRIED = 1 - 1 / 56
"""The same once one comes of another kind."""
_PRIORS = (0.45, 0.55, 0.6, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97)
"""How likely a token is to come true before it is known, by bucket of its match."""
COMPUTED = {"draft": 0.7, "mtp": 0.7, "medusa": 0.6}
"""The same of drafts that are computed: of the first token, by source. Of each after it, as likely as the one before is found."""
_PRIOR_WEIGHT = 1.0
_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, *[6] * 4, *[7] * 4, *[8] * 16)
_LAST = 9
_FIRST_OF = [*(_BUCKETS.index(bucket) for bucket in range(_LAST)), len(_BUCKETS)]


def bucket_of(match: int) -> int:
    """Return which matches count as alike."""
    return _BUCKETS[match] if match < len(_BUCKETS) else _LAST


class Acceptance:
    """How often drafted tokens come true. What is not tried any more is forgotten, too."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[float, float, int]] = {}  # true ones, all, and when the last was
        self._outcomes = 0

    def saw(self, source: str, match: int, *, true: bool) -> None:
        """Take an outcome."""
        key = source, bucket_of(match)
        hits, count = self._faded(*key)
        fade = LONG_FORGETS if match >= SURE else FORGETS
        self._outcomes += 1
        self._counts[key] = hits * fade + true, count * fade + 1, self._outcomes

    def of(self, source: str, match: int) -> float:
        """Return how likely the next token of a draft is."""
        bucket = bucket_of(match)
        prior = _PRIORS[bucket] if source not in COMPUTED else self._before(source, bucket)
        hits, count = self._faded(source, bucket)
        return (hits + _PRIOR_WEIGHT * prior) / (count + _PRIOR_WEIGHT)

    def passed(self) -> None:
        """Take it that nothing was tried: what is known of drafts grows older."""
        self._outcomes += 1

    def _before(self, source: str, bucket: int) -> float:
        """Return how likely the token before is, in a computed draft."""
        return self.of(source, _FIRST_OF[bucket - 1]) if bucket else COMPUTED[source]

    def _faded(self, source: str, bucket: int) -> tuple[float, float]:
        hits, count, at = self._counts.get((source, bucket), (0.0, 0.0, 0))
        fade: float = UNTRIED ** (self._outcomes - at)
        return hits * fade, count * fade


PLAIN_SAMPLES = 8
"""Plain steps of which the median counts once."""
KEEPS = 0.7
"""Of what a plain step was taken to cost, in what is believed after another measurement."""
PASS_SAMPLES = 4
"""Passes that are remembered of a width; beside them, what was expected counts as one."""
OUTLIER = 3.0
"""A pass counts as so many times what was expected at most: the machine did something else, too."""
FORGETS_AFTER = 128
"""Plain steps without any pass over several rows, after which the oldest of each width is forgotten: machines get quiet again."""
LEAST_RISE = 0.05
"""Steps that more rows must be expected to add, or no timing says how much they do: it would be lost in noise."""
BESIDE = 0.5
"""Steps that any pass may take beside what its rows add: what a few rows took tells the less of many, the less they should add."""
CONTEXT_STEP = 512
USUALLY_READ = 2
"""Tokens that a draft model has not read yet, after a draft that came true as far as it went: its last, and one more."""


@dataclass(slots=True)
class _AtContext:
    """What was measured in one bucket of contexts. plain_s: seconds; passes: by rows, in plain steps."""

    plain_s: float | None = None
    samples: list[float] = field(default_factory=list)
    passes: dict[int, deque[float]] = field(default_factory=dict)


class PassCosts:
    """What a pass over several rows takes, in plain steps: as predicted, until it is measured. Shared by the replies of a model.

    Args:
        prior: rows, tokens in the caches → plain steps that such a pass should take.

    Attributes:
        changes: How often what is believed has changed.
    """

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._measured: dict[int, _AtContext] = {}
        self._steps: dict[tuple[int, int], float] = {}  # what ``steps`` found since the last change
        self._priors: dict[tuple[int, int], float] = {}  # by rows and bucket: they take a while to reckon
        self._since_pass = 0
        self.changes = 0

    def saw_plain(self, context: int, seconds: float) -> None:
        """Take the time of a plain step, from token to token."""
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.samples.append(seconds)
        if len(at.samples) < (PLAIN_SAMPLES if at.plain_s is not None else PLAIN_SAMPLES // 2):
            return
        found = median(at.samples)
        self._since_pass += len(at.samples)
        at.samples.clear()
        at.plain_s = found if at.plain_s is None else KEEPS * at.plain_s + (1 - KEEPS) * found
        if self._since_pass >= FORGETS_AFTER:
            self._forget()

    def measured_again(self, context: int, seconds: float) -> None:
        """Believe this of a plain step, whatever was measured before: passes took other times than they should."""
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.plain_s = seconds
        at.samples.clear()

    def saw_pass(self, rows: int, context: int, steps: float) -> None:
        """Take the time of a pass over so many rows, from the token before it to its last, in plain steps.

        One row: of a step that was not launched ahead.
        """
        at = self._measured.setdefault(_bucket(context), _AtContext())
        at.passes.setdefault(rows, deque(maxlen=PASS_SAMPLES)).append(steps)
        self._since_pass = 0
        self._changed()

    def plain_s(self, context: int) -> float | None:
        """Return the seconds of a plain step; None before one was measured."""
        bucket = _bucket(context)
        if (at := self._measured.get(bucket)) is not None and at.plain_s is not None:
            return at.plain_s
        known = [(abs(each - bucket), at.plain_s) for each, at in self._measured.items() if at.plain_s is not None]
        return min(known, default=(0, None))[1]

    def steps(self, rows: int, context: int) -> float:
        """Return how many plain steps a pass over ``rows`` takes: as it, or the nearest number of rows, was measured."""
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
        if rise >= LEAST_RISE:
            off = (measured - 1 + BESIDE) / (rise + BESIDE)  # how far all are under- or overrated
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
    """What a model takes to draft, in plain steps of the one that verifies: as predicted, until it is measured.

    Args:
        rows: rows of a pass → plain steps of the draft model.

    Attributes:
        step: what a step of the draft model should take.
    """

    def __init__(self, rows: Callable[[int], float]) -> None:
        self._rows = rows
        self.step = 1.0
        self._drafts: deque[float] = deque(maxlen=PASS_SAMPLES)  # a step of the draft model, as drafts took
        self._reads: deque[float] = deque(maxlen=PASS_SAMPLES)  # the same as long reading took
        self._rested = 0

    def drafting(self, width: int) -> float:
        """Return what a draft of so many tokens takes that goes on from the last."""
        return self._steps(USUALLY_READ, width) * self._found(self._drafts)

    def reading(self, tokens: int) -> float:
        """Return how much longer it takes where so many tokens have to be read first."""
        if tokens <= USUALLY_READ:
            return 0.0
        return max(0.0, self._rows(tokens) - self._rows(USUALLY_READ)) * self._found(self._reads)

    def saw(self, read: int, width: int, steps: float) -> None:
        """Take what a draft of ``width`` tokens took, before which so many were read."""
        beyond = self._rows(read) - self._rows(USUALLY_READ)
        if read <= SHORT[-1] + 1 or beyond < LEAST_RISE:
            self._drafts.append(steps / self._steps(read, width))
        else:
            self._reads.append(max(0.0, steps - self.drafting(width)) / beyond)
        self._rested = 0

    def rested(self) -> None:
        """Take a plain step: what was measured long ago is forgotten, for machines get quiet again."""
        self._rested += 1
        if self._rested >= FORGETS_AFTER:
            self._rested = 0
            for each in (self._drafts, self._reads):
                if each:
                    each.popleft()

    def _steps(self, read: int, width: int) -> float:
        """Return the steps of the draft model that a draft takes."""
        return self._rows(read) + width - 1

    def _found(self, measured: Sequence[float]) -> float:
        return fmean([*measured, self.step])


def _bucket(context: int) -> int:
    return (context // CONTEXT_STEP).bit_length()


class DraftPlan(NamedTuple):
    """Tokens to verify, 0 for a plain step, and the tokens to expect for the time of a step."""

    width: int
    worth: float


class DraftLedger:
    """The account of one reply.

    Args:
        costs: What passes take.

    Attributes:
        balance: plain steps. tokens: committed so far.
    """

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.balance = CREDIT
        self.tokens = 0
        self._least: dict[int, float] = {}  # by context: the likelihood below which no width is worth it
        self._least_at = -1

    @property
    def spare(self) -> float:
        """Plain steps that the next round may lose."""
        return self.balance + SHARE * self.tokens

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
        """Return how many of ``drafted`` tokens to verify after a match: none where a plain step is as good, or all is lost.

        drafting: what it takes to draft so many tokens, in plain steps; reading: what it takes once, beside.
        """
        best, most = 0, WORTH
        if drafted < 1 or not self.may_pay(source, match, context):
            return DraftPlan(0, 0.0)
        spare = self.spare
        likely, committed, width = 1.0, 1.0, 0
        for wanted in _widths(match, drafted):
            while width < wanted:
                likely *= self.acceptance.of(source, match + width)
                committed += likely
                width += 1
            cost = self.costs.steps(wanted + 1, context) + drafting(wanted)
            if cost + reading - 1 <= spare and committed > most * cost:
                best, most = wanted, committed / cost
        return DraftPlan(best, most if best else 0.0)

    def may_pay(self, source: str, match: int, context: int) -> bool:
        """Whether any draft after a match could be worth verifying: what is found at once."""
        return self.acceptance.of(source, match) >= self._least_likely(context)

    def spent(self, committed: int, steps: float) -> None:
        """Enter a round: tokens that it committed, and the time it took."""
        self.tokens += committed
        self.balance = min(CAP, self.balance + committed - steps)

    def stepped(self, steps: int = 1) -> None:
        """Enter plain steps."""
        self.tokens += steps

    def _least_likely(self, context: int) -> float:
        """Return a likelihood of the first token below which no draft is worth it: each token after it is at most certain."""
        if self._least_at != self.costs.changes:
            self._least.clear()
            self._least_at = self.costs.changes
        bucket = _bucket(context)
        if bucket not in self._least:
            self._least[bucket] = min(
                (WORTH * self.costs.steps(width + 1, context) - 1) / width for width in (*SHORT, LONG)
            )
        return self._least[bucket]


def _widths(match: int, drafted: int) -> Sequence[int]:
    """Return the lengths of drafts to choose from."""
    if match >= SURE and drafted > SHORT[-1]:
        return (*SHORT, *((HALF,) if drafted > HALF else ()), min(drafted, LONG))
    return SHORT[:drafted]

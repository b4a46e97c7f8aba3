"""Every rate the product shows is computed here, from time stamps, and nowhere else.

The words are defined as follows (seconds from one monotonic clock; token stamps are taken where the token reaches the host):

    TTFT          accepted → first token
    prefill rate  prompt tokens actually computed ÷ seconds spent computing them; cached tokens never count
    ITL           each gap between consecutive tokens
    decode rate   (n − 1) ÷ (t_last − t_first); undefined below two tokens
    total         accepted → last token

What is not known is None, never 0 and never infinity.

A gap is an **outlier** if it is more than twice the median gap and at least 1 ms longer. Twice: a step costs much the same as the
one before, so one that takes two steps' time was held up, and a reader sees it. 1 ms: below that, timers and scheduling double
the steps of a small model all the time, and nobody sees it. A cause is named only where it was recorded in that gap and may have
taken the larger part of the excess over the median; all other outliers have none.
"""

import bisect
import heapq
import itertools
import math
import resource
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]

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
class DraftCount:
    """Tokens that one drafter guessed, and those of them that were right. source: lookup, branches, draft, mtp or medusa."""

    source: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """What one reply cost. Times in seconds, rates in tokens a second, sizes in bytes; None is unknown.

    kv_bytes_per_step: of all replies that a step made a token of. queue_s: accepted → its turn began. batch_width: replies that
    were decoded together, in the mean of its steps. drafted_tokens, accepted_tokens: guessed ahead, and verified as right; saved_s:
    what plain steps would have taken longer, below 0 where time was lost; drafts: the tokens by source; None where nothing was
    drafted. undrafted: why nothing, or little, was; None where it was, or is off.
    """

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
    queue_s: float | None = None
    batch_width: float | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    saved_s: float | None = None
    undrafted: str | None = None
    drafts: tuple[DraftCount, ...] | None = None

    @property
    def steps_tps(self) -> float | None:
        """Passes a second, of which each read the weights once: the decode rate, unless guesses came true."""
        accepted = self.accepted_tokens or 0
        return self.decode_tps and self.decode_tps * (1 - accepted / self.generated_tokens)

    @property
    def replies_at_once(self) -> int:
        """``batch_width`` as a whole number; 1 where it is unknown."""
        return whole_width(self.batch_width)


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculation did for one reply so far.

    drafts: tokens by source. saved_s: seconds less than plain steps would have taken, below 0 where it lost; None where
    nothing was drafted. rests: why nothing, or little, is drafted; "" where it is.
    """

    drafts: tuple[DraftCount, ...] = ()
    saved_s: float | None = None
    rests: str = ""

    @property
    def drafted(self) -> int:
        """Tokens that were guessed."""
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted(self) -> int:
        """Those of them that were right."""
        return sum(each.accepted for each in self.drafts)


def whole_width(mean: float | None) -> int:
    """Return how many replies were decoded together, of the mean over the steps; 1 where it is unknown."""
    return 1 if mean is None else max(1, round(mean))


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


def shared_rate(token_times: Sequence[Sequence[float]]) -> float | None:
    """Return the tokens a second of replies that are decoded together, over the time in which all of them are written.

    It is from the last reply's first token to the first end of a reply, and counts what comes after its beginning: for one reply
    the decode rate. token_times: of each reply, in seconds of one clock. None where they never are all written at once.
    """
    if not token_times or not all(token_times):
        return None
    begin, end = max(times[0] for times in token_times), min(times[-1] for times in token_times)
    counted = sum(bisect.bisect_right(times, end) - bisect.bisect_right(times, begin) for times in token_times)
    return rate(counted, end - begin)


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
    """Return the same of sorted gaps."""
    if not ordered:
        return None
    return Gaps(percentile(ordered, 0.50), percentile(ordered, 0.95), percentile(ordered, 0.99), ordered[-1])


def ceiling_tps(bandwidth_gbs: float | None, bytes_per_step: int | None) -> float | None:
    """Return bandwidth ÷ bytes read per decoded token: the hardware limit. GB are 10^9 bytes."""
    if bandwidth_gbs is None or not bytes_per_step:
        return None
    return bandwidth_gbs * 1e9 / bytes_per_step


def bytes_per_step(metrics: Metrics) -> int | None:
    """Return the bytes that a step in the middle of a reply read: weights, keys and values; None where it is unknown."""
    if metrics.weight_bytes_per_token is None:
        return None
    return metrics.weight_bytes_per_token + (metrics.kv_bytes_per_step or 0)


def achieved_gbs(bytes_per_step: int | None, decode_tps: float | None) -> float | None:
    """Return the bandwidth that a decode rate amounts to, in GB/s."""
    if bytes_per_step is None or decode_tps is None:
        return None
    return bytes_per_step * decode_tps / 1e9


Throttle = Literal["thermal", "low power"]
"""What the system slows the chip down for."""

Cause = Literal[
    "kv growth", "pool cleared", "swap", "slow reader", "processor taken", "thermal", "low power", "another prompt"
]
"""kv growth: a cache's arrays were full, and copied to larger ones.
pool cleared: MLX's unused buffers went back to the system, so the next step had to ask for memory again.
swap: pages of this process had to be read from disk (major page faults).
slow reader: the engine waited for the screen or program reading the reply.
processor taken: where the model computes on the CPU, this process stood still for that long.
thermal: the system said during this reply that it slows the chip down. A state: a cause of each of the reply's outliers.
low power: Low Power Mode was switched on during this reply. One that was on all along makes all gaps longer, and none stand out.
another prompt: a piece of another reply's prompt was computed in between.
"""

LAUNCHED: frozenset[Cause] = frozenset({"kv growth", "pool cleared"})
"""What the host does while it launches a step. With decode one step ahead, the device may pay for it only in the gap after."""

TIMES, LEAST_MS = 2.0, 1.0
"""An outlier is longer than this multiple of the median, and than the median by this much."""

MOST = 5
"""Outliers reported of a reply: the longest."""


@dataclass(frozen=True, slots=True)
class PromptBeside:
    """Another reply's prompt, of which a piece was computed. tokens: of all of it. background: it gives way, as a title does."""

    tokens: int
    background: bool = False


@dataclass(frozen=True, slots=True)
class Outlier:
    """A gap that stands out. token: the one that it came before, counted from 1; causes: empty where unknown.

    prompt: the one that "another prompt" among the causes is; of several, the one that took longest.
    """

    token: int
    gap_ms: float
    causes: tuple[Cause, ...] = ()
    prompt: PromptBeside | None = None


class Gap(NamedTuple):
    """The milliseconds before a token, which is counted from 1: so the first gap is token 2's."""

    ms: float
    token: int


class Mark(NamedTuple):
    """Something that happened before a token, after the one before it. most_ms: what it can have taken, at most.

    prompt: of "another prompt".
    """

    token: int
    cause: Cause
    most_ms: float = math.inf
    prompt: PromptBeside | None = None


def outliers(
    gaps: Sequence[Gap], median_ms: float, marks: Sequence[Mark], *, ahead: bool, throttled: Sequence[Throttle] = ()
) -> tuple[Outlier, ...]:
    """Return those of ``gaps`` that are outliers, longest first.

    marks: in the order of their tokens. ahead: steps are launched before the token before them is read.
    throttled: states that are a cause of each.
    """
    bound_ms = max(TIMES * median_ms, median_ms + LEAST_MS)
    found = sorted((gap for gap in gaps if gap.ms > bound_ms), key=lambda gap: (-gap.ms, gap.token))
    return tuple(_explained(gap, gap.ms - median_ms, marks, ahead=ahead, throttled=throttled) for gap in found)


def _explained(
    gap: Gap, excess_ms: float, marks: Sequence[Mark], *, ahead: bool, throttled: Sequence[Throttle]
) -> Outlier:
    first = bisect.bisect_left(marks, gap.token - 1, key=lambda mark: mark.token)
    near = itertools.takewhile(lambda mark: mark.token <= gap.token, itertools.islice(marks, first, None))
    found = [
        mark
        for mark in near
        if mark.most_ms >= excess_ms / 2 and (mark.token == gap.token or (ahead and mark.cause in LAUNCHED))
    ]
    causes: list[Cause] = [mark.cause for mark in found]
    longest = max((mark for mark in found if mark.prompt is not None), key=lambda mark: mark.most_ms, default=None)
    prompt = None if longest is None else longest.prompt
    return Outlier(gap.token, gap.ms, tuple(dict.fromkeys([*causes, *throttled])), prompt)


class GapLog:
    """The gaps of a running reply: their percentiles and the longest, at any time.

    Each gap is sorted in once, so reading after 100,000 tokens costs little more than what was added since. Any thread may read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 0
        self._ordered: list[float] = []
        self._longest: list[Gap] = []

    def read(self, token_times: list[float], several: Set[int] = frozenset()) -> tuple[Gaps | None, list[Gap]]:
        """Add what was appended to ``token_times`` (s), always the same list; return all gaps' percentiles, and the longest.

        several: tokens that came several in a pass, whose gaps are no steps: none of them is among the longest.
        """
        with self._lock:
            fresh = token_times[max(self._tokens - 1, 0) :]  # a copy: the engine's thread may be appending
            gaps = [Gap(ms, token) for token, ms in enumerate(gaps_ms(fresh), max(self._tokens, 1) + 1)]
            self._tokens = max(self._tokens - 1, 0) + len(fresh)
            steps = [gap for gap in gaps if gap.token not in several] if several else gaps
            self._longest = heapq.nlargest(MOST, itertools.chain(self._longest, steps))
            self._ordered.extend(gap.ms for gap in gaps)
            self._ordered.sort()  # a sorted run and a short tail: merged, not sorted again
            return percentiles(self._ordered), self._longest


FAULT_MS = 1.0
"""What a page read from a solid-state drive is taken to cost at most. A slower disk explains less here than it could."""

LEAST_IDLE_MS = 8.0
"""A shorter standstill is not reported: the system knows a thread's time to a tick of its clock, 4 ms at 250 Hz."""

LEAST_WAIT_MS = 0.5
"""A shorter wait for the reader explains no outlier: these are 1 ms longer than others."""

SHORT_S, SHORT_STEPS = 1e-3, 8
"""A shorter step was not held up for as long as makes an outlier; so many are not looked into."""

_own_usage = partial(resource.getrusage, resource.RUSAGE_SELF)


class ProcessWatch:
    """Tells ``mark`` what held the process up: call ``look`` as each token arrives, before it is stamped.

    computes: whether the model computes on the CPU, in this process's threads. These are never all idle in a step, so where they
    computed for less time than has passed, the difference was taken from them. Involuntary context switches are not counted:
    there were some in 698 of 699 steps, a hundred in a usual one (the guide, 2-core x86 CPU).

    To ask the system takes longer the more threads there are. So it is asked after a step that could have been held up, and after
    some others, lest what these idled comes to a standstill in sum.
    """

    def __init__(
        self,
        mark: Callable[[Cause, float], None],
        *,
        computes: bool,
        usage: Callable[[], resource.struct_rusage] = _own_usage,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._mark = mark
        self._computes = computes
        self._usage = usage
        self._clock = clock
        self._waited_s = self._waited_in_all_s = 0.0  # since the last token, and since the system was asked
        self._at_s = self._last_s = clock()
        self._short = 0  # steps since then
        before = usage()
        self._faults, self._computed_s = before.ru_majflt, before.ru_utime + before.ru_stime

    def look(self) -> None:
        """Note that a token has arrived."""
        at_s = self._clock()
        took_s, self._last_s = at_s - self._last_s, at_s
        waited_s, self._waited_s = self._waited_s, 0.0
        if waited_s * 1e3 >= LEAST_WAIT_MS:
            self._mark("slow reader", waited_s * 1e3)
        self._waited_in_all_s += waited_s
        self._short += 1
        if took_s >= SHORT_S or self._short == SHORT_STEPS:
            self._ask(at_s)

    def _ask(self, at_s: float) -> None:
        """Note what the system says of the time since it was asked before."""
        now = self._usage()
        faults, computed_s = now.ru_majflt - self._faults, now.ru_utime + now.ru_stime
        idle_ms = (at_s - self._at_s - self._waited_in_all_s - (computed_s - self._computed_s)) * 1e3
        self._at_s, self._faults, self._computed_s = at_s, now.ru_majflt, computed_s
        self._waited_in_all_s, self._short = 0.0, 0
        if faults:
            self._mark("swap", faults * FAULT_MS)
        elif self._computes and idle_ms >= LEAST_IDLE_MS:  # who waits for a disk is idle, too
            self._mark("processor taken", idle_ms)

    def handed(self, items: Iterator[T]) -> Iterator[T]:
        """Yield ``items``, and note how long their reader keeps the engine waiting."""
        for item in items:
            given_s = self._clock()
            yield item
            self._waited_s += self._clock() - given_s


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

    marks: what happened between its tokens, in order. ids: of its tokens. others_s: taken by others while the prompt was read.
    pieces: of the prompt, how many tokens each has, and when it was computed, less what others took until then. passes, rows:
    steps of which it had a row, and the rows of all of them. several: tokens, counted from 1, that came several in a pass, or
    after a wait for one.
    """

    clock: Clock = time.perf_counter
    accepted_s: float = 0.0
    began_s: float | None = None
    prefill_began_s: float | None = None
    others_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled: int = 0
    token_times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pieces: list[tuple[int, float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ended_s: float | None = None
    passes: int = 0
    rows: int = 0
    several: set[int] = field(default_factory=set)
    speculated: list[Callable[[], Speculated]] = field(default_factory=list)
    _gaps: GapLog = field(default_factory=GapLog)

    def accept(self) -> None:
        """Note that the request has arrived."""
        self.accepted_s = self.clock()

    def begin(self) -> None:
        """Note that the engine has turned to the request."""
        if self.began_s is None:
            self.began_s = self.clock()

    def launched(self, rows: int) -> None:
        """Note that a step was launched for so many replies, this one among them."""
        self.passes += 1
        self.rows += rows

    def begin_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note that the caches are ready, and the rest of the prompt is about to be computed."""
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.prefilled = 0
        self.others_s = 0.0
        self.pieces.clear()
        self.prefill_began_s = self.clock()

    def reading(self, events: Generator[T, None, None]) -> Generator[T, None, None]:
        """Yield what reading the prompt yields: what passes until the next is asked for, others take."""
        with closing(events):
            for event in events:
                left_s = self.clock()
                yield event
                self.others_s += self.clock() - left_s

    def computed(self, tokens: int) -> None:
        """Note that ``tokens`` of the prompt are in the caches now, those that were there before not counted."""
        if tokens > self.prefilled:
            self.pieces.append((tokens - self.prefilled, self.clock() - self.others_s))
        self.prefilled = tokens

    @property
    def read_s(self) -> float:
        """Seconds that the pieces of the prompt took, what others took not counted; 0 before the first."""
        return self.pieces[-1][1] - self.prefill_began_s if self.pieces and self.prefill_began_s is not None else 0.0

    def token(self, *, several: bool = False) -> None:
        """Note that a token has reached the host; several: with others of its pass."""
        self.token_times.append(self.clock())
        if several:
            self.several.add(len(self.token_times))

    def mark(self, cause: Cause, most_ms: float = math.inf, prompt: PromptBeside | None = None) -> None:
        """Note something since the last token that may hold the next one up, by ``most_ms`` at most; prompt: which one it was."""
        self.marks.append(Mark(len(self.token_times) + 1, cause, most_ms, prompt))

    def end(self) -> None:
        """Note that the reply is over."""
        self.ended_s = self.clock()

    @property
    def batch_width(self) -> float | None:
        """Replies that were decoded together so far, in the mean of the steps; None before one."""
        return rate(self.rows, self.passes)

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and of the reply so far."""
        return self.prompt_tokens + len(self.token_times)

    def outliers(self, *, ahead: bool, throttled: Sequence[Throttle] = ()) -> tuple[Outlier, ...]:
        """Return the longest gaps that stand out so far, and their known causes; see ``outliers``."""
        gaps, longest = self._gaps.read(self.token_times, self.several)
        if self.several and gaps is not None:
            usual = self.usual_ms
            return () if usual is None else outliers(longest, usual, self.marks, ahead=ahead, throttled=throttled)
        return () if gaps is None else outliers(longest, gaps.p50, self.marks, ahead=ahead, throttled=throttled)

    @property
    def usual_ms(self) -> float | None:
        """The median of the gaps that are steps; None without any."""
        gaps = gaps_ms(list(self.token_times))
        found = gap_percentiles([ms for token, ms in enumerate(gaps, 2) if token not in self.several])
        return None if found is None else found.p50

    @property
    def drafts(self) -> Speculated:
        """What speculation did so far."""
        found = [each() for each in self.speculated]
        saved = [each.saved_s for each in found if each.saved_s is not None]
        counts = [count for each in found for count in each.drafts]
        return Speculated(
            tuple(
                DraftCount(
                    source,
                    sum(each.drafted for each in counts if each.source == source),
                    sum(each.accepted for each in counts if each.source == source),
                )
                for source in dict.fromkeys(each.source for each in counts)
            ),
            sum(saved) if saved else None,
            found[-1].rests if found else "",
        )

    def metrics(self, cost: StepCost, *, kv_bytes: int | None, peak_memory_bytes: int | None) -> Metrics:
        """Return what is known so far."""
        times = list(self.token_times)  # a copy: the engine's thread may be appending
        first = times[0] if times else None
        # The first token's step computes the last of the prompt; a reply cancelled before it computed fewer.
        prefill_tokens = self.prompt_tokens - self.cached_tokens if times else self.prefilled
        began_s = self.prefill_began_s
        prefill_s = None if first is None or began_s is None else first - began_s - self.others_s
        decode_tps = decode_rate(times)
        drafts = self.drafts
        metrics = Metrics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefill_tokens=prefill_tokens,
            generated_tokens=len(times),
            ttft_s=None if first is None else first - self.accepted_s,
            prefill_s=prefill_s,
            total_s=times[-1] - self.accepted_s if times else None,
            prefill_tps=rate(prefill_tokens, prefill_s),
            decode_tps=decode_tps,
            itl_ms=self._gaps.read(self.token_times, self.several)[0],
            kv_bytes=kv_bytes,
            weight_bytes_per_token=cost.weight_bytes,
            kv_bytes_per_step=cost.kv_bytes,
            achieved_gbs=None,
            ceiling_tps=ceiling_tps(cost.bandwidth_gbs, cost.bytes_per_step),
            expected_tps=cost.expected_tps,
            peak_memory_bytes=peak_memory_bytes,
            queue_s=None if self.began_s is None else self.began_s - self.accepted_s,
            batch_width=self.batch_width,
            drafted_tokens=drafts.drafted or None,
            accepted_tokens=drafts.accepted if drafts.drafted else None,
            saved_s=drafts.saved_s,
            undrafted=drafts.rests or None,
            drafts=drafts.drafts or None,
        )
        return replace(metrics, achieved_gbs=achieved_gbs(cost.bytes_per_step, metrics.steps_tps))

"""All displayed rates, computed from time stamps (seconds, one monotonic clock, on the host)."""

# TTFT          accepted → first token
# image         the tower, for pictures that were not seen before
# prefill rate  computed prompt tokens ÷ compute seconds; cached tokens never count
# ITL           each gap between consecutive tokens
# decode rate   (n − 1) ÷ (t_last − t_first); undefined below two tokens
# total         accepted → last token
# Unknown is None, never 0 or infinity. An outlier gap is over twice the median and at least 1 ms longer
# (timer noise is below that). A cause is named only if recorded in the gap and able to explain most of the
# excess.
import bisect
import heapq
import itertools
import math
import resource
import threading
import time
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]

SHOWN_S, SHOWN_TOKENS = 1.0, 20  # a rate over less tells more of the clock and of one slow step than of the machine


@dataclass(frozen=True, slots=True)
class Gaps:
    """Percentiles of the gaps between tokens, in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class DraftCount:
    """One drafter's draft tokens and accepted ones. source: lookup, branches, draft, mtp or medusa."""

    source: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Cost of one reply. Seconds, tokens per second, bytes; None is unknown.

    Attributes:
        kv_bytes_per_step: Of all replies in the batch.
        queue_s: Accepted to start.
        image_s: Seeing pictures, in ``ttft_s`` but not in ``prefill_s``; None without one to see.
        batch_width: Mean batch size over the steps.
        saved_s: Seconds saved by speculation, negative if it lost.
        drafts: Tokens by source; None without drafts.
        undrafted: Why little or nothing was drafted; None if it was, or is off.
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
    image_s: float | None = None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None below two tokens."""
        if self.total_s is None or self.ttft_s is None or self.generated_tokens < 2:
            return None
        return self.total_s - self.ttft_s

    @property
    def shown_decode_tps(self) -> float | None:
        """The decode rate to display; None below one second or twenty tokens."""
        return self.decode_tps if is_shown(self.generated_tokens, self.decode_s) else None

    @property
    def shown_prefill_tps(self) -> float | None:
        """The prefill rate, by the same rule."""
        return self.prefill_tps if is_shown(self.prefill_tokens, self.prefill_s) else None

    @property
    def share_of_ceiling(self) -> float | None:
        """Decode rate ÷ ceiling; None where draft tokens were accepted, since a pass made several."""
        return None if self.accepted_tokens else share_of_limit(self.shown_decode_tps, self.ceiling_tps)

    @property
    def share_of_expected(self) -> float | None:
        """Decode rate ÷ expected rate; None where draft tokens were verified."""
        return None if self.drafted_tokens else share(self.shown_decode_tps, self.expected_tps)

    @property
    def steps_tps(self) -> float | None:
        """Passes per second, each reading the weights once."""
        accepted = self.accepted_tokens or 0
        return self.decode_tps and self.decode_tps * (1 - accepted / self.generated_tokens)

    @property
    def replies_at_once(self) -> int:
        """``batch_width`` as a whole number; 1 where it is unknown."""
        return whole_width(self.batch_width)


@dataclass(frozen=True, slots=True)
class Speculated:
    """Speculation of one reply so far. saved_s: negative if it lost; rests: why little is drafted."""

    drafts: tuple[DraftCount, ...] = ()
    saved_s: float | None = None
    rests: str = ""

    @property
    def drafted(self) -> int:
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.drafts)


def whole_width(mean: float | None) -> int:
    return 1 if mean is None else max(1, round(mean))


def rate(count: float, seconds: float | None) -> float | None:
    if seconds is None or seconds <= 0 or count <= 0:
        return None
    return count / seconds


def share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def is_shown(tokens: int | None, seconds: float | None) -> bool:
    return tokens is not None and seconds is not None and tokens >= SHOWN_TOKENS and seconds >= SHOWN_S


def share_of_limit(part: float | None, limit: float | None) -> float | None:
    found = share(part, limit)
    return None if found is None or found > 1 else found


def decode_rate(token_times: Sequence[float]) -> float | None:
    """Return (n − 1) ÷ (t_last − t_first); None below two tokens."""
    if len(token_times) < 2:
        return None
    return rate(len(token_times) - 1, token_times[-1] - token_times[0])


def shared_rate(token_times: Sequence[Sequence[float]]) -> float | None:
    """Aggregate rate of batched replies while all are decoding, or None.

    From the last reply's first token to the first end of a reply. token_times: seconds, per reply.
    """
    if not token_times or not all(token_times):
        return None
    begin, end = max(times[0] for times in token_times), min(times[-1] for times in token_times)
    counted = sum(bisect.bisect_right(times, end) - bisect.bisect_right(times, begin) for times in token_times)
    return rate(counted, end - begin)


def recent_rate(token_times: Sequence[float]) -> float | None:
    if len(token_times) <= SHOWN_TOKENS or token_times[-1] - token_times[0] < SHOWN_S:
        return None
    begin = bisect.bisect_right(token_times, token_times[-1] - SHOWN_S) - 1
    return decode_rate(token_times[min(begin, len(token_times) - 1 - SHOWN_TOKENS) :])


def gaps_ms(token_times: Sequence[float]) -> tuple[float, ...]:
    return tuple([(b - a) * 1e3 for a, b in itertools.pairwise(token_times)])


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gap_percentiles(gaps: Sequence[float]) -> Gaps | None:
    return percentiles(sorted(gaps))


def percentiles(ordered: Sequence[float]) -> Gaps | None:
    if not ordered:
        return None
    return Gaps(percentile(ordered, 0.50), percentile(ordered, 0.95), percentile(ordered, 0.99), ordered[-1])


def ceiling_tps(bandwidth_gbs: float | None, bytes_per_step: int | None) -> float | None:
    if bandwidth_gbs is None or not bytes_per_step:
        return None
    return bandwidth_gbs * 1e9 / bytes_per_step


def bytes_per_step(metrics: Metrics) -> int | None:
    if metrics.weight_bytes_per_token is None:
        return None
    return metrics.weight_bytes_per_token + (metrics.kv_bytes_per_step or 0)


def achieved_gbs(bytes_per_step: int | None, decode_tps: float | None) -> float | None:
    if bytes_per_step is None or decode_tps is None:
        return None
    return bytes_per_step * decode_tps / 1e9


Throttle = Literal["thermal", "low power"]  # what the system slows the chip down for
Slowing = Throttle | Literal["pace"]  # or the user

# kv growth: a cache's arrays were full, and copied to larger ones. pool cleared: MLX's unused buffers went back to the
# system, so the next step had to ask for memory again. swap: pages of this process had to be read from disk (major page
# faults). slow reader: the engine waited for the screen or program reading the reply. processor taken: where the model
# computes on the CPU, this process stood still for that long. thermal: the system said during this reply that it slows
# the chip down. A state: a cause of each of the reply's outliers. low power: Low Power Mode was switched on during this
# reply. One that was on all along makes all gaps longer, and none stand out. another prompt: a piece of another reply's
# prompt was computed in between.
Cause = Literal[
    "kv growth", "pool cleared", "swap", "slow reader", "processor taken", "thermal", "low power", "another prompt"
]

# What the host does while it launches a step. With decode one step ahead, the device may pay for it only in the gap
# after.
LAUNCHED: frozenset[Cause] = frozenset({"kv growth", "pool cleared"})

TIMES, LEAST_MS = 2.0, 1.0  # an outlier is longer than this multiple of the median, and than the median by this much

MOST = 5  # outliers reported of a reply: the longest


@dataclass(frozen=True, slots=True)
class PromptBeside:
    """Another reply's prompt piece computed between steps. background: it yields, e.g. a title."""

    tokens: int
    background: bool = False


@dataclass(frozen=True, slots=True)
class Outlier:
    """An outlier gap before ``token`` (from 1). prompt: the longest, for the cause "another prompt"."""

    token: int
    gap_ms: float
    causes: tuple[Cause, ...] = ()
    prompt: PromptBeside | None = None


class Gap(NamedTuple):
    """Milliseconds before a token counted from 1; the first gap is token 2's."""

    ms: float
    token: int


class Mark(NamedTuple):
    """An event before a token. most_ms: its maximum duration."""

    token: int
    cause: Cause
    most_ms: float = math.inf
    prompt: PromptBeside | None = None


def outliers(
    gaps: Sequence[Gap], median_ms: float, marks: Sequence[Mark], *, ahead: bool, throttled: Sequence[Throttle] = ()
) -> tuple[Outlier, ...]:
    """Return outliers, longest first. ahead: steps launch before the previous token is read."""
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
    """Running gap percentiles and the longest gaps, sorted incrementally. Any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 0
        self._ordered: list[float] = []
        self._longest: list[Gap] = []

    def read(self, token_times: list[float], several: Set[int] = frozenset()) -> tuple[Gaps | None, list[Gap]]:
        with self._lock:
            fresh = token_times[max(self._tokens - 1, 0) :]  # a copy: the engine's thread may be appending
            gaps = [Gap(ms, token) for token, ms in enumerate(gaps_ms(fresh), max(self._tokens, 1) + 1)]
            self._tokens = max(self._tokens - 1, 0) + len(fresh)
            steps = [gap for gap in gaps if gap.token not in several] if several else gaps
            self._longest = heapq.nlargest(MOST, itertools.chain(self._longest, steps))
            self._ordered.extend([gap.ms for gap in gaps])
            self._ordered.sort()  # a sorted run and a short tail: merged, not sorted again
            return percentiles(self._ordered), self._longest


# What a page read from a solid-state drive is taken to cost at most. A slower disk explains less here than it could.
FAULT_MS = 1.0

# A shorter standstill is not reported: the system knows a thread's time to a tick of its clock, 4 ms at 250 Hz.
LEAST_IDLE_MS = 8.0

LEAST_WAIT_MS = 0.5  # a shorter wait for the reader explains no outlier: these are 1 ms longer than others

# A shorter step was not held up for as long as makes an outlier; so many are not looked into.
SHORT_S, SHORT_STEPS = 1e-3, 8

_own_usage = partial(resource.getrusage, resource.RUSAGE_SELF)


class ProcessWatch:
    """Tells ``mark`` what held the process up; call ``look`` before each token's stamp."""

    # CPU time below wall time means others used the cores. Involuntary context switches don't count: there were
    # some in 698 of 699 steps (the guide, 2-core x86 CPU). Asking costs more with more threads, hence only after
    # slow steps and some others, so that idle time doesn't add up.

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
        self.waited_s = self._waited_in_all_s = 0.0  # the latter since the system was asked
        self._at_s = self._last_s = clock()
        self._short = 0  # steps since then
        before = usage()
        self._faults, self._computed_s = before.ru_majflt, before.ru_utime + before.ru_stime

    def look(self) -> None:
        at_s = self._clock()
        took_s, self._last_s = at_s - self._last_s, at_s
        if waited_s := self.waited_s:
            self.waited_s = 0.0
            self._waited_in_all_s += waited_s
            if waited_s * 1e3 >= LEAST_WAIT_MS:
                self._mark("slow reader", waited_s * 1e3)
        self._short += 1
        if took_s < SHORT_S and self._short < SHORT_STEPS:
            return
        now = self._usage()
        faults, computed_s = now.ru_majflt - self._faults, now.ru_utime + now.ru_stime
        idle_ms = (at_s - self._at_s - self._waited_in_all_s - (computed_s - self._computed_s)) * 1e3
        self._at_s, self._faults, self._computed_s = at_s, now.ru_majflt, computed_s
        self._waited_in_all_s, self._short = 0.0, 0
        if faults:
            self._mark("swap", faults * FAULT_MS)
        elif self._computes and idle_ms >= LEAST_IDLE_MS:  # who waits for a disk is idle, too
            self._mark("processor taken", idle_ms)


@dataclass(frozen=True, slots=True)
class StepCost:
    weight_bytes: int | None
    kv_bytes: int | None
    bandwidth_gbs: float | None
    expected_tps: float | None = None

    @property
    def bytes_per_step(self) -> int | None:
        if self.weight_bytes is None:
            return None
        return self.weight_bytes + (self.kv_bytes or 0)


@dataclass(slots=True)
class Recorder:
    """Time stamps (s, monotonic) and counts of one reply.

    pieces: prompt tokens and time each, without others'. several: tokens (from 1) of shared passes.
    """

    clock: Clock = time.perf_counter
    accepted_s: float = 0.0
    began_s: float | None = None
    prefill_began_s: float | None = None
    others_s: float = 0.0
    image_s: float = 0.0
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
        self.accepted_s = self.clock()

    def begin(self) -> None:
        if self.began_s is None:
            self.began_s = self.clock()

    def begin_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.prefilled = 0
        self.others_s = self.image_s = 0.0
        self.pieces.clear()
        self.prefill_began_s = self.clock()

    def reading(self, events: Generator[T, None, None]) -> Generator[T, None, None]:
        with closing(events):
            for event in events:
                left_s = self.clock()
                yield event
                self.others_s += self.clock() - left_s

    def computed(self, tokens: int) -> None:
        if tokens > self.prefilled:
            self.pieces.append((tokens - self.prefilled, self.clock() - self.others_s - self.image_s))
        self.prefilled = tokens

    @property
    def read_s(self) -> float:
        return self.pieces[-1][1] - self.prefill_began_s if self.pieces and self.prefill_began_s is not None else 0.0

    def token(self, *, several: bool = False) -> None:
        self.token_times.append(self.clock())
        if several:
            self.several.add(len(self.token_times))

    def mark(self, cause: Cause, most_ms: float = math.inf, prompt: PromptBeside | None = None) -> None:
        self.marks.append(Mark(len(self.token_times) + 1, cause, most_ms, prompt))

    def end(self) -> None:
        self.ended_s = self.clock()

    @property
    def batch_width(self) -> float | None:
        return rate(self.rows, self.passes)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + len(self.token_times)

    def outliers(self, *, ahead: bool, throttled: Sequence[Throttle] = ()) -> tuple[Outlier, ...]:
        gaps, longest = self._gaps.read(self.token_times, self.several)
        if self.several and gaps is not None:
            usual = self.usual_ms
            return () if usual is None else outliers(longest, usual, self.marks, ahead=ahead, throttled=throttled)
        return () if gaps is None else outliers(longest, gaps.p50, self.marks, ahead=ahead, throttled=throttled)

    @property
    def usual_ms(self) -> float | None:
        gaps = gaps_ms(list(self.token_times))
        found = gap_percentiles([ms for token, ms in enumerate(gaps, 2) if token not in self.several])
        return None if found is None else found.p50

    @property
    def drafts(self) -> Speculated:
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
        times = list(self.token_times)  # a copy: the engine's thread may be appending
        first = times[0] if times else None
        # The first token's step computes the last of the prompt; a reply cancelled before it computed fewer.
        prefill_tokens = self.prompt_tokens - self.cached_tokens if times else self.prefilled
        began_s = self.prefill_began_s
        prefill_s = None if first is None or began_s is None else first - began_s - self.others_s - self.image_s
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
            image_s=self.image_s or None,
        )
        return replace(metrics, achieved_gbs=achieved_gbs(cost.bytes_per_step, metrics.steps_tps))


SURE_BYTES = 1 << 18  # reads and writes of fewer bytes say nothing about the disk's speed


SURE_TOKENS = 64  # a prefill of fewer tokens says nothing about the device's speed


@dataclass(slots=True)
class Rates:
    """Measured speeds in tokens/s and bytes/s; None until measured."""

    prefill_tps: float | None = None
    read_bps: float | None = None
    write_bps: float | None = None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self.prefill_tps = _learn(self.prefill_tps, tokens, seconds, SURE_TOKENS)

    def observe_read(self, count: int, seconds: float) -> None:
        self.read_bps = _learn(self.read_bps, count, seconds, SURE_BYTES)

    def observe_write(self, count: int, seconds: float) -> None:
        self.write_bps = _learn(self.write_bps, count, seconds, SURE_BYTES)

    def prefill_s(self, tokens: int) -> float | None:
        return None if self.prefill_tps is None else tokens / self.prefill_tps

    def read_s(self, count: int) -> float | None:
        """Seconds to read ``count`` bytes; from the write rate until a read was measured, which is slower."""
        rate = self.read_bps or self.write_bps
        return None if rate is None else count / rate

    def is_worth(self, count: int, tokens: int) -> bool:
        read, prefill = self.read_s(count), self.prefill_s(tokens)
        return read is None or prefill is None or read < prefill


def _learn(known: float | None, count: int, seconds: float, least: int) -> float | None:
    seen = rate(count, seconds) if count >= least else None
    return known if seen is None else seen if known is None else (known + seen) / 2

"""Runs replies on the MLX thread, a turn at a time."""

import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import computing_error
from ..events import Event, Live, Piece, PrefillProgress
from ..metrics import PromptBeside
from .stream import EventStream

if TYPE_CHECKING:
    from .decoding import Decoded

# Every reply gets a token each turn. Between turns at most one prompt piece is read, for as long as the stall
# budget or the last turn. Prompts are first come, first served; background work gets at most a tenth of the
# time.


# A piece of a prompt at most, while a reply is written that somebody reads, or where nobody waits for the prompt.
STALL_S = 0.1
ALONE_S = 1.0  # the same where none is
BACKGROUND_SHARE = 0.1  # of the time, for what nobody waits for, while somebody waits for something
REMEMBERED_S = 10.0  # seconds after which a share counts half


@dataclass(frozen=True, slots=True)
class Demand:
    number: int
    reads: bool
    background: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """One turn. decodes: replies that get a token together. reads: whose prompt piece, within seconds."""

    decodes: tuple[int, ...] = ()
    reads: int | None = None
    within_s: float = ALONE_S
    background: bool = False


@dataclass(slots=True)
class _Ground:
    read_last: bool = True
    last_s: float = 0.0
    decode_s: float = 0.0
    spent_s: float = 0.0

    def spent(self, act: Act, seconds: float, remembered: float) -> None:
        self.read_last = act.reads is not None
        self.last_s = seconds
        if act.decodes:
            self.decode_s = self.last_s
        self.spent_s += remembered


def beside_s(reading_s: float, step_s: float) -> float:
    pieces = math.ceil(reading_s / max(STALL_S, step_s))
    return reading_s + max(pieces - 1, 0) * step_s


@dataclass(slots=True)
class Pace:
    """Limits for whoever computes a prompt: within_s seconds per piece, and whether to yield."""

    within_s: float = ALONE_S
    is_in_the_way: bool = False
    rests: bool = False


class Pacing:
    """Rests between turns. settle: waits for what was launched ahead, which else would run, uncounted, meanwhile."""

    def __init__(self, share: Callable[[], float], settle: Callable[[], None]) -> None:
        self.settle, self._share = settle, share
        self._until_s = -math.inf

    @property
    def rests(self) -> bool:
        return self._share() < 1

    def owed_s(self, now_s: float) -> float:
        return max(0.0, self._until_s - now_s)

    def worked(self, seconds: float, now_s: float) -> None:
        self._until_s = max(self._until_s, now_s) + seconds * (1 / self._share() - 1)  # what is still owed is added


class Policy:
    def __init__(self) -> None:
        self._front, self._back = _Ground(), _Ground()
        self._went_aside = False  # since those that are waited for got a token

    def choose(self, demands: Sequence[Demand]) -> Act | None:
        front = [each for each in demands if not each.background]
        back = [each for each in demands if each.background]
        share = BACKGROUND_SHARE * self._front.spent_s
        spared = not self._went_aside and self._back.spent_s + self._back.last_s <= share
        if back and (spared or not front):
            return self._among(back, self._back, background=True)
        return self._among(front, self._front, background=False) if front else None

    def spent(self, act: Act, seconds: float, turns: int = 1) -> None:
        self._went_aside = act.background or (self._went_aside and act.reads is not None)
        fade = 0.5 ** (seconds / REMEMBERED_S)
        remembered = seconds if turns == 1 else (1 - fade) * REMEMBERED_S / math.log(2)  # what fades while it goes on
        self._front.spent_s *= fade
        self._back.spent_s *= fade
        (self._back if act.background else self._front).spent(act, seconds / turns, remembered)

    def _among(self, demands: list[Demand], ground: _Ground, *, background: bool) -> Act:
        written = tuple(each.number for each in demands if not each.reads)
        waiting = [each.number for each in demands if each.reads]
        if waiting and (not written or not ground.read_last):
            ours = max(STALL_S, ground.decode_s) if written else ALONE_S
            return Act(reads=min(waiting), within_s=STALL_S if background else ours, background=background)
        return Act(decodes=written, background=background)


# A reply is a generator. It yields events; None after a prompt piece; WAITS until another leaves or has read
# its prompt; and its lane, to get tokens through ``take`` until there is other work. A reply too far ahead of
# its reader rests and gives its caches back. A failing reply ends alone.

# After a failed shared pass its lanes are recomputed, and then batched in smaller groups.


log = logging.getLogger(__name__)

WELL = 256  # passes without a failure after which twice as many replies share one again


# Replies that begin while an older one waits for another to leave; then no more do before it, or it might wait for
# ever.
MOST_PASSED = 8
# What the first turn of a kind may take, and any piece of a prompt; and how many times as long as the longest before.
FIRST_TURN_S, READING_S, LONGER = 60.0, 30.0, 10.0


class SharedFailureError(Exception):
    """A pass of several lanes failed; the culprit and the caches' contents are unknown."""


ReplyEvents = Generator[Any, None, None]  # yields Events, None, WAITS or a lane


class EventSource(Protocol):
    """Makes the events of one reply, on the MLX thread."""

    def events(self) -> ReplyEvents:
        """Return the events."""

    def feed(self, token: int, put: Callable[[Event], None]) -> bool:
        """Process the lane's next token; return whether the events go on now."""

    @property
    def pace(self) -> Pace:
        """Limits of the next prompt piece."""

    def rest(self) -> None:
        """Release shared resources until the next event; called after text only."""

    def drop(self) -> None:
        """Drop the caches of a failed pass; the failure is thrown into the events next."""

    def live(self) -> Live | None:
        """Return live figures, or None. Callable from any thread."""


class Seat:
    """A reply in the schedule. passed: younger ones begun while it waits; None if it does not."""

    __slots__ = ("background", "events", "lane", "making", "number", "passed", "prompt_tokens", "source", "stream")

    def __init__(self, source: Callable[[EventStream], EventSource], stream: EventStream, *, background: bool) -> None:
        self.source: Callable[[EventStream], EventSource] | None = source
        self.stream = stream
        self.background = background
        self.number = 0
        self.making: EventSource | None = None
        self.events: ReplyEvents | None = None
        self.lane: Any = None
        self.passed: int | None = None
        self.prompt_tokens = 0

    def begin(self) -> tuple[EventSource, ReplyEvents]:
        if self.making is None or self.events is None:
            assert self.source is not None
            self.making = self.source(self.stream)
            self.events, self.source = self.making.events(), None
            self.stream.live = self.making.live
        return self.making, self.events

    def drop(self) -> None:
        if self.making is not None:
            self.making.drop()


class Schedule:
    """The replies in progress, on one thread."""

    def __init__(self, again: Callable[[Seat], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.decode: Callable[[list[Any]], Sequence[Decoded]] = lambda _: ()
        self.width = 1
        self._again, self._clock = again, clock
        self.pacing: Pacing | None = None
        self._came = False  # a reply, since the last turn
        self._policy = Policy()
        self._seats: list[Seat] = []
        self._waiting: list[Seat] = []
        self._parked: list[Seat] = []  # until another reply leaves, or has read its prompt
        self._has_changed = False  # one has since
        self._count = 0
        self._together = 1  # lanes of one pass at most
        self._well = 0  # passes since one failed
        self._under_way: tuple[bool, float] | None = None  # the turn: whether it reads a prompt, and when it began
        self._longest = {False: 0.0, True: 0.0}  # seconds of a turn, by whether it reads
        # Seconds and turns of the only reply, that the policy was not told of, by whether they read a prompt:
        self._alone: dict[bool, list[Any]] = {True: [0.0, 0], False: [0.0, 0]}
        self._is_alone = self._alone_behind = False  # there is no other; it was in the background

    @property
    def busy(self) -> bool:
        return bool(self._seats or self._waiting or self._parked)

    @property
    def live(self) -> Callable[[], Live | None] | None:
        making = next((seat.making for seat in self._seats if seat.making is not None and not seat.background), None)
        return None if making is None else making.live

    def add(self, seat: Seat) -> None:
        self._count += 1
        seat.number = seat.number or self._count
        self._waiting.append(seat)
        self._came = True

    def turn(self) -> float | None:
        """Take a turn; return the seconds to rest, None once idle. A failure outside a reply ends all replies."""
        if (pacing := self.pacing) is None:
            self._go_on()
            return 0.0 if self.busy else None
        came, self._came = self._came, False
        if not came and not self._is_ending() and self.busy and (owed_s := pacing.owed_s(self._clock())):
            return owed_s  # a call came in between
        began = self._clock()
        self._go_on()
        if pacing.rests:
            pacing.settle()
        now_s = self._clock()
        pacing.worked(now_s - began, now_s)
        return None if not self.busy else 0.0 if self._is_ending() else pacing.owed_s(now_s)

    def _is_ending(self) -> bool:
        return any(each.stream.cancelled for each in (*self._seats, *self._waiting, *self._parked))

    def _go_on(self) -> None:
        try:
            if self._waiting or self._parked:
                self._admit()
            if len(self._seats) == 1:
                self._go_on_alone(self._seats[0])
            elif self._seats:
                self._take_turn()
        except BaseException as error:
            log.exception("the schedule failed")
            self.fail_all(error)

    def _take_turn(self) -> None:
        self._is_alone = False
        self._tell_policy()
        act = self._policy.choose([_demand(seat) for seat in self._seats])
        if act is None:
            return
        reads, began = act.reads is not None, self._clock()
        self._under_way = reads, began
        self._do(act)
        self._under_way, took = None, self._clock() - began
        self._longest[reads] = max(took, self._longest[reads])
        self._policy.spent(act, took)

    def _go_on_alone(self, seat: Seat) -> None:
        reads, began = seat.lane is None, self._clock()
        self._under_way = reads, began
        if reads:
            self._advance(seat, within_s=STALL_S if seat.background or self.pacing is not None else ALONE_S)
        else:
            if not self._is_alone:
                self._is_alone, seat.lane.free = True, 0  # who left may have changed what its caches share
            try:
                for each in self.decode([seat.lane]):
                    self._give(seat, each)
            except BaseException as error:
                seat.drop()
                self._advance(seat, error)
        self._under_way, took = None, self._clock() - began
        if took > self._longest[reads]:  # noqa: PLR1730  # max() costs more, for every token
            self._longest[reads] = took
        spent = self._alone[reads]
        spent[0] += took
        spent[1] += 1
        self._alone_behind = seat.background

    def _tell_policy(self) -> None:
        for reads, (seconds, turns) in self._alone.items():
            if turns:
                act = Act(reads=0) if reads else Act(decodes=(0,))
                self._policy.spent(replace(act, background=self._alone_behind), seconds, turns)
                self._alone[reads] = [0.0, 0]

    def stuck_s(self, least_s: float) -> float | None:
        """Return the seconds of an unusually long turn, at least ``least_s``; else None. Any thread."""
        if (under_way := self._under_way) is None:
            return None
        (reads, began), least_s = under_way, max(least_s, READING_S) if under_way[0] else least_s
        longest, taken = self._longest[reads], self._clock() - began
        return taken if taken > (max(least_s, LONGER * longest) if longest else FIRST_TURN_S) else None

    def end_all(self) -> None:
        for seat in self._all():
            if seat.events is not None:
                seat.events.close()
            self._leave(seat)

    def fail_all(self, failure: BaseException) -> None:
        self._under_way = None
        for seat in self._all():
            with suppress(Exception):
                if seat.events is not None:
                    seat.events.close()
            self._end(seat, failure)

    def _all(self) -> list[Seat]:
        found = [*self._seats, *self._waiting, *self._parked]
        self._waiting.clear()
        self._parked.clear()
        return found

    def _admit(self) -> None:
        if not self._seats:
            self._together = self.width
        if self._has_changed or not self._seats or any(seat.stream.is_cancelled() for seat in self._parked):
            self._waiting += self._parked
            self._parked.clear()
        self._has_changed = False
        waiting, self._waiting = sorted(self._waiting, key=lambda seat: seat.number), []
        for seat in waiting:
            is_full = sum(each.background is seat.background for each in self._seats) >= self.width
            is_new = seat.events is None
            if (is_full or (is_new and not self._may_begin(seat))) and not seat.stream.is_cancelled():
                self._waiting.append(seat)  # but for one that is cancelled, whose end is told at once
            elif not (seat.stream.is_abandoned() and is_new):
                for each in self._before(seat) if is_new else ():
                    each.passed = (each.passed or 0) + 1
                self._seats.append(seat)

    def _may_begin(self, seat: Seat) -> bool:
        return all((each.passed or 0) < MOST_PASSED for each in self._before(seat))

    def _before(self, seat: Seat) -> list[Seat]:
        waiting = [each for each in (*self._parked, *self._seats) if each.passed is not None]
        return [each for each in waiting if each.number < seat.number and each.background <= seat.background]

    def _do(self, act: Act) -> None:
        by_number = {seat.number: seat for seat in self._seats}
        if act.reads is not None:
            seat = by_number[act.reads]
            began = self._clock()
            self._advance(seat, within_s=act.within_s if self.pacing is None else min(act.within_s, STALL_S))
            took_ms = (self._clock() - began) * 1e3
            prompt = PromptBeside(seat.prompt_tokens, seat.background) if seat.prompt_tokens else None
            for other in self._seats:
                if other is not seat and other.lane is not None:
                    other.lane.note("another prompt", took_ms, prompt)
            return
        written = [by_number[number] for number in act.decodes]
        together = self._together
        for at in range(0, len(written), together):
            self._write(written[at : at + together])

    def _write(self, seats: list[Seat]) -> None:
        by_lane = {id(seat.lane): seat for seat in seats}
        for other in self._seats:
            if other.lane is not None and id(other.lane) not in by_lane:
                other.lane.interrupted()
        try:
            decoded = self.decode([seat.lane for seat in seats])
        except BaseException as error:
            failure, self._well = error, 0
            if len(seats) > 1:
                self._together = len(seats) // 2
                failure = SharedFailureError()
                failure.__cause__ = error
            for seat in seats:  # all of them, before one is filled again from what another holds
                seat.drop()
            for seat in seats:
                self._advance(seat, failure)
            return
        self._well += 1
        if self._well % WELL == 0:
            self._together = min(2 * self._together, self.width)
        for each in decoded:
            self._give(by_lane[id(each.lane)], each)

    def _give(self, seat: Seat, decoded: "Decoded") -> None:
        making, stream, token = seat.making, seat.stream, decoded.token
        if making is None or token is None:
            seat.drop()
            self._advance(seat, decoded.failure)
        elif making.feed(token, stream.put) or stream.cancelled:
            self._advance(seat)
        elif stream.ahead:
            self._rest(seat, making)

    def _advance(self, seat: Seat, failure: BaseException | None = None, *, within_s: float | None = None) -> None:
        stream = seat.stream
        try:
            making, events = seat.begin()
            if within_s is not None:
                making.pace.within_s = within_s
            making.pace.is_in_the_way = self._is_in_the_way(seat)
            making.pace.rests = self.pacing is not None and self.pacing.rests
            if stream.is_abandoned():
                events.close()
                self._end(seat)
                return
            made = next(events) if failure is None else events.throw(failure)
            while True:
                if made is None:
                    seat.lane = None
                    return
                if made is WAITS:
                    seat.lane, seat.passed = None, seat.passed or 0
                    self._seats.remove(seat)
                    self._parked.append(seat)
                    for each in self._seats:  # a reply that is only given tokens is told now
                        if each.making is not None:
                            each.making.pace.is_in_the_way = self._is_in_the_way(each)
                    return
                if not isinstance(made, EVENTS):
                    self._has_changed = self._has_changed or seat.lane is None
                    seat.lane, seat.passed = made, None
                    return
                stream.put(cast(Event, made))
                if isinstance(made, Piece) and stream.ahead:
                    self._rest(seat, making)
                    return
                if isinstance(made, PrefillProgress):
                    seat.lane, seat.prompt_tokens = None, made.total
                    return
                if stream.is_abandoned():
                    events.close()
                    break
                made = next(events)
        except StopIteration:
            pass
        except BaseException as error:
            self._end(seat, computing_error(error) or error)
            return
        self._end(seat)

    def _is_in_the_way(self, seat: Seat) -> bool:
        return seat.background and any(not each.background for each in self._parked)

    def _rest(self, seat: Seat, making: EventSource) -> None:
        self._leave(seat)
        making.rest()
        seat.stream.rest(lambda: self._again(seat))

    def _leave(self, seat: Seat) -> None:
        seat.lane = None
        self._has_changed = True
        if seat in self._seats:
            self._seats.remove(seat)

    def _end(self, seat: Seat, failure: BaseException | None = None) -> None:
        self._leave(seat)
        seat.stream.end(failure)


def _demand(seat: Seat) -> Demand:
    gives_way = seat.background and not seat.stream.is_cancelled()  # what is cancelled leaves at once
    return Demand(seat.number, seat.lane is None, gives_way)


# Yielded by a reply that can't go on before another one gives back what it holds, or has read what both begin with.
WAITS = object()

EVENTS: tuple[type, ...] = Event.__args__

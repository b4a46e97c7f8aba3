"""Runs replies beside each other on the MLX thread, a turn at a time.

A reply is a generator. It yields events, which go to its reader; None, where a piece of its prompt was computed and others may go
first; WAITS, where another has to leave, or to read its prompt, before it goes on; and its lane, when it wants its next token:
``send`` brings it, or None where the reply is to look whether it was cancelled. A reply that is as far ahead of its reader as it
may be rests: it gives its caches back, and holds up nobody. One that fails ends alone; after a pass of several that fails, they
are computed again, and then fewer together.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from ..errors import computing_error
from ..events import Event, Live, Piece, PrefillProgress
from ..metrics import PromptBeside
from .policy import Act, Demand, Pace, Policy
from .stream import EventStream

WELL = 256
"""Passes without a failure after which twice as many replies share one again."""


MOST_PASSED = 8
"""Replies that begin while an older one waits for another to leave; then no more do before it, or it might wait for ever."""
FIRST_TURN_S, READING_S, LONGER = 60.0, 30.0, 10.0
"""What the first turn of a kind may take, and any piece of a prompt; and how many times as long as the longest before."""


class SharedFailureError(Exception):
    """A pass of several lanes failed: whose fault that was, or what their caches hold, nobody knows."""


class DecodedToken(Protocol):
    """What a step brought for a lane: a token, or why none will come."""

    @property
    def lane(self) -> Any:
        """The lane."""

    @property
    def token(self) -> int | None:
        """The token."""

    @property
    def failure(self) -> BaseException | None:
        """Why none will come."""


ReplyEvents = Generator[Any, Any, None]
"""Yields Events, None, WAITS or a lane; takes a token."""


class EventSource(Protocol):
    """Makes the events of one reply, on the MLX thread."""

    def events(self) -> ReplyEvents:
        """Return them."""

    @property
    def pace(self) -> Pace:
        """How long the next piece of its prompt may take."""

    def rest(self) -> None:
        """Release what others may use until the next event is asked for. Called after text alone."""

    def drop(self) -> None:
        """Drop the caches, whose pass failed: nobody knows what they hold. The failure is thrown into the events next."""

    def live(self) -> Live | None:
        """Return what is measured so far; None where that is no reply. Callable from any thread."""


class Seat:
    """A reply in the schedule: its stream, and what makes its events, None until its first turn.

    passed: younger ones that began while it waited for another to leave; None where it does not. prompt_tokens: that it reads.
    """

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
        """Return what makes the events and the events, begun in the first turn."""
        if self.making is None or self.events is None:
            assert self.source is not None
            self.making = self.source(self.stream)
            self.events, self.source = self.making.events(), None
            self.stream.live = self.making.live
        return self.making, self.events

    def drop(self) -> None:
        """Drop its caches: a pass over them failed."""
        if self.making is not None:
            self.making.drop()


class Schedule:
    """The replies that are being made, on one thread.

    Args:
        again: called by any thread with a seat whose reader has caught up; it calls ``add`` on the schedule's thread.

    Attributes:
        decode: computes a token of each of some lanes; returns those that became known.
        width: replies at once at most, and as many in the background: those never share a pass, nor keep anybody from a seat.
    """

    def __init__(self, again: Callable[[Seat], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.decode: Callable[[list[Any]], Sequence[DecodedToken]] = lambda _: ()
        self.width = 1
        self._again, self._clock = again, clock
        self._policy = Policy()
        self._seats: list[Seat] = []
        self._waiting: list[Seat] = []
        self._parked: list[Seat] = []  # until another reply leaves, or has read its prompt
        self._has_changed = False  # one has since
        self._count = 0
        self._together = 1  # lanes of one pass at most
        self._well = 0  # passes since one failed
        self._under_way: tuple[bool, float] | None = None  # the turn: whether it reads a prompt, and when it began
        self._longest: dict[bool, float] = {}  # seconds of a turn, by whether it reads

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._seats or self._waiting or self._parked)

    @property
    def live(self) -> Callable[[], Live | None] | None:
        """What measures the reply that has run longest; None without one."""
        making = next((seat.making for seat in self._seats if seat.making is not None and not seat.background), None)
        return None if making is None else making.live

    def add(self, seat: Seat) -> None:
        """Seat a reply, or let it wait until there is room."""
        self._count += 1
        seat.number = seat.number or self._count
        self._waiting.append(seat)

    def turn(self) -> bool:
        """Do what the policy says; return whether there is more to do."""
        if not self._seats:
            self._together = self.width
        self._admit()
        act = self._policy.choose([_demand(seat) for seat in self._seats])
        if act is None:
            return self.busy
        reads, began = act.reads is not None, self._clock()
        self._under_way = reads, began
        self._do(act)
        self._under_way, took = None, self._clock() - began
        self._longest[reads] = max(took, self._longest.get(reads, 0.0))
        self._policy.spent(act, took)
        return self.busy

    def stuck_s(self, least_s: float) -> float | None:
        """Return how long the turn under way has taken, where that is far longer than any before; else None.

        That is ``least_s`` at least, more for a piece of a prompt. Callable from any thread.
        """
        if (under_way := self._under_way) is None:
            return None
        (reads, began), least_s = under_way, max(least_s, READING_S) if under_way[0] else least_s
        longest, taken = self._longest.get(reads), self._clock() - began
        return taken if taken > (FIRST_TURN_S if longest is None else max(least_s, LONGER * longest)) else None

    def end_all(self) -> None:
        """End every reply, whose readers were told."""
        for seat in self._all():
            if seat.events is not None:
                seat.events.close()
            self._leave(seat)

    def fail_all(self, failure: BaseException) -> None:
        """End every reply with a failure that is none's own: of the schedule, say."""
        self._under_way = None
        for seat in self._all():
            with suppress(Exception):
                if seat.events is not None:
                    seat.events.close()
            self._end(seat, failure)

    def _all(self) -> list[Seat]:
        """Return all replies; those that wait do so no more."""
        found = [*self._seats, *self._waiting, *self._parked]
        self._waiting.clear()
        self._parked.clear()
        return found

    def _admit(self) -> None:
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
        """Return the older replies, no less urgent, that wait for another to leave."""
        waiting = [each for each in (*self._parked, *self._seats) if each.passed is not None]
        return [each for each in waiting if each.number < seat.number and each.background <= seat.background]

    def _do(self, act: Act) -> None:
        by_number = {seat.number: seat for seat in self._seats}
        if act.reads is not None:
            seat = by_number[act.reads]
            began = self._clock()
            self._advance(seat, within_s=act.within_s)
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
        """Bring each of these replies its next token, of one pass."""
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
                self._advance(seat, failure=failure)
            return
        self._well += 1
        if self._well % WELL == 0:
            self._together = min(2 * self._together, self.width)
        for each in decoded:
            seat = by_lane[id(each.lane)]
            if each.failure is not None:
                seat.drop()
            self._advance(seat, each.token, each.failure)

    def _advance(
        self,
        seat: Seat,
        token: int | None = None,
        failure: BaseException | None = None,
        *,
        within_s: float | None = None,
    ) -> None:
        """Let a reply go on until its turn is over; hand its events over. within_s: of a piece of its prompt."""
        stream = seat.stream
        try:
            making, events = seat.begin()
            if within_s is not None:
                making.pace.within_s = within_s
            making.pace.is_in_the_way = seat.background and any(not each.background for each in self._parked)
            if stream.is_abandoned():
                events.close()
                self._end(seat)
                return
            made = events.send(token if seat.lane is not None else None) if failure is None else events.throw(failure)
            while True:
                if made is None:
                    seat.lane = None
                    return
                if made is WAITS:
                    seat.lane, seat.passed = None, seat.passed or 0
                    self._seats.remove(seat)
                    self._parked.append(seat)
                    return
                if not isinstance(made, EVENTS):
                    self._has_changed = self._has_changed or seat.lane is None
                    seat.lane, seat.passed = made, None
                    return
                stream.put(cast(Event, made))
                if isinstance(made, Piece) and stream.is_ahead:
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


WAITS = object()
"""Yielded by a reply that can't go on before another one gives back what it holds, or has read what both begin with."""

EVENTS: tuple[type, ...] = Event.__args__

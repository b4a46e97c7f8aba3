"""The replies of an engine on their way from its thread to their readers, and what else is asked of that thread meanwhile.

The thread makes one reply at a time; another waits for its turn. A reply may be some way ahead of its reader; then it gives its
turn away, rests, and queues again once the reader has caught up. So nobody waits for a reader who has paused:

- A reply that rests gives its caches back to the prompt cache. What was put aside for another reply meanwhile is put back, and
  what had to go is computed again.
- Only text lets a reply rest: a prompt is read to its end, since its progress is few events.
- A call made by the very thread that reads a reply is answered after the reply's next event.
- Cancelling, closing, and letting go of the iterator end a rest.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tokamac.engine.compute_errors import computing_error
from tokamac.engine.errors import EngineClosedError, OptionError
from tokamac.engine.events import Event, Live, TextChunk
from tokamac.engine.worker import Stream, Worker

T = TypeVar("T")


class Making(Protocol):
    """What makes the events of one stream, on the engine's thread."""

    def events(self) -> Generator[Event, None, None]:
        """Yield them."""

    def rest(self) -> None:
        """Let others use what the thread has one of, until the next event is asked for. Called after text alone."""

    def live(self) -> Live | None:
        """Return what is measured so far; None where that is no reply. Callable from any thread."""


@dataclass(slots=True)
class Bounded:
    """Events without text, which are few: they never rest."""

    of: Generator[Event, None, None]

    def events(self) -> Generator[Event, None, None]:
        """Return them."""
        return self.of

    def rest(self) -> None:
        """Nothing to do."""

    def live(self) -> None:
        """Nothing is measured."""


class _Lane:
    """A stream and what makes its events; ``events`` is None until its first turn."""

    __slots__ = ("events", "making", "source", "stream")

    def __init__(self, source: Callable[[Stream], Making], stream: Stream) -> None:
        self.source: Callable[[Stream], Making] | None = source
        self.stream = stream
        self.making: Making | None = None
        self.events: Generator[Event, None, None] | None = None

    def begin(self) -> tuple[Making, Generator[Event, None, None]]:
        """Return what makes the events and the events, begun in the first turn."""
        if self.making is None or self.events is None:
            assert self.source is not None
            self.making = self.source(self.stream)
            self.events, self.source = self.making.events(), None
        return self.making, self.events


class Replies:
    """What is asked of an engine's thread, from any other.

    live: measures the reply whose turn it is, or was last; None without one. open: the replies that are read; append, remove and
    copying are atomic. No lock stands around them, for a collected iterator leaves it wherever the collector runs.
    """

    def __init__(self, worker: Worker) -> None:
        self.live: Callable[[], Live | None] | None = None
        self.open: list[Stream] = []
        self._worker = worker
        self._ahead = threading.Event()  # ends what is being computed ahead
        self._ahead_lock = threading.Lock()

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run on the thread, between two replies or, as told above, during one."""
        here = threading.get_ident()
        reads = any(stream.reader == here and not stream.ended for stream in list(self.open))
        return self._worker.call(work, hurry=reads)

    def stream(
        self, source: Callable[[Stream], Making], *, opened: Callable[[Stream], None] = lambda _: None
    ) -> Generator[Event, None, None]:
        """Run ``source`` on the engine's thread and yield its events on this one. Closing the generator ends it.

        opened: told of what carries the events, before anything is asked of the thread.
        Raises OptionError on the engine's own thread.
        """
        if self._worker.is_here:
            raise OptionError("a reply can't be read on the engine's own thread", "Ask for it outside of between().")
        stream = Stream()
        opened(stream)
        lane = _Lane(source, stream)
        self._ahead.set()
        self.open.append(stream)
        try:
            job = self._worker.submit(lambda: self._pump(lane))
            try:
                yield from stream.read()
            finally:
                stream.abandon()
                job.cancel()
        finally:
            self.open.remove(stream)

    def steps(self, make: Callable[[threading.Event], Generator[T, None, None]]) -> Generator[T, None, None]:
        """Run a generator on the engine's thread, a step at a time, and yield its values on this one.

        make: makes it, given what is set when it should end.
        """
        stopped = threading.Event()
        steps = self.call(lambda: make(stopped))
        try:
            while (step := self.call(lambda: next(steps, None))) is not None:
                yield step
        finally:
            stopped.set()
            with contextlib.suppress(EngineClosedError):
                self._worker.submit(steps.close)  # on the thread that runs it

    def ahead(self, work: Callable[[Callable[[], bool]], None]) -> None:
        """Run ``work`` on the thread, told when to end: when a reply is asked for, or other work ahead. Returns at once."""
        cancelled = threading.Event()
        with self._ahead_lock:
            before, self._ahead = self._ahead, cancelled
        before.set()
        self._worker.submit(lambda: work(cancelled.is_set))

    def cancel(self) -> None:
        """End the reply in progress and those that wait: readers get Finished with reason "cancelled"."""
        for stream in list(self.open):
            stream.cancel()

    def close(self, last: Callable[[], None], *, wait: bool = True) -> None:
        """End all replies (their readers get EngineClosedError), then run ``last``, and stop the thread. Safe to call again."""
        self._ahead.set()
        self._end_all()  # before the last work: those that rest end on the thread, and let go of the model
        with contextlib.suppress(EngineClosedError):  # by an earlier call
            self._worker.submit(last)
        self._worker.leave()
        self._end_all()  # those that were begun meanwhile
        if wait:
            self._worker.close()

    def _end_all(self) -> None:
        for stream in list(self.open):
            stream.close()

    def _pump(self, lane: _Lane) -> None:
        """Make events until the end, or until the reader is too far behind."""
        stream = lane.stream
        if stream.is_abandoned() and lane.events is None:
            return
        rests = False
        try:
            making, events = lane.begin()
            self.live = making.live
            if not stream.is_abandoned():
                rests = self._advance(making, events, stream)
            if rests:
                stream.rest(lambda: self._again(lane))
                return
            events.close()
            stream.end()
        except BaseException as error:
            stream.end(computing_error(error) or error)
        finally:
            if not rests:
                self.live = None

    def _advance(self, making: Making, events: Generator[Event, None, None], stream: Stream) -> bool:
        """Hand events over; return whether the reply rests now, and so goes on later."""
        for event in events:
            if stream.is_abandoned():
                return False
            stream.put(event)
            if self._worker.hurried:
                self._worker.answer()
            if isinstance(event, TextChunk) and stream.is_ahead:
                making.rest()
                return True
        return False

    def _again(self, lane: _Lane) -> None:
        self._ahead.set()
        with contextlib.suppress(EngineClosedError):
            self._worker.submit(lambda: self._pump(lane))

"""The MLX thread, and how replies get from it to their readers.

The one thread that touches MLX makes one reply at a time; another waits for its turn. A reply may be some way ahead of its reader;
then it rests, giving its turn away, and queues again once the reader has caught up. So nobody waits for a reader who has paused:

- A reply that rests releases its caches to the prompt cache. What is evicted meanwhile is computed again.
- Only text lets a reply rest: a prompt is read to its end, since its progress is few events.
- A call made by the very thread that reads a reply is answered after the reply's next event.
- Cancelling, closing, and dropping the iterator end a rest.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from .errors import EngineClosedError, OptionError, computing_error, engine_error
from .events import Event, Live, TextChunk

T = TypeVar("T")


log = logging.getLogger(__name__)

LOOK_AHEAD = 128
"""Batches of events a reply may be ahead of its reader; then it rests until the reader has caught up with half of them."""

HAND_OVER_S = 1 / 60
"""Text is handed over so often at most: to wake the reader takes the engine's thread a good part of a small model's step."""


class EventStream:
    """The events of one reply on their way from the MLX thread to a reader's. Either side may end it; neither waits to hand over.

    reader: the thread that read last; None before one did. ended: whether all of it is on its way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batches: queue.SimpleQueue[list[Event] | BaseException | None] = queue.SimpleQueue()
        self._waiting: list[Event] = []
        self._handed_s = 0.0
        self._resting: list[Callable[[], None]] = []  # one at most; whoever pops it, which is atomic, calls it
        self.reader: int | None = None
        self.ended = False
        self.cancelled = False
        self._abandoned = False

    def cancel(self) -> None:
        """Ask the engine to end the reply; the reader still gets its Finished event."""
        self.cancelled = True
        self._wake()

    def is_cancelled(self) -> bool:
        """Whether the reply should end."""
        return self.cancelled

    def is_abandoned(self) -> bool:
        """Whether nobody reads any more."""
        return self._abandoned

    def abandon(self) -> None:
        """The reader is gone: end the reply, and don't wait for anyone."""
        self._abandoned = True
        self.cancel()

    def close(self) -> None:
        """The engine goes away: end the reply, and tell its reader so."""
        # Before the thread hears of it, and ends the reply for good: its reader is to learn why.
        self._batches.put(EngineClosedError("the engine was closed", "Load it again with Engine.load."))
        self.abandon()

    @property
    def is_ahead(self) -> bool:
        """Whether the reply is as far ahead of its reader as it may be."""
        return self._batches.qsize() >= LOOK_AHEAD and not self.cancelled

    def rest(self, again: Callable[[], None]) -> None:
        """Have ``again`` called once, by any thread, when the reader has caught up or the reply is to end."""
        self._resting.append(again)
        if self._has_caught_up():  # between the last look and now
            self._wake()

    def _has_caught_up(self) -> bool:
        return self.cancelled or self._batches.qsize() <= LOOK_AHEAD // 2

    def _wake(self) -> None:
        try:
            again = self._resting.pop()
        except IndexError:
            return
        again()

    def put(self, event: Event) -> None:
        """Hand over an event: text with what follows within ``HAND_OVER_S``, all else at once."""
        self._waiting.append(event)
        if not isinstance(event, TextChunk) or self._clock() - self._handed_s >= HAND_OVER_S:
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake the reader."""
        self._batches.put(self._waiting)
        self._waiting = []
        self._handed_s = self._clock()

    def end(self, failure: BaseException | None = None) -> None:
        """No more will come; a failure is raised in the reader, after what it was to read before."""
        self._hand_over()
        self.ended = True
        self._batches.put(failure)

    def read(self) -> Iterator[Event]:
        """Yield events until the end; raises the engine's failure, if there was one."""
        while True:
            self.reader = threading.get_ident()
            batch = self._batches.get()
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            if self._has_caught_up():
                self._wake()
            yield from batch


class _Job:
    """Work for the thread, and where its result goes. is_call: somebody waits for it, and it may be done during a reply."""

    def __init__(self, work: Callable[[], Any], *, is_call: bool) -> None:
        self._work = work
        self.is_call = is_call
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(engine_error(error) or error)


class Worker:
    """A daemon thread that runs callables one after another, and ``at_end`` after the last of them.

    A long one may let those that somebody waits for go first, with ``answer``. hurried: whether one of them asks for that.
    ``when_idle`` is called after them, while none waits: it does a little work and returns after how many seconds to call it
    again, or None. Where it raises, the failure is logged, and it is not called again before the next work.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self.when_idle: Callable[[], float | None] = lambda: None
        self.hurried = False
        self.closed = False
        self._at_end = at_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting: list[_Job] = []  # those of them that were not begun
        self._lock = threading.RLock()  # a collected iterator submits its end, wherever the collector ran
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queue ``work``; its result or exception arrives in the future. Raises EngineClosedError after ``close``."""
        return self._put(_Job(work, is_call=False))

    def call(self, work: Callable[[], T], *, hurry: bool = False) -> T:
        """Run ``work`` on the thread and return its result: in its turn, or when what runs there calls ``answer``.

        hurry: ask it to. On the thread itself ``work`` runs at once.
        """
        if self.is_here:
            return work()
        future: Future[T] = self._put(_Job(work, is_call=True), hurry=hurry)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # if the caller was interrupted, nobody wants it any more
            raise

    def answer(self) -> None:
        """Run the calls that wait, on the thread, in the middle of other work."""
        self.hurried = False
        while (job := self._first_call()) is not None:
            job.run()

    def leave(self) -> None:
        """Take no more work; what is queued still runs, and is not waited for. Safe to call again."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._jobs.put(None)

    def close(self) -> None:
        """Let what is queued finish, then end the thread. Safe to call again."""
        self.leave()
        if not self.is_here:
            self._thread.join()

    def _put(self, job: _Job, *, hurry: bool = False) -> "Future[Any]":
        with self._lock:
            if self.closed:
                raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
            self._waiting.append(job)
            self._jobs.put(job)
            self.hurried = self.hurried or hurry
        return job.future

    def _first_call(self) -> _Job | None:
        """Take the first call that waits; its place in the queue is passed over later."""
        with self._lock:
            job = next((job for job in self._waiting if job.is_call), None)
            if job is not None:
                self._waiting.remove(job)
            return job

    def _begin(self, job: _Job) -> bool:
        """Take a job from those that wait; return whether it still did."""
        with self._lock:
            waited = job in self._waiting
            if waited:
                self._waiting.remove(job)
            return waited

    def _idle(self) -> float | None:
        """Do idle work. Whatever it raises must not end the thread: everybody who asks for something waits for it."""
        try:
            return self.when_idle()
        except BaseException:
            log.exception("idle work of the engine failed")
            return None

    def _run(self) -> None:
        pause: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=pause)
            except queue.Empty:
                pause = self._idle()
                continue
            if job is None:
                break
            if self._begin(job):
                job.run()
            del job  # its result may be large, and the wait long
            pause = 0.0
        self._at_end()


class EventSource(Protocol):
    """Makes the events of one reply, on the MLX thread."""

    def events(self) -> Generator[Event, None, None]:
        """Yield them."""

    def rest(self) -> None:
        """Release what others may use until the next event is asked for. Called after text alone."""

    def live(self) -> Live | None:
        """Return what is measured so far; None where that is no reply. Callable from any thread."""


@dataclass(slots=True)
class UnpacedReply:
    """Events without text, which are few: they never rest."""

    of: Generator[Event, None, None]

    def events(self) -> Generator[Event, None, None]:
        """Return them."""
        return self.of

    def rest(self) -> None:
        """Nothing to do."""

    def live(self) -> None:
        """Nothing is measured."""


class _OpenReply:
    """A stream and what makes its events: None until its first turn."""

    __slots__ = ("events", "making", "source", "stream")

    def __init__(self, source: Callable[[EventStream], EventSource], stream: EventStream) -> None:
        self.source: Callable[[EventStream], EventSource] | None = source
        self.stream = stream
        self.making: EventSource | None = None
        self.events: Generator[Event, None, None] | None = None

    def begin(self) -> tuple[EventSource, Generator[Event, None, None]]:
        """Return what makes the events and the events, begun in the first turn."""
        if self.making is None or self.events is None:
            assert self.source is not None
            self.making = self.source(self.stream)
            self.events, self.source = self.making.events(), None
        return self.making, self.events


class ReplyScheduler:
    """Asks an engine's MLX thread for replies and for work between them, from any other thread.

    live: measures the reply whose turn it is, or was last; None without one. open: the replies that are being read. Their append,
    remove and copy are atomic: a lock would deadlock where the garbage collector drops an iterator while it is held.
    """

    def __init__(self, worker: Worker) -> None:
        self.live: Callable[[], Live | None] | None = None
        self.open: list[EventStream] = []
        self._worker = worker
        self._ahead = threading.Event()  # ends what is being computed ahead
        self._ahead_lock = threading.Lock()

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run on the thread, between two replies or, as told above, during one."""
        here = threading.get_ident()
        reads = any(stream.reader == here and not stream.ended for stream in list(self.open))
        return self._worker.call(work, hurry=reads)

    def stream(
        self, source: Callable[[EventStream], EventSource], *, opened: Callable[[EventStream], None] = lambda _: None
    ) -> Generator[Event, None, None]:
        """Run ``source`` on the MLX thread and yield its events on this one. Closing the generator ends it.

        opened: given the stream before anything is asked of the thread. Raises OptionError on the MLX thread itself.
        """
        if self._worker.is_here:
            raise OptionError("a reply can't be read on the engine's own thread", "Ask for it outside of between().")
        stream = EventStream()
        opened(stream)
        reply = _OpenReply(source, stream)
        self._ahead.set()
        self.open.append(stream)
        try:
            job = self._worker.submit(lambda: self._pump(reply))
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

    def _pump(self, reply: _OpenReply) -> None:
        """Make events until the end, or until the reader is too far behind."""
        stream = reply.stream
        if stream.is_abandoned() and reply.events is None:
            return
        rests = False
        try:
            making, events = reply.begin()
            self.live = making.live
            if not stream.is_abandoned():
                rests = self._advance(making, events, stream)
            if rests:
                stream.rest(lambda: self._again(reply))
                return
            events.close()
            stream.end()
        except BaseException as error:
            stream.end(computing_error(error) or error)
        finally:
            if not rests:
                self.live = None

    def _advance(self, making: EventSource, events: Generator[Event, None, None], stream: EventStream) -> bool:
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

    def _again(self, reply: _OpenReply) -> None:
        self._ahead.set()
        with contextlib.suppress(EngineClosedError):
            self._worker.submit(lambda: self._pump(reply))


class Cancellable(Protocol):
    """What can be ended from any thread."""

    def cancel(self) -> None:
        """End it."""


class ReplyHandle:
    """Ends one reply, from any thread: before it begins, while it waits for its turn, or while it runs."""

    def __init__(self) -> None:
        self._cancelled = False
        self._stream: EventStream | None = None

    def cancel(self) -> None:
        """End the reply: its reader gets Finished with reason "cancelled"."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def attach(self, stream: EventStream) -> None:
        """The reply was asked for: this carries its events."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()


class ReplyStream(Generator[Event, None, None]):
    """The events of one reply: an iterator, a generator in all it can do, and with ``async for`` one that blocks no event loop.

        for event in engine.generate(prompt): ...
        async for event in engine.generate(prompt): ...

    Stop iterating, or ``close`` it, to end the reply unread. ``cancel`` ends it from any thread, and its reader gets Finished with
    reason "cancelled". Reading it with ``async for``, the reply ends when the task is cancelled or the iterator closed.
    """

    def __init__(self, events: Generator[Event, None, None], handle: Cancellable) -> None:
        self._events = events
        self._handle = handle
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether its last event was read, or it was closed."""
        return self._ended

    def cancel(self) -> None:
        """End this reply alone, from any thread; other replies go on."""
        self._handle.cancel()

    def send(self, value: None) -> Event:
        """Return the next event."""
        with self._noting_the_end():
            return self._events.send(value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        trace: TracebackType | None = None,  # noqa: ARG002  # as every generator takes it
    ) -> Event:
        """Raise an exception where the reply is read."""
        with self._noting_the_end():
            if isinstance(error, BaseException):
                return self._events.throw(error)
            return self._events.throw(kind) if isinstance(kind, BaseException) else self._events.throw(kind, error)

    def close(self) -> None:
        """End the reply; nothing more is read."""
        self._events.close()
        self._ended = True

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Return the same events for a task: each is waited for on a thread that reads this reply alone."""
        return self._awaited()

    async def _awaited(self) -> AsyncGenerator[Event, None]:
        import asyncio  # slow to import, and few need it

        loop = asyncio.get_running_loop()
        reader = ThreadPoolExecutor(1, thread_name_prefix="tokamac-reader")
        try:
            while (event := await loop.run_in_executor(reader, next, self, None)) is not None:
                yield event
        finally:
            self.cancel()  # a step that is still waited for returns
            reader.submit(self.close)
            reader.shutdown(wait=False)

    @contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever leaves a generator, it has ended
            self._ended = True
            raise

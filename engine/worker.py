"""The MLX thread, the only one that touches MLX, and requests from other threads."""

# Replies advance by turns (schedule/schedule.py), calls run in between. A reply too far ahead of its reader
# rests:
# it releases its caches, and goes on when the reader has caught up. Only text lets a reply rest; cancelling,
# closing and dropping the iterator end a rest.

import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .device import end_without_mlx
from .errors import EngineClosedError, OptionError, TokamacError, engine_error
from .events import Event, Live
from .schedule.schedule import EventSource, Pace, Pacing, ReplyEvents, Schedule, Seat
from .schedule.stream import EventStream

T = TypeVar("T")


log = logging.getLogger(__name__)


STUCK_S = 2.0  # given to a thread whose device has failed


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self._work()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # Worker.fail answered already
                self.future.set_exception(engine_error(error) or error)
            return
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(found)


class Worker:
    """A daemon thread that runs callables in order, and ``at_end`` last.

    In between: ``turn`` until it returns None; then idle submissions; then ``when_idle``. Both return the seconds until
    their next call, which work cuts short. An exception in the latter pauses it until the next work.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self.turn: Callable[[], float | None] = lambda: None
        self.when_idle: Callable[[], float | None] = lambda: None
        self.closed = False
        self._failure: TokamacError | None = None
        self._awaited: set[Future[Any]] = set()
        self._at_end = at_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle_jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a collected iterator submits its end, wherever the collector ran
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], T], *, idle: bool = False) -> "Future[T]":
        """Queue ``work``; idle: for when nothing else runs. Raises EngineClosedError, or ``fail``'s error."""
        job = _Job(work)
        with self._lock:
            if self.closed:
                raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
            if self._failure is not None:
                raise self._failure
            if idle:
                self._idle_jobs.put(job)
            self._jobs.put(_Job(lambda: None) if idle else job)  # either wakes the thread
        return job.future

    def call(self, work: Callable[[], T], *, idle: bool = False) -> T:
        """Run ``work`` on the thread and return its result; on the thread itself immediately."""
        if self.is_here:
            return work()
        future: Future[T] = self.submit(work, idle=idle)
        self._awaited.add(future)
        try:
            if self._failure is not None:  # since it was submitted
                raise self._failure
            return future.result()
        except CancelledError:
            assert self._failure is not None  # nobody else cancels what is waited for
            raise self._failure from None
        finally:
            self._awaited.discard(future)
            future.cancel()  # if the caller was interrupted, nobody wants it any more

    def fail(self, error: TokamacError) -> None:
        """Fail all present and future callers with ``error``: the thread may hang for ever."""
        self._failure = error
        for future in list(self._awaited):
            if not future.cancel():
                with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                    future.set_exception(error)

    def leave(self, last: Callable[[], None] | None = None) -> None:
        """Accept no more work; run the queue, then ``last``, without waiting. Idempotent."""
        with self._lock:
            if not self.closed:
                self.closed = True
                if last is not None:
                    self._jobs.put(_Job(last))
                self._jobs.put(None)

    def close(self) -> bool:
        """Finish the queue and end the thread; return whether it ended. Idempotent."""
        self.leave()
        if not self.is_here:
            self._thread.join(None if self._failure is None else STUCK_S)
        return not self._thread.is_alive()

    def _idle(self) -> float | None:
        """Do idle work; an exception in it must not end the thread."""
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
                if (pause := self.turn()) is not None:
                    continue
                try:
                    job = self._idle_jobs.get_nowait()
                except queue.Empty:
                    pause = self._idle()
                    continue
            if job is None:
                break
            job.run()
            del job  # its result may be large, and the wait long
            pause = 0.0
        while not self._idle_jobs.empty():
            self._idle_jobs.get_nowait().run()
        self._at_end()


@dataclass(slots=True)
class TextlessReply:
    compute: Callable[[Pace], ReplyEvents]
    pace: Pace = field(default_factory=Pace)

    def events(self) -> ReplyEvents:
        return self.compute(self.pace)

    def rest(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing: it decodes nothing."""

    def feed(self, token: int, put: Callable[[Event], None]) -> bool:
        raise NotImplementedError

    def live(self) -> None:
        """Return None: nothing is measured."""


class ReplyScheduler:
    """Runs replies and calls on the MLX thread for any other thread."""

    # The open list relies on atomic append, remove and copy: a lock would deadlock where the garbage collector
    # drops an iterator while it is held.

    def __init__(self, worker: Worker) -> None:
        self.open: list[EventStream] = []
        self.schedule = Schedule(self._again)
        self._worker = worker
        worker.turn = self.schedule.turn

    @property
    def live(self) -> Callable[[], Live | None] | None:
        return self.schedule.live

    def call(self, work: Callable[[], T], *, alone: bool = False) -> T:
        """Run ``work`` on the thread between turns; alone: once no reply is running."""
        return self._worker.call(work, idle=alone)

    def stream(self, source: Callable[[EventStream], EventSource]) -> Generator[Event, None, None]:
        """Run ``source`` on the MLX thread, yielding its events here. Raises like ``open_reply``."""
        stream = EventStream()
        try:
            self.open_reply(source, stream)
            yield from stream.read()
        finally:
            stream.abandon()

    def open_reply(
        self, source: Callable[[EventStream], EventSource], stream: EventStream, *, background: bool = False
    ) -> None:
        """Run ``source`` on the MLX thread. Raises OptionError on that thread itself, else as ``begin``."""
        if self._worker.is_here:
            raise OptionError("a reply can't be read on the engine's own thread", "Ask for it outside of between().")
        self.begin(source, stream, background=background)

    def begin(
        self, source: Callable[[EventStream], EventSource], stream: EventStream, *, background: bool = False
    ) -> None:
        """Run ``source`` on the MLX thread. Raises EngineClosedError, or ``fail``'s error."""
        seat = Seat(source, stream, background=background)
        if stream not in self.open:
            self.expect(stream)
        try:
            self._worker.submit(lambda: self.schedule.add(seat))
        except TokamacError:
            self._forget(stream)
            raise

    def expect(self, stream: EventStream) -> None:
        """Let ``cancel`` and ``close`` reach a reply whose prompt is still prepared."""
        self.open.append(stream)
        stream.when_over = lambda: self._forget(stream)
        if self.schedule.pacing is not None:
            stream.when_cancelled = self._wake

    def pace(self, pacing: Pacing | None) -> None:
        self.schedule.pacing = pacing
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(TokamacError):  # it is closed, or has failed
            self._worker.submit(lambda: None)

    def _forget(self, stream: EventStream) -> None:
        stream.when_over = stream.when_cancelled = lambda: None  # it referred to the stream itself
        with contextlib.suppress(ValueError):  # it is over already
            self.open.remove(stream)

    def steps(self, make: Callable[[threading.Event], Generator[T, None, None]]) -> Generator[T, None, None]:
        stopped = threading.Event()
        steps = self.call(lambda: make(stopped))
        try:
            while (step := self.call(lambda: next(steps, None), alone=True)) is not None:
                yield step
        finally:
            stopped.set()
            with contextlib.suppress(TokamacError):  # it is closed, or has failed
                self._worker.submit(steps.close)  # on the thread that runs it

    def cancel(self) -> None:
        for stream in list(self.open):
            stream.cancel()

    def fail(self, error: TokamacError) -> None:
        self._worker.fail(error)
        for stream in list(self.open):
            stream.close(error)

    def close(self, last: Callable[[], None], *, wait: bool = True) -> None:
        """End all replies (readers get EngineClosedError), run ``last``, stop the thread. Idempotent."""
        self._end_all()

        def ended() -> None:
            self.schedule.end_all()
            last()

        self._worker.leave(ended)
        self._end_all()  # those that were begun meanwhile
        if wait and not self._worker.close():
            atexit.register(end_without_mlx)

    def _end_all(self) -> None:
        for stream in list(self.open):
            stream.close()

    def _again(self, seat: Seat) -> None:
        with contextlib.suppress(TokamacError):  # it is closed, or has failed
            self._worker.submit(lambda: self.schedule.add(seat))

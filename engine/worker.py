"""The MLX thread: the one thread that touches MLX, and what other threads ask of it.

Replies are made there a turn at a time (schedule/schedule.py), and calls run between two turns. A reply may be some way ahead of
its reader; then it rests, and goes on once the reader has caught up. So nobody waits for a reader who has paused:

- A reply that rests releases its caches to the prompt cache. What is evicted meanwhile is computed again.
- Only text lets a reply rest: a prompt is read to its end, since its progress is few events.
- Cancelling, closing, and dropping the iterator end a rest.
"""

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
from .schedule.policy import Pace
from .schedule.schedule import EventSource, ReplyEvents, Schedule, Seat
from .schedule.stream import EventStream

T = TypeVar("T")


log = logging.getLogger(__name__)


STUCK_S = 2.0
"""Given to a thread whose device has failed."""


class _Job:
    """Work for the thread, and where its result goes."""

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
    """A daemon thread that runs callables one after another, and ``at_end`` after the last of them.

    Between them, while none waits, it calls ``turn``, which does a part of what runs all the time, and says whether there is more.
    Once there is no more, those that asked for an idle thread run; and then ``when_idle`` is called, which does a little work and
    returns after how many seconds to call it again, or None. Where that raises, the failure is logged, and it is not called again
    before the next work.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self.turn: Callable[[], bool] = lambda: False
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
        """Whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], T], *, idle: bool = False) -> "Future[T]":
        """Queue ``work``; its result or exception arrives in the future. idle: for when there is nothing else to do.

        Raises EngineClosedError after ``close``, and what ``fail`` was told after that.
        """
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
        """Run ``work`` on the thread and return its result. On the thread itself ``work`` runs at once."""
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
        """Answer with ``error`` whoever waits, or will ask: the thread may wait for ever for what does not come."""
        self._failure = error
        for future in list(self._awaited):
            if not future.cancel():
                with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                    future.set_exception(error)

    def leave(self, last: Callable[[], None] | None = None) -> None:
        """Take no more work; what is queued still runs, then ``last``, and is not waited for. Safe to call again."""
        with self._lock:
            if not self.closed:
                self.closed = True
                if last is not None:
                    self._jobs.put(_Job(last))
                self._jobs.put(None)

    def close(self) -> bool:
        """Let what is queued finish, then end the thread; return whether it has. Safe to call again."""
        self.leave()
        if not self.is_here:
            self._thread.join(None if self._failure is None else STUCK_S)
        return not self._thread.is_alive()

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
                pause = 0.0
                if self.turn():
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
    """Events without text, which are few: they never rest. pace: asked by what computes them."""

    of: Callable[[Pace], ReplyEvents]
    pace: Pace = field(default_factory=Pace)

    def events(self) -> ReplyEvents:
        """Return them."""
        return self.of(self.pace)

    def rest(self) -> None:
        """Nothing to do."""

    def drop(self) -> None:
        """Nothing to do: they decode nothing."""

    def live(self) -> None:
        """Nothing is measured."""


class ReplyScheduler:
    """Asks an engine's MLX thread for replies and for work between their turns, from any other thread.

    open: the replies that are being read. Their append, remove and copy are atomic: a lock would deadlock where the garbage
    collector drops an iterator while it is held.
    """

    def __init__(self, worker: Worker) -> None:
        self.open: list[EventStream] = []
        self.schedule = Schedule(self._again)
        self._worker = worker
        worker.turn = self._turn

    @property
    def live(self) -> Callable[[], Live | None] | None:
        """What measures the reply in progress; None without one."""
        return self.schedule.live

    def _turn(self) -> bool:
        """Take a turn. What fails beside all replies must not end the thread, which everybody waits for: it ends them."""
        try:
            return self.schedule.turn()
        except BaseException as error:
            log.exception("the schedule failed")
            self.schedule.fail_all(error)
            return False

    def call(self, work: Callable[[], T], *, alone: bool = False) -> T:
        """Return what ``work`` returns, run on the thread between two turns; alone: once no reply is being made."""
        return self._worker.call(work, idle=alone)

    def stream(
        self,
        source: Callable[[EventStream], EventSource],
        *,
        opened: Callable[[EventStream], None] = lambda _: None,
        background: bool = False,
    ) -> Generator[Event, None, None]:
        """Run ``source`` on the MLX thread and yield its events on this one. Closing the generator ends it.

        opened: given the stream before anything is asked of the thread. Raises like ``open_reply``.
        """
        stream = EventStream()
        opened(stream)
        try:
            self.open_reply(source, stream, background=background)
            yield from stream.read()
        finally:
            stream.abandon()

    def open_reply(
        self, source: Callable[[EventStream], EventSource], stream: EventStream, *, background: bool = False
    ) -> None:
        """Have ``source`` run on the MLX thread; its events go to ``stream``, whose reader takes them.

        Raises OptionError on the MLX thread itself, and what ``begin`` raises.
        """
        if self._worker.is_here:
            raise OptionError("a reply can't be read on the engine's own thread", "Ask for it outside of between().")
        self.begin(source, stream, background=background)

    def begin(
        self, source: Callable[[EventStream], EventSource], stream: EventStream, *, background: bool = False
    ) -> None:
        """Have ``source`` run on the MLX thread; its events go to ``stream``, which is open until its end or its last cancel.

        Raises EngineClosedError, and what ``fail`` was told.
        """
        seat = Seat(source, stream, background=background)
        self.open.append(stream)
        stream.when_over = lambda: self._forget(stream)
        try:
            self._worker.submit(lambda: self.schedule.add(seat))
        except TokamacError:
            self._forget(stream)
            raise

    def _forget(self, stream: EventStream) -> None:
        stream.when_over = lambda: None  # it referred to the stream itself
        with contextlib.suppress(ValueError):  # it is over already
            self.open.remove(stream)

    def steps(self, make: Callable[[threading.Event], Generator[T, None, None]]) -> Generator[T, None, None]:
        """Run a generator on the engine's thread, a step at a time, and yield its values on this one.

        make: makes it, given what is set when it should end.
        """
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
        """End the replies in progress and those that wait: readers get Finished with reason "cancelled"."""
        for stream in list(self.open):
            stream.cancel()

    def fail(self, error: TokamacError) -> None:
        """End all replies and calls, whose callers get ``error``, as do those to come."""
        self._worker.fail(error)
        for stream in list(self.open):
            stream.close(error)

    def close(self, last: Callable[[], None], *, wait: bool = True) -> None:
        """End all replies (their readers get EngineClosedError), then run ``last``, and stop the thread. Safe to call again."""
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

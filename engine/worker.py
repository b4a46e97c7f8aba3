"""The one thread that touches MLX. Work is handed to it; results come back as futures, replies as streams of events."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tokamac.engine.compute_errors import engine_error
from tokamac.engine.errors import EngineClosedError
from tokamac.engine.events import Event, TextChunk

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_AHEAD = 128
"""Batches of events a reply may be ahead of its reader; then it rests until the reader has caught up with half of them."""

HAND_OVER_S = 1 / 60
"""Text is handed over so often at most: to wake the reader takes the engine's thread a good part of a small model's step."""


class Stream:
    """Events on their way from the engine's thread to a reader's. Either side may end it; neither ever waits to hand over.

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
        self.abandon()
        self._batches.put(EngineClosedError("the engine was closed", "Load it again with Engine.load."))

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

"""The one thread that touches MLX. Work is handed to it; results come back as futures, replies as streams of events."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from tokamac.engine.errors import EngineClosedError
from tokamac.engine.events import Event, TextChunk

T = TypeVar("T")

LOOK_AHEAD = 128
"""Batches of events a reply may be ahead of its reader; then the engine waits."""

HAND_OVER_S = 1 / 60
"""Text is handed over so often at most: to wake the reader takes the engine's thread a good part of a small model's step."""


class Stream:
    """Events on their way from the engine's thread to a reader's. Either side may end it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batches: queue.SimpleQueue[list[Event] | BaseException | None] = queue.SimpleQueue()
        self._waiting: list[Event] = []
        self._handed_s = 0.0
        self._moved = threading.Event()
        self.cancelled = False
        self._abandoned = False

    def cancel(self) -> None:
        """Ask the engine to end the reply; the reader still gets its Finished event."""
        self.cancelled = True

    def is_cancelled(self) -> bool:
        """Whether the reply should end."""
        return self.cancelled

    def is_abandoned(self) -> bool:
        """Whether nobody reads any more."""
        return self._abandoned

    def abandon(self) -> None:
        """The reader is gone: end the reply, and don't wait for anyone."""
        self._abandoned = self.cancelled = True
        self._moved.set()

    def close(self) -> None:
        """The engine goes away: end the reply, and tell its reader so."""
        self.abandon()
        self._batches.put(EngineClosedError("the engine was closed", "Load it again with Engine.load."))

    def put(self, event: Event) -> None:
        """Hand over an event: text with what follows within ``HAND_OVER_S``, all else at once."""
        self._waiting.append(event)
        if not isinstance(event, TextChunk) or self._clock() - self._handed_s >= HAND_OVER_S:
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake the reader; waits while it is too far behind."""
        while self._batches.qsize() >= LOOK_AHEAD and not self._abandoned:
            self._moved.clear()
            self._moved.wait(0.1)
        self._batches.put(self._waiting)
        self._waiting = []
        self._handed_s = self._clock()

    def end(self, failure: BaseException | None = None) -> None:
        """No more will come; a failure is raised in the reader, after what it was to read before."""
        self._hand_over()
        self._batches.put(failure)

    def read(self) -> Iterator[Event]:
        """Yield events until the end; raises the engine's failure, if there was one."""
        while (batch := self._batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            self._moved.set()
            yield from batch


class Worker:
    """A daemon thread that runs callables one after another, and ``at_end`` after the last of them.

    ``when_idle`` is called after them, while none waits: it does a little work and returns after how many seconds to call it again,
    or None. It must not raise.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self.when_idle: Callable[[], float | None] = lambda: None
        self._at_end = at_end
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queue ``work``; its result or exception arrives in the future. Raises EngineClosedError after ``close``."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed", "Load it again with Engine.load.")
            self._jobs.put(job)
        return future

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread and return its result."""
        return self.submit(work).result()

    def leave(self) -> None:
        """Take no more work; what is queued still runs, and is not waited for. Safe to call again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def close(self) -> None:
        """Let what is queued finish, then end the thread. Safe to call again."""
        self.leave()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pause: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=pause)
            except queue.Empty:
                pause = self.when_idle()
                continue
            if job is None:
                break
            job()
            del job  # its result may be large, and the wait long
            pause = 0.0
        self._at_end()

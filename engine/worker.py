"""The one thread that touches MLX. Work is handed to it; results come back as futures, replies as streams of events."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from tokamac.engine.errors import EngineClosedError
from tokamac.engine.events import Event

T = TypeVar("T")

LOOK_AHEAD = 256
"""Events a reply may be ahead of its reader; then the engine waits."""


class Stream:
    """Events on their way from the engine's thread to a reader's. Either side may end it."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
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
        self._events.put(EngineClosedError("the engine was closed", "Load it again with Engine.load."))

    def put(self, event: Event) -> None:
        """Hand over an event; waits while the reader is too far behind."""
        while self._events.qsize() >= LOOK_AHEAD and not self._abandoned:
            self._moved.clear()
            self._moved.wait(0.1)
        self._events.put(event)

    def end(self, failure: BaseException | None = None) -> None:
        """No more will come; a failure is raised in the reader."""
        self._events.put(failure)

    def read(self) -> Iterator[Event]:
        """Yield events until the end; raises the engine's failure, if there was one."""
        while True:
            item = self._events.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self._moved.set()
            yield item


class Worker:
    """A daemon thread that runs callables one after another, and ``at_end`` after the last of them."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
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
        while (job := self._jobs.get()) is not None:
            job()
            del job  # its result may be large, and the wait long
        self._at_end()

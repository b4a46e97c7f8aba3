"""The replies of an engine on their way from its thread to their readers, and what else is asked of that thread meanwhile.

The thread makes one reply at a time; another waits for its turn. A reply may be some way ahead of its reader, then it waits for
it. Nothing else waits for ever because of that:

- A call made by the very thread that reads the reply is answered after the reply's next event.
- A reply that waits for its reader lets all calls go first.
- It does not wait while another reply does: it is made to its end, and read later. One that has no end can't be, so the thread
  that reads it is refused another one.
- Cancelling, closing, and letting go of the iterator end the wait.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

from tokamac.engine.compute_errors import computing_error
from tokamac.engine.errors import EngineClosedError, OptionError
from tokamac.engine.events import Event, Live
from tokamac.engine.worker import Stream, Worker

T = TypeVar("T")


class Replies:
    """What is asked of an engine's thread, from any other.

    live: measures the reply in progress; None without one. open: the replies that are read, the running one's first, then those
    that wait; append, remove and copying are atomic. No lock stands around them, for a collected iterator leaves it wherever the
    collector runs.
    """

    def __init__(self, worker: Worker) -> None:
        self.live: Callable[[], Live] | None = None
        self.open: list[Stream] = []
        self._worker = worker
        self._ahead = threading.Event()  # ends what is being computed ahead
        self._ahead_lock = threading.Lock()
        worker.when_asked = self._nudge

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run on the thread, between two replies or, as told above, during one."""
        here = threading.get_ident()
        reads = any(stream.reader == here and not stream.ended for stream in list(self.open))
        return self._worker.call(work, hurry=reads)

    def stream(
        self,
        source: Callable[[Stream], Generator[Event, None, None]],
        *,
        endless: bool = False,
        opened: Callable[[Stream], None] = lambda _: None,
    ) -> Generator[Event, None, None]:
        """Run ``source`` on the engine's thread and yield its events on this one. Closing the generator ends it.

        opened: told of what carries the events, before anything is asked of the thread.
        Raises OptionError on the engine's own thread, and on one that still reads a reply without an end.
        """
        self._check_reader()
        stream = Stream(meanwhile=lambda: self._worker.answer() and not endless, endless=endless)
        opened(stream)
        self._ahead.set()
        self.open.append(stream)
        try:
            job = self._worker.submit(lambda: self._pump(source, stream))
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
        with contextlib.suppress(EngineClosedError):  # by an earlier call
            self._worker.submit(last)
        self._worker.leave()
        for stream in list(self.open):
            stream.close()
        if wait:
            self._worker.close()

    def _nudge(self) -> None:
        """Something was asked of the thread: a reply that waits for its reader must look."""
        for stream in list(self.open):
            stream.nudge()

    def _check_reader(self) -> None:
        if self._worker.is_here:
            raise OptionError("a reply can't be read on the engine's own thread", "Ask for it outside of between().")
        here = threading.get_ident()
        if any(stream.endless and stream.reader == here and not stream.ended for stream in list(self.open)):
            raise OptionError(
                "this thread still reads a reply that has no end: its window rolls, and max_tokens is None",
                "Close that iterator first, or give the reply max_tokens.",
            )

    def _pump(self, source: Callable[[Stream], Generator[Event, None, None]], stream: Stream) -> None:
        if stream.is_abandoned():
            return
        try:
            with contextlib.closing(source(stream)) as events:
                for event in events:
                    if stream.is_abandoned():
                        break
                    stream.put(event)
                    if self._worker.hurried:
                        self._worker.answer()
            stream.end()
        except BaseException as error:
            stream.end(computing_error(error) or error)
        finally:
            self.live = None

"""How the events of a reply get from the MLX thread to its reader, and what a program holds of a reply."""

import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from ..errors import EngineClosedError, TokamacError
from ..events import Event, Live, Piece

LOOK_AHEAD = 128
"""Batches of events a reply may be ahead of its reader; then it rests until the reader has caught up with half of them."""

HAND_OVER_S = 1 / 60
"""Text is handed over so often at most: to wake the reader takes the engine's thread a good part of a small model's step."""


class EventStream:
    """The events of one reply on their way from the MLX thread to a reader's. Either side may end it; neither waits to hand over.

    announce: called after each batch that is handed over. when_over: called, by either side, once nothing more is to come of it.
    reader: the thread that read last; None before one did. ended: whether all of it is on its way.
    live: what measures the reply, from its first turn to its end.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, announce: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._announce = announce
        self.when_over: Callable[[], None] = lambda: None
        self.live: Callable[[], Live | None] = _unmeasured
        self._batches: queue.SimpleQueue[list[Event] | BaseException | None] = queue.SimpleQueue()
        self._waiting: list[Event] = []
        self._handed_s = -HAND_OVER_S
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
        self._over()

    def close(self, why: TokamacError | None = None) -> None:
        """The engine goes away: end the reply, and tell its reader so, or why."""
        # Before the thread hears of it, and ends the reply for good: its reader is to learn why.
        self._put(why or EngineClosedError("the engine was closed", "Load it again with Engine.load."))
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
        """Hand over an event: text with what follows within ``HAND_OVER_S`` of earlier text, all else at once."""
        self._waiting.append(event)
        if isinstance(event, Piece):
            now = self._clock()
            if now - self._handed_s < HAND_OVER_S:
                return
            self._handed_s = now
        self._hand_over()

    def _hand_over(self) -> None:
        """Wake the reader."""
        self._put(self._waiting)
        self._waiting = []

    def end(self, failure: BaseException | None = None) -> None:
        """No more will come; a failure is raised in the reader, after what it was to read before."""
        self._hand_over()
        self.ended = True
        self._over()
        self._put(failure)

    def _over(self) -> None:
        self.live = _unmeasured  # what measures holds all that computes
        self.when_over()

    def _put(self, batch: list[Event] | BaseException | None) -> None:
        self._batches.put(batch)
        self._announce()

    def read(self) -> Iterator[Event]:
        """Yield events until the end; raises the engine's failure, if there was one."""
        while (batch := self.take()) is not None:
            yield from batch

    def take(self) -> list[Event] | None:
        """Wait for the next events; None at the end. Raises the engine's failure, if there was one."""
        self.reader = threading.get_ident()
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        if self._has_caught_up():
            self._wake()
        return batch


def _unmeasured() -> None:
    """Of a reply that has not begun, or is over."""


class ReplyControl(Protocol):
    """What can be done with one reply from any thread."""

    def cancel(self) -> None:
        """End it."""

    def live(self) -> Live | None:
        """Return what is measured of it so far; None where it has not begun, or is over."""


class ReplyHandle:
    """Ends and measures one reply, from any thread: before it begins, while it waits for its turn, or while it runs."""

    def __init__(self) -> None:
        self._cancelled = False
        self._stream: EventStream | None = None

    def cancel(self) -> None:
        """End the reply: its reader gets Finished with reason "cancelled"."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def live(self) -> Live | None:
        """Return what is measured so far."""
        return None if self._stream is None else self._stream.live()

    def attach(self, stream: EventStream) -> None:
        """The reply was asked for: this carries its events."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()


class ReplyStream(Generator[Event, None, None]):
    """The events of one reply: an iterator, a generator in all it can do, and with ``async for`` one that blocks no event loop.

        for event in engine.generate(prompt): ...
        async for event in engine.generate(prompt): ...

    Stop iterating, or ``close`` it, to end the reply unread. From any thread, ``cancel`` ends it, and its reader gets Finished with
    reason "cancelled"; ``live`` measures it. Reading it with ``async for``, the reply ends when the task is cancelled or the
    iterator closed.
    """

    def __init__(self, events: Generator[Event, None, None], handle: ReplyControl) -> None:
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

    def live(self) -> Live | None:
        """Return what is measured of this reply so far; None before it has begun and after its end. Callable from any thread."""
        return self._handle.live()

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

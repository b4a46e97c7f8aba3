"""A reply as its reader holds it: events one after another, for a thread or for a task, and a handle that ends this reply alone."""

from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from tokamac.engine.events import Event
from tokamac.engine.worker import Stream


class Cancellable(Protocol):
    """What can be ended from any thread."""

    def cancel(self) -> None:
        """End it."""


class ReplyHandle:
    """Ends one reply, from any thread: before it begins, while it waits for its turn, or while it runs."""

    def __init__(self) -> None:
        self._cancelled = False
        self._stream: Stream | None = None

    def cancel(self) -> None:
        """End the reply: its reader gets Finished with reason "cancelled"."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def attach(self, stream: Stream) -> None:
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
        self._ended = True
        self._events.close()

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

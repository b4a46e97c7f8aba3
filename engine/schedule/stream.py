"""How a reply's events get from the MLX thread to its reader, and the reader's controls."""

import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from ..errors import EngineClosedError, TokamacError
from ..events import Event, Failed, Finished, Live, Piece

# Batches of events a reply may be ahead of its reader; then it rests until the reader has caught up with half of them.
LOOK_AHEAD = 128

# The engine's thread lets go of the interpreter for so long after a reply's first text: else its reader would wait for
# the launch of the next step, which takes milliseconds of Python.
AT_ONCE_S = 5e-5

# Text is handed over so often at most: to wake the reader takes the engine's thread a good part of a small model's
# step.
HAND_OVER_S = 1 / 60


class EventStream:
    """The events of one reply between the MLX thread and a reader; neither blocks to hand over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, announce: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._announce = announce
        self.when_over: Callable[[], None] = lambda: None
        self.when_cancelled: Callable[[], None] = lambda: None
        self.live: Callable[[], Live | None] = _unmeasured
        self._batches: queue.SimpleQueue[list[Event] | BaseException | None] = queue.SimpleQueue()
        self._waiting: list[Event] = []
        self._handed_s = -HAND_OVER_S
        self._resting: list[Callable[[], None]] = []  # one at most; whoever pops it, which is atomic, calls it
        self.reader: int | None = None
        self.ended = False
        self.cancelled = self.ahead = self._has_begun = False
        self._keeps_going = False
        self._abandoned = False

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()
        self.when_cancelled()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def keep_going(self) -> None:
        self._keeps_going = True

    def keeps_going(self) -> bool:
        return self._keeps_going

    def is_abandoned(self) -> bool:
        return self._abandoned

    def abandon(self) -> None:
        self._abandoned = True
        self.cancel()
        self._over()

    def close(self, why: TokamacError | None = None) -> None:
        # Before the thread hears of it, and ends the reply for good: its reader is to learn why.
        self._put(why or EngineClosedError("the engine was closed", "Load it again with Engine.load."))
        self.abandon()

    def rest(self, again: Callable[[], None]) -> None:
        """Call ``again`` once, from any thread, when the reader has caught up or the reply is to end."""
        self.ahead = False
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
        """Hand over an event: text batched within ``HAND_OVER_S``, all else immediately."""
        self._waiting.append(event)
        if isinstance(event, Piece):
            now = self._clock()
            if now - self._handed_s < HAND_OVER_S:
                return
            self._handed_s = now
        self._batches.put(self._waiting)
        self._waiting = []
        if self._announce is not None:
            self._announce()
        self.ahead = self._batches.qsize() >= LOOK_AHEAD and not self.cancelled
        if not self._has_begun and isinstance(event, Piece):
            self._has_begun = True
            time.sleep(AT_ONCE_S)

    def end(self, failure: BaseException | None = None) -> None:
        self._put(self._waiting)
        self._waiting = []
        self.ended = True
        self._over()
        self._put(failure)

    def _over(self) -> None:
        self.live = _unmeasured  # what measures holds all that computes
        self.when_over()

    def _put(self, batch: list[Event] | BaseException | None) -> None:
        self._batches.put(batch)
        if self._announce is not None:
            self._announce()

    def read(self) -> Iterator[Event]:
        """Yield events until the end; raises the engine's failure."""
        while (batch := self.next_batch()) is not None:
            yield from batch

    def next_batch(self) -> list[Event] | None:
        """Wait for the next events; None at the end. Raises the engine's failure."""
        self.reader = threading.get_ident()
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        if self._resting and self._has_caught_up():
            self._wake()
        return batch


def _unmeasured() -> None:
    """Return None: the reply has not begun, or is over."""


class ReplyHandle:
    """Controls one reply from any thread: before it begins, while queued, or running."""

    def __init__(self) -> None:
        self._cancelled = self._keeps_going = False
        self._stream: EventStream | None = None

    def cancel(self) -> None:
        """End the reply: its reader gets Finished with reason "cancelled"."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def keep_going(self) -> None:
        self._keeps_going = True
        if self._stream is not None:
            self._stream.keep_going()

    def live(self) -> Live | None:
        return None if self._stream is None else self._stream.live()

    def attach(self, stream: EventStream) -> None:
        self._stream = stream
        if self._cancelled:
            stream.cancel()
        if self._keeps_going:
            stream.keep_going()


class ReplyStream(Generator[Event, None, None]):
    """The events of one reply: a generator, and with ``async for`` one that blocks no event loop.

        for event in engine.generate(prompt): ...
        async for event in engine.generate(prompt): ...

    Stop iterating, or ``close`` it, to end the reply unread. ``cancel`` ends it from any thread with Finished,
    reason "cancelled". With ``async for``, cancelling the task or closing the iterator ends the reply.
    """

    def __init__(self, events: Generator[Event, None, None], handle: "ReplyHandle | ReplyStream") -> None:
        self._events = events
        self._handle = handle
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether its last event was read, or it was closed."""
        return self._ended

    def cancel(self) -> None:
        """End this reply alone, from any thread."""
        self._handle.cancel()

    def keep_going(self) -> None:
        """Let this reply go on despite repetition (LoopFound), from any thread."""
        self._handle.keep_going()

    def live(self) -> Live | None:
        """Return live figures; None before its start and after its end. Any thread."""
        return self._handle.live()

    def __next__(self) -> Event:
        try:
            return next(self._events)
        except BaseException:  # whatever leaves a generator, it has ended
            self._ended = True
            raise

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
        """Return the same events for a task, each awaited on a thread of this reply."""
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


# Prompts that are asked for at once, as a multiple of the replies that are made at once: so that none waits for the
# loop.
AT_ONCE = 2

# Ask the engine for sample `j` of prompt `i`, whose events go to the stream. Raises TokamacError.
Ask = Callable[[EventStream, int, int], None]


@dataclass(slots=True)
class _Open:
    prompt: int
    sample: int
    stream: EventStream
    begun: bool = False


class ManyReplies:
    """Requests ``samples`` replies to each of many prompts and merges their events.

    One cancelled reply cancels all; those not begun still report their end. width: replies in parallel.
    """

    # A prompt's first sample prefills it; the others begin then, and hit the prompt cache.

    def __init__(self, prompts: Iterable[int], samples: int, ask: Ask, width: int) -> None:
        self._ask, self._samples = ask, samples
        self._most = AT_ONCE * width
        self._ready: queue.SimpleQueue[_Open] = queue.SimpleQueue()
        self._open: list[_Open] = []
        self._left = iter(prompts)
        self._waiting: list[tuple[int, int]] = []
        self._is_cancelled = False

    def events(self) -> Generator[tuple[int, int, Event | Failed], None, None]:
        """Yield (prompt, sample, event); each reply ends with one Finished or Failed. Closing ends all."""
        try:
            while True:
                yield from self._begin()
                if not self._open:
                    return
                yield from self._read(self._ready.get())
        finally:
            for each in self._open:
                each.stream.abandon()

    def _begin(self) -> Iterator[tuple[int, int, Failed]]:
        while len(self._open) < self._most:
            if self._waiting:
                prompt, sample = self._waiting.pop(0)
            elif (following := next(self._left, None)) is not None:
                prompt, sample = following, 0
            else:
                return
            reply = self._new(prompt, sample)
            try:
                self._ask(reply.stream, prompt, sample)
            except TokamacError as error:
                self._has_read(reply)
                yield prompt, sample, Failed(error)
                continue
            self._open.append(reply)

    def _new(self, prompt: int, sample: int) -> _Open:
        reply = _Open(prompt, sample, EventStream(announce=lambda: self._ready.put(reply)))
        self._look()
        if self._is_cancelled:
            reply.stream.cancel()
        return reply

    def _read(self, reply: _Open) -> Iterator[tuple[int, int, Event | Failed]]:
        if reply not in self._open:
            return
        try:
            batch = reply.stream.next_batch()
        except TokamacError as error:
            self._end(reply)
            yield reply.prompt, reply.sample, Failed(error)
            return
        if batch is None:
            self._end(reply)
            return
        for event in batch:
            if isinstance(event, Piece | Finished):
                self._has_read(reply)
            yield reply.prompt, reply.sample, event

    def _look(self) -> None:
        self._is_cancelled = self._is_cancelled or any(each.stream.is_cancelled() for each in self._open)

    def _has_read(self, reply: _Open) -> None:
        if not reply.begun:
            reply.begun = True
            if reply.sample == 0:
                self._waiting[:0] = [(reply.prompt, sample) for sample in range(1, self._samples)]

    def _end(self, reply: _Open) -> None:
        self._look()
        self._open.remove(reply)
        self._has_read(reply)

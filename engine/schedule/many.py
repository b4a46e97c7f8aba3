"""Many replies read by one loop: prompts one after another, as many at once as the engine makes, and their events as they come."""

import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from ..errors import TokamacError
from ..events import Event, Failed, Finished, Piece
from .stream import EventStream

AT_ONCE = 2
"""Prompts that are asked for at once, as a multiple of the replies that are made at once: so that none waits for the loop."""

Ask = Callable[[EventStream, int, int], None]
"""Ask the engine for sample ``j`` of prompt ``i``, whose events go to the stream. Raises TokamacError."""


@dataclass(slots=True)
class _Open:
    """A reply that is being made. begun: whether its prompt has been read."""

    prompt: int
    sample: int
    stream: EventStream
    begun: bool = False


class ManyReplies:
    """Asks for ``samples`` replies to each of so many prompts, and tells what comes.

    The first sample of a prompt reads it; the others begin then, and find it in the prompt cache. Once one was cancelled, all are:
    each that had not begun still has its end told.

    Args:
        prompts: their numbers, in order.
        samples: of each.
        ask: asks for one.
        width: replies that are made at once.
    """

    def __init__(self, prompts: Iterable[int], samples: int, ask: Ask, width: int) -> None:
        self._ask, self._samples = ask, samples
        self._most = AT_ONCE * width
        self._ready: queue.SimpleQueue[_Open] = queue.SimpleQueue()
        self._open: list[_Open] = []
        self._left = iter(prompts)
        self._waiting: list[tuple[int, int]] = []
        self._is_cancelled = False

    def events(self) -> Generator[tuple[int, int, Event | Failed], None, None]:
        """Yield (prompt, sample, event) as they come; each reply ends with one Finished or one Failed. Closing ends all."""
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
        """Ask for as many as may be open; yield those that can't be asked for."""
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
        """Return a reply that nobody was asked for yet; what it hands over makes it ready to be read."""
        reply = _Open(prompt, sample, EventStream(announce=lambda: self._ready.put(reply)))
        self._look()
        if self._is_cancelled:
            reply.stream.cancel()
        return reply

    def _read(self, reply: _Open) -> Iterator[tuple[int, int, Event | Failed]]:
        """Yield what one reply has handed over."""
        if reply not in self._open:
            return
        try:
            batch = reply.stream.take()
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
        """Look whether one that is open was cancelled."""
        self._is_cancelled = self._is_cancelled or any(each.stream.is_cancelled() for each in self._open)

    def _has_read(self, reply: _Open) -> None:
        """Let the prompt's other samples begin: it is in the prompt cache now, or never will be."""
        if not reply.begun:
            reply.begun = True
            if reply.sample == 0:
                self._waiting[:0] = [(reply.prompt, sample) for sample in range(1, self._samples)]

    def _end(self, reply: _Open) -> None:
        self._look()
        self._open.remove(reply)
        self._has_read(reply)

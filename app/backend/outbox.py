"""The child's way out: whole lines, text in batches, and a pulse while it works.

A token a line would wake the screen hundreds of times a second, and each wake costs the model's process a system call.
So text waits for up to ``flush_s``, with the measurements following more rarely; when idle, nothing wakes at all.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from tokamac.engine.events import Piece, TextChunk, ToolCallDelta

from .protocol import EngineMessage, Heartbeat, ReplyEvent, encode

FLUSH_S = 1 / 15
FLUSH_BESIDE_S: dict[str, float] = {"cpu": 0.2}
"""Where the model computes on the same cores as the screen, which each wake takes a millisecond of."""
STATS_S = 0.4
HEARTBEAT_S = 1.0


class Outbox:
    """Writes messages to a file descriptor. Any thread may call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, list[Piece]]] = []  # a reply, and text of it that is all of one kind
        self._flushed = 0.0
        self.flush_s = FLUSH_S

    def suit(self, device: str, text_every_s: float | None = None) -> None:
        """Batch text for so long; None is as is best for a screen while ``device`` computes."""
        self.flush_s = FLUSH_BESIDE_S.get(device, FLUSH_S) if text_every_s is None else text_every_s

    def put(self, message: EngineMessage) -> None:
        """Write ``message`` after any text that waits; text itself now, or with what follows within ``flush_s``."""
        with self._lock:
            if isinstance(message, ReplyEvent) and isinstance(message.event, Piece):
                self._wait(message.id, message.event)
            else:
                self._flush(message)

    def flush(self) -> None:
        """Write the text that waits."""
        with self._lock:
            self._flush()

    def _wait(self, reply: int, piece: Piece) -> None:
        """Have text wait with what waits of the same reply, whatever other replies said meanwhile: each batch wakes the screen."""
        last = next((pieces for of, pieces in reversed(self._waiting) if of == reply), None)
        if last is not None and _kind(last[0]) == _kind(piece):
            last.append(piece)
        else:
            self._waiting.append((reply, [piece]))
        if time.monotonic() - self._flushed >= self.flush_s:
            self._flush()

    def _flush(self, *then: EngineMessage) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._flushed = time.monotonic()
        if waiting or then:
            self._write(*(ReplyEvent(reply, _joined(pieces)) for reply, pieces in waiting), *then)

    def _write(self, *messages: EngineMessage) -> None:
        lines = memoryview(b"".join(encode(message) for message in messages))
        while lines:
            lines = lines[os.write(self._fd, lines) :]


def _kind(piece: Piece) -> tuple[type, str]:
    """Return what pieces have in common that can be told as one: none of another call comes between those of a call."""
    return type(piece), piece.kind if isinstance(piece, TextChunk) else piece.id


def _joined(pieces: list[Piece]) -> Piece:
    calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    if calls:
        return replace(calls[0], arguments="".join(piece.arguments for piece in calls))
    chunks = [piece for piece in pieces if isinstance(piece, TextChunk)]
    return TextChunk(
        "".join(chunk.text for chunk in chunks),
        chunks[0].kind,
        tuple(chain.from_iterable(chunk.ids for chunk in chunks)),
        tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        tuple(_guessed(chunks)),
    )


def _guessed(chunks: list[TextChunk]) -> Iterator[tuple[int, int]]:
    """Yield which characters of all chunks together were guessed; those that follow each other as one range."""
    at, last = 0, (0, 0)
    for chunk in chunks:
        for start, end in chunk.guessed:
            if at + start > last[1]:
                if last[1]:
                    yield last
                last = at + start, at + end
            else:
                last = last[0], at + end
        at += len(chunk.text)
    if last[1]:
        yield last


class Pulse:
    """A thread that flushes text, sends measurements and beats while anything works: from each ``start`` to its ``stop``."""

    def __init__(self, outbox: Outbox, measurements: Callable[[], list[ReplyEvent]]) -> None:
        self._outbox = outbox
        self._measurements = measurements
        self._lock = threading.Lock()
        self._works = 0
        self._closed = False
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def start(self) -> None:
        """Something begins to work."""
        with self._lock:
            self._works += 1
            self._busy.set()

    def stop(self) -> None:
        """It has ended."""
        with self._lock:
            self._works -= 1
            if not self._works and not self._closed:
                self._busy.clear()

    def close(self) -> None:
        """End the thread, though something still works."""
        with self._lock:
            self._closed = True
            self._busy.set()

    def _run(self) -> None:
        beat = stats = 0.0
        while self._busy.wait() and not self._closed:
            now = time.monotonic()
            self._outbox.flush()
            if now - beat >= HEARTBEAT_S:
                beat = now
                self._outbox.put(Heartbeat())
            if now - stats >= STATS_S - self._outbox.flush_s / 2:  # with the text that goes out next to it
                stats = now
                for measured in self._measurements():
                    self._outbox.put(measured)
            time.sleep(self._outbox.flush_s)

"""The child's way out: whole lines, text in batches, and a pulse while it works.

A token a line would wake the screen hundreds of times a second, and each wake costs the model's process a system call.
So text waits for up to ``flush_s``, with the measurements following more rarely; when idle, nothing wakes at all.
"""

import os
import threading
import time
from collections.abc import Callable
from itertools import chain

from tokamac.engine.events import TextChunk

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
        self._reply = 0
        self._waiting: list[TextChunk] = []  # of reply ``_reply``, all of one kind
        self._flushed = 0.0
        self.flush_s = FLUSH_S

    def suit(self, device: str) -> None:
        """Batch text as is best while ``device`` computes."""
        self.flush_s = FLUSH_BESIDE_S.get(device, FLUSH_S)

    def put(self, message: EngineMessage) -> None:
        """Write ``message`` after any text that waits; text itself now, or with what follows within ``flush_s``."""
        with self._lock:
            if isinstance(message, ReplyEvent) and isinstance(message.event, TextChunk):
                self._wait(message.id, message.event)
            else:
                self._flush()
                self._write(message)

    def flush(self) -> None:
        """Write the text that waits."""
        with self._lock:
            self._flush()

    def _wait(self, reply: int, chunk: TextChunk) -> None:
        if self._waiting and (self._reply, self._waiting[0].kind) != (reply, chunk.kind):
            self._flush()
        self._reply = reply
        self._waiting.append(chunk)
        if time.monotonic() - self._flushed >= self.flush_s:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        chunks, self._waiting = self._waiting, []
        self._write(ReplyEvent(self._reply, _joined(chunks)))
        self._flushed = time.monotonic()

    def _write(self, message: EngineMessage) -> None:
        line = memoryview(encode(message))
        while line:
            line = line[os.write(self._fd, line) :]


def _joined(chunks: list[TextChunk]) -> TextChunk:
    return TextChunk(
        "".join(chunk.text for chunk in chunks),
        chunks[0].kind,
        tuple(chain.from_iterable(chunk.ids for chunk in chunks)),
        tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
    )


class Pulse:
    """A thread that, between ``start`` and ``stop``, flushes text, sends measurements and beats."""

    def __init__(self, outbox: Outbox, measurements: Callable[[], ReplyEvent | None]) -> None:
        self._outbox = outbox
        self._measurements = measurements
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def start(self) -> None:
        """Begin to beat."""
        self._busy.set()

    def stop(self) -> None:
        """Cease to beat."""
        self._busy.clear()

    def _run(self) -> None:
        beat = stats = 0.0
        while self._busy.wait():
            now = time.monotonic()
            self._outbox.flush()
            if now - beat >= HEARTBEAT_S:
                beat = now
                self._outbox.put(Heartbeat())
            if now - stats >= STATS_S - self._outbox.flush_s / 2:  # with the text that goes out next to it
                stats = now
                if (measured := self._measurements()) is not None:
                    self._outbox.put(measured)
            time.sleep(self._outbox.flush_s)

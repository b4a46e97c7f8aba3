"""The child's way out: whole lines, text in batches, and a pulse while it works.

A token a line would wake the screen hundreds of times a second, and each wake costs the model's process a system call.
So text waits for up to ``flush_s``, with the measurements following more rarely; when idle, nothing wakes at all.
"""

import os
import threading
import time
from collections.abc import Callable

from tokamac.app.backend.protocol import Heartbeat, Reply, Stats, Text, encode
from tokamac.engine.events import TextKind

FLUSH_S = 1 / 15
FLUSH_BESIDE_S: dict[str, float] = {"cpu": 0.2}
"""Where the model computes on the same cores as the screen, which each wake takes a millisecond of."""
STATS_S = 0.4
HEARTBEAT_S = 1.0


class Outbox:
    """Writes replies to a file descriptor. Any thread may call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._waiting_of: tuple[int, TextKind] | None = None
        self._flushed = 0.0
        self.flush_s = FLUSH_S

    def suit(self, device: str) -> None:
        """Batch text as is best while ``device`` computes."""
        self.flush_s = FLUSH_BESIDE_S.get(device, FLUSH_S)

    def put(self, reply: Reply) -> None:
        """Write ``reply``, after any text that still waits."""
        with self._lock:
            self._flush()
            self._write(reply)

    def text(self, request: int, text: str, kind: TextKind) -> None:
        """Write ``text`` now, or with what follows within ``flush_s``."""
        with self._lock:
            if self._waiting_of not in (None, (request, kind)):
                self._flush()
            self._waiting_of = (request, kind)
            self._waiting.append(text)
            if time.monotonic() - self._flushed >= self.flush_s:
                self._flush()

    def flush(self) -> None:
        """Write the text that waits."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._waiting_of is None:
            return
        request, kind = self._waiting_of
        self._write(Text(request, "".join(self._waiting), kind))
        self._waiting.clear()
        self._waiting_of = None
        self._flushed = time.monotonic()

    def _write(self, reply: Reply) -> None:
        line = memoryview(encode(reply))
        while line:
            line = line[os.write(self._fd, line) :]


class Pulse:
    """A thread that, between ``start`` and ``stop``, flushes text, sends measurements and beats."""

    def __init__(self, outbox: Outbox, stats: Callable[[], Stats | None]) -> None:
        self._outbox = outbox
        self._stats = stats
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
                if (reply := self._stats()) is not None:
                    self._outbox.put(reply)
            time.sleep(self._outbox.flush_s)

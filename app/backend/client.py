"""Both ends of the pipe to the engine process: its outbox and pulse; the app's link, which notices death and hangs."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO

from tokamac.engine.events import Piece, TextChunk, ToolCallDelta
from tokamac.engine.files import FLUSH_S

from ..text.sanitise import sanitise_line
from .protocol import (
    LONGEST_LINE,
    AskTokens,
    EngineMessage,
    EngineNotice,
    Generate,
    Heartbeat,
    PromptTokens,
    Quit,
    ReplyEvent,
    Request,
    RequestFailed,
    WireError,
    decode_message,
    encode,
)

# One line per token would wake the screen hundreds of times a second at a system call each, so text waits up
# to ``flush_s`` and measurements follow more rarely; when idle nothing wakes.


TEXT_FLUSH_S = 1 / 15
# Where the model computes on the same cores as the screen, which each wake takes a millisecond of.
FLUSH_BESIDE_S: dict[str, float] = {"cpu": 0.2}
STATS_S = 0.4
HEARTBEAT_S = 1.0


class Outbox:
    """Writes messages to a file descriptor. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, list[Piece]]] = []  # a reply, and text of it that is all of one kind
        self._flushed = 0.0
        self.flush_s = TEXT_FLUSH_S

    def suit(self, device: str, text_every_s: float | None = None) -> None:
        """Set the text batching interval; None: the best for a screen while ``device`` computes."""
        self.flush_s = FLUSH_BESIDE_S.get(device, TEXT_FLUSH_S) if text_every_s is None else text_every_s

    def put(self, message: EngineMessage) -> None:
        """Write ``message`` after any waiting text; text itself within ``flush_s``."""
        with self._lock:
            if isinstance(message, ReplyEvent) and isinstance(message.event, Piece):
                self._wait(message.id, message.event)
            else:
                self._flush(message)

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _wait(self, reply: int, piece: Piece) -> None:
        """Append to the waiting text of the same reply, across other replies: each batch wakes the screen."""
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
    """Return the key by which consecutive pieces merge; a tool call's pieces merge with its own only."""
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
    """Thread that flushes text and sends measurements and heartbeats between ``start`` and ``stop``."""

    def __init__(self, outbox: Outbox, measurements: Callable[[], list[ReplyEvent]]) -> None:
        self._outbox = outbox
        self._measurements = measurements
        self._lock = threading.Lock()
        self._works = 0
        self._closed = False
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def start(self) -> None:
        with self._lock:
            self._works += 1
            self._busy.set()

    def stop(self) -> None:
        with self._lock:
            self._works -= 1
            if not self._works and not self._closed:
                self._busy.clear()

    def close(self) -> None:
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


#     caller ─ send ─▶ writer thread ─▶ stdin      stdout ─▶ reader thread ─▶ on_event(reply | Garbled | Died)
#
# ``on_event`` runs on the reader thread. The process has its own session, so Ctrl-C reaches only the screen;
# it ends when its stdin closes.


SILENCE_S = 20.0  # a busy process beats every second; a machine that swaps may delay it, but not this long
GRACE_S = FLUSH_S + 3.0  # the engine's process ends itself before: what it computed is written by then
TAIL_BYTES = 4096
LONGEST_LOG = 2**20  # bytes; the log before it is kept beside it


@dataclass(frozen=True, slots=True)
class Garbled:
    """The process sent an undecodable line, which was skipped."""

    error: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended unasked. why: a short clause; last_line: end of its log."""

    why: str
    last_line: str


BackendEvent = EngineMessage | Garbled | Died


CHILD_COMMAND = (sys.executable, "-m", "tokamac.app.backend.child")  # starts the engine's process


class EngineLink:
    """Connection to an engine process.

    Args:
        outgoing, incoming: closed by the link's own threads.
        on_event: called with each message, on a thread of the link.
        silence_s: seconds of silence after which a busy process counts as hung.
    """

    def __init__(
        self,
        outgoing: IO[bytes],
        incoming: IO[bytes],
        on_event: Callable[[BackendEvent], object],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._on_event = on_event
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._asked_to_end = False
        self._frozen = False
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        for run, given in ((self._read, (incoming,)), (self._write, (outgoing,)), (self._watch, ())):
            threading.Thread(target=run, args=given, name=f"engine-{run.__name__}", daemon=True).start()

    def send(self, request: Request) -> None:
        """Queue ``request``; never blocks. To a dead process it is dropped: ``Died`` is reported."""
        self._outgoing.put(request)

    def set_busy(self, busy: bool) -> None:
        """Set whether the process is at work, so that silence means a hang."""
        if busy and not self._busy.is_set():
            self._heard = time.monotonic()
            self._busy.set()
        elif not busy:
            self._busy.clear()

    def kill(self) -> None:
        """Kill the process; ``Died`` is not reported."""
        self._asked_to_end = True
        self._end()

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to end; kill it after ``grace_s``."""
        self._asked_to_end = True
        self._outgoing.put(Quit())
        self._outgoing.put(None)
        if not self._ended.wait(grace_s):
            self._end()
            self._ended.wait(grace_s)

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def _end(self) -> None:
        raise NotImplementedError

    def _ended_how(self) -> tuple[str, str]:
        """Return why it ended and the end of its log, once the streams are closed; frees resources."""
        raise NotImplementedError

    def _write(self, outgoing: IO[bytes]) -> None:
        try:
            with outgoing:  # closing it writes what is left, and fails as well
                while (request := self._outgoing.get()) is not None:
                    line = encode(request)
                    if len(line) > LONGEST_LINE and (refused := _refused(request)) is not None:
                        self._on_event(refused)
                        continue
                    outgoing.write(line)
                    outgoing.flush()
        except OSError:
            return  # the reader's thread reports the death

    def _read(self, incoming: IO[bytes]) -> None:
        with incoming, suppress(ConnectionError):
            while line := incoming.readline(LONGEST_LINE + 1):
                self._heard = time.monotonic()
                self._on_event(self._decode(line, incoming))
        why, last_line = self._ended_how()
        self._busy.set()
        self._ended.set()
        self._outgoing.put(None)
        if self._frozen:
            why = f"it did not answer for {self._silence_s:g} s and was stopped"
        if not self._asked_to_end:
            self._on_event(Died(why, last_line))

    @staticmethod
    def _decode(line: bytes, incoming: IO[bytes]) -> BackendEvent:
        """Decode ``line``; skips the rest of an overlong one."""
        end = line
        while len(line) > LONGEST_LINE and end and not end.endswith(b"\n"):
            end = incoming.readline(LONGEST_LINE)
        try:
            return decode_message(line)
        except WireError as error:
            return Garbled(sanitise_line(error.message))

    def _watch(self) -> None:
        now = time.monotonic()
        while self._busy.wait() and not self._ended.wait(self._silence_s / 4):
            now, last = time.monotonic(), now
            if (
                now - last > self._silence_s / 2
            ):  # this process itself was stopped: what the engine said waits to be read
                self._heard = max(self._heard, now - self._silence_s / 2)
            if self._busy.is_set() and time.monotonic() - self._heard > self._silence_s:
                self._frozen = True
                self._end()
                return


class EngineProcess(EngineLink):
    """One running engine process; never reused, a restart makes a new one."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        on_event: Callable[[BackendEvent], object],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._log, unkept = _opened(log)
        self._log_start = os.fstat(self._log.fileno()).st_size
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except BaseException:
            self._log.close()
            raise
        if unkept:
            on_event(EngineNotice(unkept))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(self._process.stdin, self._process.stdout, on_event, silence_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        try:
            # Its own session: helpers that a library started go with it.
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # A group of zombies: macOS refuses it (EPERM), Linux may not find it. poll() can't tell while another thread waits.
            with suppress(ProcessLookupError, PermissionError):
                self._process.kill()

    def _ended_how(self) -> tuple[str, str]:
        code = self._process.wait()
        with self._log:
            last_line = self._last_line()
        return killed_by(-code) if code < 0 else f"exit status {code}", last_line

    def _last_line(self) -> str:
        try:
            # By position: the process writes through the same file, wherever that stands.
            begin = max(self._log_start, os.fstat(self._log.fileno()).st_size - TAIL_BYTES)
            lines = os.pread(self._log.fileno(), TAIL_BYTES, begin).decode(errors="replace").splitlines()
        except OSError as error:
            return f"the log can't be read: {error}"
        return next((sanitise_line(line) for line in reversed(lines) if line.strip()), "")


def _refused(request: Request) -> EngineMessage | None:
    """Return the answer to an oversized request; None where the process reports it itself."""
    why = "the prompt is too long to be read"
    match request:
        case Generate(id):
            return RequestFailed(id, why, "Shorten it.", "ContextError")
        case AskTokens(id):
            return PromptTokens(id, error=why)
        case _:
            return None


def _opened(log: Path) -> tuple[IO[bytes], str]:
    """Open the log; falls back to a temporary one and returns a warning."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LONGEST_LOG:
            log.replace(log.with_suffix(".old.log"))
        return log.open("a+b", buffering=0), ""
    except OSError as error:
        unkept = f"The engine's log is not kept: {log} can't be written ({error.strerror or error})."
    try:
        return tempfile.TemporaryFile("a+b", buffering=0), unkept
    except OSError:
        return Path(os.devnull).open("a+b", buffering=0), unkept


def killed_by(number: int) -> str:
    """Describe the signal; one that Python has no name for, by number."""
    known = number in set(signal.Signals)
    return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"


def how_ended(status: int) -> str:
    """Describe an exit status as ``subprocess`` has it: negative is a signal."""
    return f"was {killed_by(-status)}" if status < 0 else f"ended with status {status}"

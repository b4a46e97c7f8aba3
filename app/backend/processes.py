"""Other processes: this program's own commands (convert, models, serve), followed by JSON lines, and the user's shell."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process, SubprocessStreamProtocol
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tokamac.engine.errors import TokamacError

from ..text.sanitise import Sanitiser, sanitise_line
from ..text.strict_json import ShapeError, build
from .client import killed_by
from .sharing import chat_socket

# With ``--json`` commands print one JSON object per step, decoded strictly into frozen dataclasses. An interrupted or
# killed command resumes when it is run again.


LONGEST_LINE = 16 * 2**20

GRACE_S = 10.0  # how long an interrupted process may finish what it is at

REAP_S, REAP_STEP_S = 2.0, 0.005  # how long the end of a process that was killed is waited for, and between two looks

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class Ended:
    """The process ended with this exit status (negative: signal). last_line: end of its stderr."""

    status: int
    last_line: str


class LineProcess(Generic[Line]):
    """Runs ``command``, one run at a time, on the caller's loop. ``understand`` decodes a line and never raises."""

    def __init__(self, command: Sequence[str], understand: Callable[[bytes], Line]) -> None:
        self._command = command
        self._understand = understand
        self._process: Process | None = None
        self._is_to_stop = False  # before there was a process to hear it

    async def run(self, arguments: Sequence[str], take: Callable[[Line], None]) -> Ended:
        """Start, pass each line to ``take``, return how it ended. Kills the process on cancel. Raises OSError."""
        self._is_to_stop = False
        # A session of its own: Ctrl-C in the terminal is for the chat.
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=LONGEST_LINE, loop=loop),
            *self._command,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        self._process = process = Process(transport, protocol, loop)
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(_last_line(process.stderr))
        stopping = asyncio.create_task(self.interrupt()) if self._is_to_stop else None
        try:
            async for line in process.stdout:
                take(self._understand(line))
            last = await errors
            return Ended(await process.wait(), last)
        finally:
            errors.cancel()
            if stopping is not None:
                stopping.cancel()
            self._process = None
            transport.close()  # kills a process that runs
            await _see_end(process)

    async def interrupt(self, grace_s: float = GRACE_S) -> None:
        """Send SIGINT, also to one about to start; kill it after ``grace_s``."""
        process = self._process
        if process is None or process.returncode is not None:
            self._is_to_stop = True
            return
        with suppress(ProcessLookupError):  # it ended on its own meanwhile
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
            return
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # it ended on its own meanwhile
                self._process.kill()


async def _see_end(process: Process) -> None:
    """Wait for a killed process, shielded from another cancel: the loop may close next."""
    end_s, cancelled = asyncio.get_running_loop().time() + REAP_S, False
    while process.returncode is None and asyncio.get_running_loop().time() < end_s:
        try:
            await asyncio.sleep(REAP_STEP_S)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Drain the stream, so that the process never blocks; return the last non-blank line."""
    last = ""
    async for line in stream:
        last = sanitise_line(line.decode(errors="replace")) or last
    return last


@dataclass(frozen=True, slots=True)
class Refused:
    """A failure or a refusal to start: the reason and a hint."""

    error: str
    hint: str


def decode_line(kinds: Mapping[object, type[Line]], line: bytes, whose: str) -> Line | Refused:
    """Decode a line by its ``event`` field; Refused if undecodable (later lines may still be valid)."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("event") not in kinds:
            raise ShapeError("unknown kind")
        event = value.pop("event")
        found: Line = build(kinds[event], value, str(event))
    except (ValueError, RecursionError, TypeError) as error:
        return Refused(f"a line of {whose} is not understood: {error}", "")
    return found


@dataclass(frozen=True, slots=True)
class PackingLine:
    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class PartLine:
    """Tensors of one part of the model packed alike; None: unpacked."""

    part: str
    packing: PackingLine | None
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DiskLine:
    """Free space on the target disk, bytes."""

    needed: int
    free: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """A dry run's result: bytes and estimated seconds.

    seconds: conversion alone; quality_seconds: the comparison at the end, None where none is wanted; both None
    if unknown. quality: always empty yet.
    """

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    output_bytes: int
    seconds: float | None
    peak_memory_bytes: int
    quality: None
    parameters: int
    parts: tuple[PartLine, ...]
    disk: DiskLine
    notes: tuple[str, ...]
    quality_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TensorWritten:
    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageLine:
    """Progress of a stage. total: None until known. peak_memory_bytes: MLX peak so far."""

    stage: str
    done: int
    total: int | None
    unit: Literal["bytes", "steps"]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected decode speed at that context, tokens/s; None is unknown, ``reason`` says why."""

    before_tps: float | None
    after_tps: float | None
    context: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class QualityLine:
    """Quality against the source (figures: quant/report.py); None is unknown.

    positions: None where no text was compared; ``unable`` may say why. concerns: what is worse than it should be.
    """

    relative_error: float | None
    kl: float | None
    perplexity_ratio: float | None
    kl_se: float | None
    top1: float | None
    reference_perplexity: float | None
    reference_perplexity_se: float | None
    perplexity: float | None
    perplexity_se: float | None
    perplexity_ratio_se: float | None
    positions: int | None
    layers: tuple[float | None, ...]
    unable: str | None
    concerns: tuple[str, ...]
    advice: str = ""
    grade: str = ""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConvertedLine:
    """The result in bytes and seconds; quality: None was not measured."""

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: QualityLine | None


ConversionLine = Planned | TensorWritten | StageLine | Expected | ConvertedLine | Refused

_CONVERSION_KINDS: dict[object, type[ConversionLine]] = {
    "plan": Planned,
    "tensor": TensorWritten,
    "stage": StageLine,
    "expected": Expected,
    "converted": ConvertedLine,
    "error": Refused,
}


def decode_conversion(line: bytes) -> ConversionLine:
    return decode_line(_CONVERSION_KINDS, line, "the conversion")


def converter_command() -> list[str]:
    return [sys.executable, "-m", "tokamac.app.cli", "convert"]


class Converter(LineProcess[ConversionLine]):
    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, decode_conversion)


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Bytes on disk so far and in total; None: not known yet."""

    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Pulled:
    id: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    id: str
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class HubModelLine:
    """A search hit (engine/hub/download.py); sent again with its config. None is unknown."""

    id: str
    nbytes: int | None
    context: int | None
    licence: str | None
    downloads: int | None
    good_for: str
    mlx: bool
    config_folder: str | None


@dataclass(frozen=True, slots=True)
class Searched:
    words: str
    models: tuple[HubModelLine, ...]


PullLine = PullProgress | Pulled | Removed | Refused | HubModelLine | Searched

_PULL_KINDS: dict[object, type[PullLine]] = {
    "progress": PullProgress,
    "pulled": Pulled,
    "removed": Removed,
    "found": HubModelLine,
    "searched": Searched,
    "error": Refused,
}


def models_command() -> list[str]:
    return [sys.executable, "-m", "tokamac.app.cli", "models"]


def pull_arguments(model: str) -> list[str]:
    return ["--json", "--", "pull", model]


def search_arguments(words: str) -> list[str]:
    return ["--json", "--", "search", words]


def remove_arguments(model: str, *, unfinished: bool) -> list[str]:
    return [*(["--unfinished"] if unfinished else []), "--json", "--", "remove", model]


def decode_pull(line: bytes) -> PullLine:
    return decode_line(_PULL_KINDS, line, "the download")


class Puller(LineProcess[PullLine]):
    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, decode_pull)


#     OFF ─ begin ─▶ STARTING ─ ready ─▶ ON ─ stop ─▶ STOPPING ─ ended ─▶ OFF
#                        └───── failed or died ──────────────────────────▶ OFF, with the problem
#
# The server's process is ``tokamac serve --engine SOCKET``, a guest of the engine process. It ends with the chat.


PORT = 11435
NEEDS = ("prometheus_client", "starlette", "uvicorn")  # packages of the extra `serve`


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    replies: int
    waiting: int


ServeLine = Serving | Refused

_SERVE_KINDS: dict[object, type[ServeLine]] = {"serving": Serving, "error": Refused}


def serve_command() -> list[str]:
    return [sys.executable, "-m", "tokamac.app.cli", "serve"]


def decode_serving(line: bytes) -> ServeLine:
    return decode_line(_SERVE_KINDS, line, "the server")


class ServerPhase(Enum):
    OFF = auto()
    STARTING = auto()
    ON = auto()
    STOPPING = auto()


class ServerJob:
    """State of a chat's server. replies, waiting: counts of open requests. problem: why it ended."""

    def __init__(self) -> None:
        self.phase = ServerPhase.OFF
        self.url = self.problem = ""
        self.replies = self.waiting = 0

    @property
    def on(self) -> bool:
        return self.phase is not ServerPhase.OFF

    @property
    def line(self) -> str:
        match self.phase:
            case ServerPhase.OFF:
                return ""
            case ServerPhase.STARTING:
                return "server: starting"
            case ServerPhase.STOPPING:
                return "server: stopping"
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        running = "no request" if not self.replies else "1 request" if self.replies == 1 else f"{self.replies} requests"
        return f"{self.url} · {running}{waiting}"

    def begin(self) -> None:
        self.phase, self.url, self.problem, self.replies, self.waiting = ServerPhase.STARTING, "", "", 0, 0

    def stop(self) -> None:
        if self.on:
            self.phase = ServerPhase.STOPPING

    def receive(self, line: ServeLine) -> None:
        match line:
            case Serving(url, replies, waiting):
                if self.phase is ServerPhase.STARTING:
                    self.phase = ServerPhase.ON
                self.url, self.replies, self.waiting = url, replies, waiting
            case Refused(error, hint):
                self.problem = " ".join(f"{error}. {hint}".split())

    def ended(self, end: Ended) -> None:
        """Note the end of the process; sets ``problem`` unless it was asked to stop."""
        if self.phase is ServerPhase.STOPPING:
            self.problem = ""
        elif not self.problem:
            self.problem = f"The server ended: {end.last_line or f'exit status {end.status}'}"
        self.phase, self.url, self.replies, self.waiting = ServerPhase.OFF, "", 0, 0


class ChatServer:
    """Runs the server of a chat, one at a time.

    Args:
        spawn: runs a coroutine in the background.
        changed: called after every change. told: receives messages for the user.
    """

    def __init__(
        self,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        told: Callable[[str], None],
    ) -> None:
        self._spawn, self._changed, self._told = spawn, changed, told
        self._process = LineProcess(serve_command(), decode_serving)
        self.job = ServerJob()

    def begin(self, port: int) -> None:
        """Start on this port unless one runs. Call in the loop that ``spawn`` uses."""
        if not self.job.on:
            self.job.begin()
            self._changed()
            self._spawn(self._run(["--json", f"--engine={chat_socket()}", f"--port={port}"]))

    def stop(self) -> None:
        if self.job.on:
            self.job.stop()
            self._changed()
            self._spawn(self._process.interrupt())

    async def _run(self, arguments: list[str]) -> None:
        def receive(line: ServeLine) -> None:
            starting = self.job.phase is ServerPhase.STARTING
            self.job.receive(line)
            if starting and self.job.phase is ServerPhase.ON:
                self._told(f"Serving this chat's model on {self.job.url}. /serve stop stops it.")
            self._changed()

        try:
            end = await self._process.run(arguments, receive)
        except OSError as error:
            end = Ended(1, error.strerror or str(error))
        self.job.ended(end)
        self._told(self.job.problem or "The server has stopped.")
        self._changed()


# A shell command has its own session, so it can't read from or draw on the terminal; its background children end with
# it.


DEADLINE_S = 300.0
KEPT_BYTES = 200_000  # of the output: the first half and the last; what is between is left out
MOST_BYTES = 100_000_000  # a command that writes more, such as `yes`, is ended
LOOK_S = 0.1
SHELL_GRACE_S = 1.0  # how long a command that is to end may take until it is killed


class ShellError(TokamacError):
    """A command could not be started."""


class ShellEnding(Enum):
    ITSELF = ""
    STOPPED = "stopped by you"
    DEADLINE = f"ended after {DEADLINE_S:g} s"
    TOO_MUCH = f"ended: it wrote more than {MOST_BYTES // 10**6} MB"


@dataclass(frozen=True, slots=True)
class ShellOutput:
    """A command's output and ending. text: stdout and stderr interleaved, sanitized. left_out: dropped bytes."""

    command: str
    text: str
    status: int
    ending: ShellEnding = ShellEnding.ITSELF
    left_out: int = 0

    @property
    def how(self) -> str:
        if self.ending is not ShellEnding.ITSELF:
            return str(self.ending.value)
        return "" if not self.status else killed_by(-self.status) if self.status < 0 else f"exit status {self.status}"


def user_shell() -> str:
    return os.environ.get("SHELL") or "/bin/sh"


def working_folder() -> Path:
    """Raises ShellError if the start folder is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ShellError("The folder that tokamac was started in is gone", "Start it again in another one.") from error


class ShellCommand:
    """A one-shot command: ``run`` on any thread, ``stop`` from another or from a signal handler.

    program: what runs instead of the user's shell. env: instead of the user's environment.
    """

    def __init__(
        self,
        text: str,
        folder: Path,
        *,
        deadline_s: float = DEADLINE_S,
        program: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.text = text
        self._folder = folder
        self._deadline_s = deadline_s
        self._program = program
        self._env = os.environ if env is None else env
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop it and its children; before ``run``, prevents the run."""
        self._stopped.set()

    def run(self) -> ShellOutput:
        """Run to the end. Raises ShellError."""
        program = list(self._program) or [user_shell(), "-c", self.text]
        if self._stopped.is_set():
            return ShellOutput(self.text, "", -signal.SIGTERM, ShellEnding.STOPPED)
        try:
            process = subprocess.Popen(
                program,
                cwd=self._folder,
                env={**self._env, "TERM": "dumb"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # no such shell or folder, a NUL
            raise ShellError(f"{program[0]} could not be started: {error}", "Check SHELL.") from error
        kept = _Kept()
        with process:
            try:
                ending = self._follow(process, kept)
            finally:
                _end(process)
        return ShellOutput(self.text, kept.text, process.returncode, ending, kept.left_out)

    def _follow(self, process: "subprocess.Popen[bytes]", kept: "_Kept") -> ShellEnding:
        assert process.stdout is not None
        pipe, until_s = process.stdout.fileno(), time.monotonic() + self._deadline_s
        is_open, ended_s = True, float("inf")
        while not self._stopped.is_set():
            if ended_s > time.monotonic() and process.poll() is not None:
                ended_s = time.monotonic()
            if not is_open:
                self._stopped.wait(LOOK_S)
            elif select.select([pipe], [], [], LOOK_S)[0]:
                data = os.read(pipe, 1 << 16)
                is_open = bool(data)
                kept.add(data)
            now_s = time.monotonic()
            if now_s > ended_s + (SHELL_GRACE_S if is_open else 0.0):  # what it left may hold the pipe open for ever
                return ShellEnding.ITSELF
            if kept.count > MOST_BYTES:
                return ShellEnding.TOO_MUCH
            if now_s > until_s:
                return ShellEnding.DEADLINE
        if is_open and select.select([pipe], [], [], 0)[0]:  # written before it was stopped
            kept.add(os.read(pipe, 1 << 16))
        return ShellEnding.STOPPED


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has ended
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SHELL_GRACE_S)


class _Kept:
    """The first and last bytes of an output. count: total bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._first = bytearray()
        self._last = bytearray()

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = KEPT_BYTES // 2 - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        del self._last[: -KEPT_BYTES // 2]

    @property
    def left_out(self) -> int:
        return self.count - len(self._first) - len(self._last)

    @property
    def text(self) -> str:
        """The kept bytes as text, without terminal control sequences."""
        gap = f"\n[… {self.left_out:,} bytes were left out]\n".encode() if self.left_out else b""
        whole = bytes(self._first) + gap + bytes(self._last)
        return Sanitiser(replacement="").feed(whole.decode("utf-8", "replace")).strip("\n")

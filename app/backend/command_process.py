"""Commands of this program as processes of their own, which the chat starts, hears and interrupts: ``convert`` and ``models``.

With ``--json`` they say a line of JSON for each step; each kind of line is a frozen dataclass here, decoded strictly. However such
a process ends, interrupted or killed, the same command goes on from there when it is run again.
"""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process, SubprocessStreamProtocol
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tokamac.engine.errors import TokamacError

from ..sanitise import sanitise_line
from .protocol import ShapeError, build

LONGEST_LINE = 16 * 2**20
GRACE_S = 10.0
"""How long an interrupted process may finish what it is at."""

REAP_S = 2.0
"""How long the end of a process that was killed is waited for."""

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class Ended:
    """The process is over, with this exit status (negative: by that signal). last_line: the end of what it wrote to stderr."""

    status: int
    last_line: str


class LineProcess(Generic[Line]):
    """Runs ``command`` with arguments, one run at a time, on the caller's loop. ``understand`` reads a line; it never raises."""

    def __init__(self, command: Sequence[str], understand: Callable[[bytes], Line]) -> None:
        self._command = command
        self._understand = understand
        self._process: Process | None = None
        self._is_to_stop = False  # before there was a process to hear it

    async def run(self, arguments: Sequence[str], take: Callable[[Line], None]) -> Ended:
        """Start, hand every line to ``take`` as it comes, and return how it ended. Cancelled, it leaves no process behind.

        Raises OSError.
        """
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
            transport.close()  # kills a process that runs; at once, since a second cancellation would skip what is awaited
            with suppress(TimeoutError):  # so that the loop, which may close next, has seen its end
                await asyncio.wait_for(process.wait(), REAP_S)

    async def interrupt(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to stop, as Ctrl-C would, also one that is only about to start; end it if it does not."""
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


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Read to the end, so that the process never waits, and return the last line that says something."""
    last = ""
    async for line in stream:
        last = sanitise_line(line.decode(errors="replace")) or last
    return last


def killed_by(number: int) -> str:
    """Return in words that the signal of this number ended a process; one that Python has no name for, by its number."""
    known = number in set(signal.Signals)
    return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"


def how_ended(status: int) -> str:
    """Return in words how a process ended, by its exit status as ``subprocess`` has it: below zero a signal's."""
    return f"was {killed_by(-status)}" if status < 0 else f"ended with status {status}"


class LineError(TokamacError):
    """A line that is none of these."""


@dataclass(frozen=True, slots=True)
class PackingLine:
    """How weights are packed."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class PartLine:
    """Tensors of one part of the model that are packed alike; None: unpacked."""

    part: str
    packing: PackingLine | None
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DiskLine:
    """Room on the disk of the new folder, bytes."""

    needed: int
    free: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """A dry run's answer. Bytes and seconds; seconds: about, of converting alone; quality_seconds: of the comparison at the end,
    None where none is wanted; of both, None is unknown. quality: nothing yet."""

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
    """A tensor is written: ``done`` of ``total``."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageLine:
    """How far a stage has come. total: None is not known yet. peak_memory_bytes: the most MLX held so far."""

    stage: str
    done: int
    total: int | None
    unit: Literal["bytes", "steps"]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Expected:
    """Decoding on this machine with so many tokens of context, tokens a second; None is unknown.

    reason: why one is unknown.
    """

    before_tps: float | None
    after_tps: float | None
    context: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class QualityLine:
    """How close the result is to its source; quant/report.py says what each figure is. None is unknown.

    positions: None where no text was compared, and ``unable`` may say why. concerns: what is worse than it should be.
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


@dataclass(frozen=True, slots=True)
class ConvertedLine:
    """The result. Bytes and seconds; quality: None was not measured."""

    path: str
    weight_bytes: int
    bits_per_weight: float
    source_bytes: int
    seconds: float
    peak_memory_bytes: int
    quality: QualityLine | None


@dataclass(frozen=True, slots=True)
class Refused:
    """It failed, or was not begun."""

    error: str
    hint: str


ConversionLine = Planned | TensorWritten | StageLine | Expected | ConvertedLine | Refused

_CONVERSION_KINDS: dict[object, type[ConversionLine]] = {
    "plan": Planned,
    "tensor": TensorWritten,
    "stage": StageLine,
    "expected": Expected,
    "converted": ConvertedLine,
    "error": Refused,
}


def decode(line: bytes) -> ConversionLine:
    """Return what a line of ``convert --json`` says. Raises LineError."""
    return _decoded(_CONVERSION_KINDS, line, "the conversion")


def _decoded(kinds: Mapping[object, type[Line]], line: bytes, whose: str) -> Line:
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("event") not in kinds:
            raise ShapeError("unknown kind")
        event = value.pop("event")
        found: Line = build(kinds[event], value, str(event))
    except (ValueError, RecursionError, TypeError) as error:
        raise LineError(f"a line of {whose} is not understood: {error}") from error
    return found


def converter_command() -> list[str]:
    """Return the command that converts; flags and the source are to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "convert"]


class Converter(LineProcess[ConversionLine]):
    """Runs a conversion. A line that is not understood is handed over as a Refused: what follows may still be."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, _understood)


def _understood(line: bytes) -> ConversionLine:
    try:
        return decode(line)
    except LineError as error:
        return Refused(error.message, "")


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Bytes on disk so far, and in all; None is not known yet."""

    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The model is whole, in the folder ``path``; ``bytes`` of its files."""

    id: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The model, or what was unfinished of it, is gone."""

    id: str
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class PullRefused:
    """It failed: why, and what to do."""

    error: str
    hint: str


@dataclass(frozen=True, slots=True)
class HubModelLine:
    """A model that a search of the hub found (engine/hub/search.py); told again once its config has come. None is unknown."""

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
    """The search is over: all that was found for ``words``."""

    words: str
    models: tuple[HubModelLine, ...]


PullLine = PullProgress | Pulled | Removed | PullRefused | HubModelLine | Searched

_PULL_KINDS: dict[object, type[PullLine]] = {
    "progress": PullProgress,
    "pulled": Pulled,
    "removed": Removed,
    "found": HubModelLine,
    "searched": Searched,
    "error": PullRefused,
}


def models_command() -> list[str]:
    """Return the command; what it is to do is to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "models"]


def pull_arguments(model: str) -> list[str]:
    """Return the arguments that bring ``model`` to disk."""
    return ["--json", "--", "pull", model]


def search_arguments(words: str) -> list[str]:
    """Return the arguments that search the hub."""
    return ["--json", "--", "search", words]


def remove_arguments(model: str, *, unfinished: bool) -> list[str]:
    """Return the arguments that take ``model`` off the disk, or only what a download left of it that did not end."""
    return [*(["--unfinished"] if unfinished else []), "--json", "--", "remove", model]


class Puller(LineProcess[PullLine]):
    """Runs a download or a removal. A line that is not understood is handed over as a PullRefused."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, understood)


def understood(line: bytes) -> PullLine:
    """Return what a line of ``models --json`` says; a PullRefused where it says nothing."""
    try:
        return _decoded(_PULL_KINDS, line, "the download")
    except LineError as error:
        return PullRefused(error.message, "")


@dataclass(frozen=True, slots=True)
class Serving:
    """A server answers at ``url``: so many replies are being made, and wait."""

    url: str
    replies: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ServingRefused:
    """It failed: why, and what to do."""

    error: str
    hint: str


ServeLine = Serving | ServingRefused
_SERVE_KINDS: dict[object, type[ServeLine]] = {"serving": Serving, "error": ServingRefused}


def serve_command() -> list[str]:
    """Return the command that serves; flags are to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "serve"]


def serve_line(line: bytes) -> ServeLine:
    """Return what a line of ``serve --json`` says; a ServingRefused where it says nothing."""
    try:
        return _decoded(_SERVE_KINDS, line, "the server")
    except LineError as error:
        return ServingRefused(error.message, "")

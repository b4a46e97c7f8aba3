"""Commands of this program as processes of their own, which the chat starts, hears and interrupts.

With ``--json`` they say a line of JSON for each step; each kind of line is a frozen dataclass (converter.py, puller.py,
chat_server.py), decoded strictly. However such a process ends, interrupted or killed, the same command goes on from there when it
is run again.
"""

import asyncio
import json
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process, SubprocessStreamProtocol
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..sanitise import sanitise_line
from ..strict_json import ShapeError, build

LONGEST_LINE = 16 * 2**20

GRACE_S = 10.0
"""How long an interrupted process may finish what it is at."""

REAP_S, REAP_STEP_S = 2.0, 0.005
"""How long the end of a process that was killed is waited for, and between two looks."""

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
            transport.close()  # kills a process that runs
            await _see_end(process)

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


async def _see_end(process: Process) -> None:
    """Let the loop, which may close next, see the end of a process that was killed; also where that cancels this once more."""
    end_s, cancelled = asyncio.get_running_loop().time() + REAP_S, False
    while process.returncode is None and asyncio.get_running_loop().time() < end_s:
        try:
            await asyncio.sleep(REAP_STEP_S)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


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


@dataclass(frozen=True, slots=True)
class Refused:
    """It failed, or was not begun: why, and what to do."""

    error: str
    hint: str


def decode_line(kinds: Mapping[object, type[Line]], line: bytes, whose: str) -> Line | Refused:
    """Return what a line says, by its field ``event``; where it says nothing, a Refused: what follows may still be understood.

    whose: line it is, for the error.
    """
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("event") not in kinds:
            raise ShapeError("unknown kind")
        event = value.pop("event")
        found: Line = build(kinds[event], value, str(event))
    except (ValueError, RecursionError, TypeError) as error:
        return Refused(f"a line of {whose} is not understood: {error}", "")
    return found

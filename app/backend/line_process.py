"""A command of this program as a process of its own that says lines: started, heard, interrupted."""

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokamac.app.sanitise import sanitise_line

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

    async def run(self, arguments: Sequence[str], take: Callable[[Line], None]) -> Ended:
        """Start, hand every line to ``take`` as it comes, and return how it ended. Cancelled, it leaves no process behind.

        Raises OSError.
        """
        # A session of its own: Ctrl-C in the terminal is for the chat.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(_last_line(process.stderr))
        try:
            async for line in process.stdout:
                take(self._understand(line))
            last = await errors
            return Ended(await process.wait(), last)
        finally:
            errors.cancel()
            self._kill()
            self._process = None
            with suppress(TimeoutError):  # so that the loop, which may close next, has seen its end
                await asyncio.wait_for(process.wait(), REAP_S)

    async def interrupt(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to stop, as Ctrl-C would; end it if it does not."""
        process = self._process
        if process is None or process.returncode is not None:
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

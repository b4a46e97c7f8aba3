"""/serve: a server on the chat's own engine, so that the chat and an editor share one model. A state machine, and its process.

    OFF ─ begin ─▶ STARTING ─ it answers ─▶ ON ─ stop ─▶ STOPPING ─ it ended ─▶ OFF
                       └────────── it failed, or died ───────────────────────▶ OFF, with the problem

The process is ``tokamac serve --engine SOCKET``, a guest of the engine's process: writing HTTP takes nothing from the screen. It
ends with the chat, however that ends.
"""

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .command_process import Ended, LineProcess, Refused, decode_line
from .sharing import chat_socket

PORT = 11435
NEEDS = ("starlette", "uvicorn")
"""Packages of the extra ``serve``."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server answers at ``url``: so many replies are being made, and wait."""

    url: str
    replies: int
    waiting: int


ServeLine = Serving | Refused

_SERVE_KINDS: dict[object, type[ServeLine]] = {"serving": Serving, "error": Refused}


def serve_command() -> list[str]:
    """Return the command that serves; flags are to be added."""
    return [sys.executable, "-m", "tokamac.app.cli", "serve"]


def decode_serving(line: bytes) -> ServeLine:
    """Return what a line of ``serve --json`` says."""
    return decode_line(_SERVE_KINDS, line, "the server")


class ServerPhase(Enum):
    """What the server is at."""

    OFF = auto()
    STARTING = auto()
    ON = auto()
    STOPPING = auto()


class ServerJob:
    """The server of a chat, to be read. url: where it answers. replies, waiting: that are open. problem: why it ended."""

    def __init__(self) -> None:
        self.phase = ServerPhase.OFF
        self.url = self.problem = ""
        self.replies = self.waiting = 0

    @property
    def on(self) -> bool:
        """Whether there is a process."""
        return self.phase is not ServerPhase.OFF

    @property
    def line(self) -> str:
        """What it is at, for the panel; "" where there is none."""
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
        """It is started."""
        self.phase, self.url, self.problem, self.replies, self.waiting = ServerPhase.STARTING, "", "", 0, 0

    def stop(self) -> None:
        """It was asked to stop."""
        if self.on:
            self.phase = ServerPhase.STOPPING

    def take(self, line: ServeLine) -> None:
        """Note what the process says."""
        match line:
            case Serving(url, replies, waiting):
                if self.phase is ServerPhase.STARTING:
                    self.phase = ServerPhase.ON
                self.url, self.replies, self.waiting = url, replies, waiting
            case Refused(error, hint):
                self.problem = " ".join(f"{error}. {hint}".split())

    def ended(self, end: Ended) -> None:
        """The process is over. Unless it was asked to stop, ``problem`` says why."""
        if self.phase is ServerPhase.STOPPING:
            self.problem = ""
        elif not self.problem:
            self.problem = f"The server ended: {end.last_line or f'exit status {end.status}'}"
        self.phase, self.url, self.replies, self.waiting = ServerPhase.OFF, "", 0, 0


class ChatServer:
    """Runs the server of a chat, one at a time.

    Args:
        spawn: runs a coroutine in the background.
        changed: called after every change. told: given what the user should know.
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
        """Start it on this port; not while there is one. To be called in the loop that ``spawn`` uses."""
        if not self.job.on:
            self.job.begin()
            self._changed()
            self._spawn(self._run(["--json", f"--engine={chat_socket()}", f"--port={port}"]))

    def stop(self) -> None:
        """Stop it."""
        if self.job.on:
            self.job.stop()
            self._changed()
            self._spawn(self._process.interrupt())

    async def _run(self, arguments: list[str]) -> None:
        def take(line: ServeLine) -> None:
            starting = self.job.phase is ServerPhase.STARTING
            self.job.take(line)
            if starting and self.job.phase is ServerPhase.ON:
                self._told(f"Serving this chat's model on {self.job.url}. /serve stop stops it.")
            self._changed()

        try:
            end = await self._process.run(arguments, take)
        except OSError as error:
            end = Ended(1, error.strerror or str(error))
        self.job.ended(end)
        self._told(self.job.problem or "The server has stopped.")
        self._changed()

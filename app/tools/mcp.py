"""Tools of other programs, by the Model Context Protocol over their standard input and output (https://modelcontextprotocol.io).

Each server has a thread with an event loop of its own. It starts when its tools are wanted first, and ends with the chat. One that
dies or is slow costs the call that waits for it; the next call starts it again.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.options import TOOL_NAME, ToolSpec

from ..sanitise import sanitise
from ..settings import McpServer
from .tool import ToolError

MISSING = "MCP servers need the package mcp: pip install 'tokamac[mcp]'"
MOST_TOOLS = 64
"""Of one server."""
LONGEST_DESCRIPTION = 2_000
LOG_BYTES = 1 << 20
"""Of what servers write to stderr, after which the file begins anew."""
END_S = 5.0
"""How long a server may take to end."""


class McpError(TokamacError):
    """A server can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server. name: the server's name for it."""

    spec: ToolSpec
    name: str
    server: "McpConnection"

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call it, and return the texts of its result. Raises ToolError."""
        return self.server.call(self.name, arguments)


class McpConnection:
    """A server, started when it is needed.

    Args:
        name: The user's name for it.
        server: How it is started.
        log: Where its errors are written.
    """

    def __init__(self, name: str, server: McpServer, log: Path) -> None:
        self.name = name
        self._server, self._log = server, log
        self._lock = threading.Lock()
        self._life: _Life | None = None

    def tools(self) -> list[McpTool]:
        """Return its tools, once it has started. Raises McpError."""
        try:
            found = self._running().tools(self._server.seconds)
        except McpError:
            self.close()
            raise
        tools = []
        for each in found[:MOST_TOOLS]:
            named = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self.name}_{each.name}")[:128]
            try:
                description = sanitise(each.description or "")[:LONGEST_DESCRIPTION]
                tools.append(McpTool(ToolSpec(named, description, each.input_schema), each.name, self))
            except OptionError:
                continue  # a schema that no model can be told
        return tools

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the texts of a call's result. Raises ToolError."""
        try:
            result = self._running().call(tool, dict(arguments), self._server.seconds)
        except McpError as error:
            self.close()
            raise ToolError(error.one_line()) from error
        text = "\n".join(_text(each) for each in result.content)
        if result.is_error:
            raise ToolError(text or "the server says no more than that it failed")
        return text

    @property
    def is_running(self) -> bool:
        """Whether its process has started and not ended."""
        life = self._life
        return life is not None and not life.ended

    def close(self) -> None:
        """End the server, if it runs."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.close()

    def _running(self) -> "_Life":
        with self._lock:
            if self._life is not None and self._life.ended:
                self._life = None
            if self._life is None:
                self._life = _Life(self.name, self._server, self._log)
            return self._life


def _text(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', 'something')}, which is not text]"


class _Life:
    """One process of a server, and the thread that talks to it."""

    def __init__(self, name: str, server: McpServer, log: Path) -> None:
        try:
            import mcp  # noqa: F401  # it takes a second, and is an extra
        except ImportError as error:
            raise McpError(MISSING) from error
        self._name, self._server, self._log = name, server, log
        self._ready: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"mcp-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the process is gone, or going."""
        return not self._thread.is_alive()

    def tools(self, seconds: float) -> list[Any]:
        """Return what the server says its tools are."""
        session = self._session(seconds)
        return list(self._wait(session.list_tools, seconds).tools)

    def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the result of a call."""
        session = self._session(seconds)
        return self._wait(lambda: session.call_tool(tool, arguments), seconds)

    def _session(self, seconds: float) -> Any:
        try:
            return self._ready.result(seconds)
        except TimeoutError:
            self.close()
            raise McpError(f"the MCP server {self._name} did not start within {seconds:g} s") from None
        except Exception as error:
            raise McpError(f"the MCP server {self._name} could not be started: {_why(error)}") from error

    def _wait(self, work: Callable[[], Any], seconds: float) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work(), seconds)

        if self.ended:
            raise McpError(f"the MCP server {self._name} has ended")
        waiting = bounded()
        try:
            doing = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:  # it ended just now
            waiting.close()
            raise McpError(f"the MCP server {self._name} has ended") from None
        try:
            return doing.result(seconds + 1.0)
        except TimeoutError:
            raise McpError(f"the MCP server {self._name} did not answer within {seconds:g} s") from None
        except Exception as error:
            raise McpError(f"the MCP server {self._name} failed: {_why(error)}") from error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            if not self._ready.done():
                self._ready.set_exception(McpError("it ended"))
            self._loop.close()

    async def _serve(self) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        self._over = asyncio.Event()
        # Of the environment it gets what mcp passes on (PATH, HOME and the like), so no token that was meant for another program.
        how = StdioServerParameters(
            command=self._server.command, args=list(self._server.args), env=dict(self._server.env)
        )
        with _opened(self._log) as log:
            async with stdio_client(how, errlog=log) as (read, write), ClientSession(read, write) as session:
                await asyncio.wait_for(session.initialize(), self._server.seconds)
                self._ready.set_result(session)
                await self._over.wait()

    def close(self) -> None:
        """End the process, and wait for that a little."""
        over = self._over
        if over is not None and not self.ended:
            with suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(over.set)
            self._thread.join(END_S)


def _opened(log: Path) -> TextIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    full = log.exists() and log.stat().st_size > LOG_BYTES
    return log.open("w" if full else "a", encoding="utf-8")


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:200] or type(error).__name__


def is_name(name: str) -> bool:
    """Whether a server can be called so: its tools' names begin with it."""
    return TOOL_NAME.fullmatch(name) is not None

"""Tools by name: the built-in ones, and those of MCP servers, over stdio or HTTP (https://modelcontextprotocol.io)."""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from tokamac.engine.errors import OptionError, PictureError, TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import TOOL_NAME, ToolSpec
from tokamac.engine.requirements import pip_install
from tokamac.engine.vision.picture import Picture

from ..settings import McpServer, Settings
from ..store.values import PICTURE, Attachment, ToolResult
from ..text.sanitise import sanitise, sanitise_line
from .builtin import AllowedFolders, Calculate, Clock, ListFolder, ReadFile, SearchFiles
from .calls import ActingTool, Furthest, Preview, Shown, Tool, ToolError, check_arguments, result_of
from .changes import KEEPS, RUNNING, EditFile, Keep, WriteFile, WriteJournal
from .sandbox import RunCommand

# Each MCP server has a thread with its own event loop, starts on first use and ends with the chat. If it dies or is
# slow, only the waiting call fails; the next call restarts it.


MISSING = f"MCP servers need the package mcp: {pip_install('tokamac[mcp]')}"
MOST_TOOLS = 64  # of one server
MOST_PICTURES = 8  # of one result
LONGEST_DESCRIPTION = 2_000
LONGEST_REASON = 200
LOG_BYTES = 1 << 20  # of what servers write to stderr, after which the file begins anew
END_S = 5.0  # how long a server may take to end
CLOSED = "Connection closed"  # mcp's message where the process has ended: why, only the server's stderr says
TAIL_BYTES = 4096


class McpError(TokamacError):
    """An MCP server can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class McpTool:
    spec: ToolSpec
    name: str
    server: "McpConnection"

    def run(self, arguments: Mapping[str, Any]) -> str | Shown:
        """Call it; return the texts of the result. Raises ToolError."""
        return self.server.call(self.name, arguments)


class McpConnection:
    """A server, started on demand. log: base path of its stderr log, to which its name is added."""

    def __init__(self, name: str, server: McpServer, log: Path) -> None:
        self.name = name
        self.server = server
        self._log = log.with_stem(f"{log.stem}-{name}")
        self._lock = threading.Lock()
        self._life: _Life | None = None

    def tools(self) -> list[McpTool]:
        """Start if needed and return its tools. Raises McpError."""
        try:
            found = self._running().tools(self.server.seconds)
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

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str | Shown:
        """Raises ToolError."""
        try:
            result = self._running().call(tool, dict(arguments), self.server.seconds)
        except McpError as error:
            self.close()
            raise ToolError(error.one_line()) from error
        found = [_block(each) for each in result.content]
        text = "\n".join(each for each in found if isinstance(each, str))
        pictures = tuple(each for each in found if isinstance(each, Attachment))[:MOST_PICTURES]
        if result.is_error:
            raise ToolError(text or "the server says no more than that it failed")
        return Shown(text, pictures) if pictures else text

    @property
    def is_running(self) -> bool:
        life = self._life
        return life is not None and not life.ended

    def close(self) -> None:
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.close()

    def _running(self) -> "_Life":
        with self._lock:
            if self._life is not None and self._life.ended:
                self._life = None
            if self._life is None:
                self._life = _Life(self.name, self.server, self._log)
            return self._life


def _block(block: Any) -> str | Attachment:
    text, data = (getattr(block, name, None) for name in ("text", "data"))
    if getattr(block, "type", None) == "image" and isinstance(data, str):
        try:
            found = Picture.of_base64(data)
        except PictureError as error:
            return f"[{error.message}]"
        return Attachment(f"picture-{found.digest[:6]}", found.encoded, PICTURE)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', 'something')}, which is not text]"


class _Life:
    def __init__(self, name: str, server: McpServer, log: Path) -> None:
        try:
            import mcp  # noqa: F401  # it takes a second, and is an extra
        except ImportError as error:
            raise McpError(MISSING) from error
        self._name, self._server, self._log = name, server, log
        self._written = 0  # bytes in the log when it began
        self._ready: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"mcp-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def tools(self, seconds: float) -> list[Any]:
        session = self._session(seconds)
        return list(self._wait(session.list_tools, seconds).tools)

    def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> Any:
        session = self._session(seconds)
        return self._wait(lambda: session.call_tool(tool, arguments), seconds)

    def _session(self, seconds: float) -> Any:
        try:
            return self._ready.result(seconds)
        except TimeoutError:
            self.close()
            wrote = f": {line}" if (line := self._last_line()) else ""
            raise McpError(f"the MCP server {self._name} did not start within {seconds:g} s{wrote}") from None
        except Exception as error:
            raise McpError(f"the MCP server {self._name} could not be started: {self._why(error)}") from error

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
            raise McpError(f"the MCP server {self._name} failed: {self._why(error)}") from error

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
        async with AsyncExitStack() as stack:
            if self._server.url:
                read, write = await self._connect(stack)
            else:
                # Of the environment it gets what mcp passes on (PATH, HOME and the like), so no token that was meant for
                # another program.
                how = StdioServerParameters(
                    command=self._server.command, args=list(self._server.args), env=dict(self._server.env)
                )
                log = stack.enter_context(_opened(self._log))
                self._written = log.tell()
                read, write = await stack.enter_async_context(stdio_client(how, errlog=log))
            session = await stack.enter_async_context(ClientSession(read, write))
            await asyncio.wait_for(session.initialize(), self._server.seconds)
            self._ready.set_result(session)
            await self._over.wait()

    async def _connect(self, stack: AsyncExitStack) -> tuple[Any, Any]:
        """Return the streams of a server at a URL; mcp follows no redirect to another one."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: os.path.expandvars(value) for name, value in self._server.headers}
        client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=self._server.seconds))
        streams = await stack.enter_async_context(streamable_http_client(self._server.url, http_client=client))
        return streams[0], streams[1]

    def close(self) -> None:
        over = self._over
        if over is not None and not self.ended:
            with suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(over.set)
            self._thread.join(END_S)

    def _why(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        why = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        return self._last_line() or why if why == CLOSED else why

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._written, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = log.read(TAIL_BYTES).decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line for each in reversed(lines) if (line := sanitise_line(each).strip())), "")[:LONGEST_REASON]


def _opened(log: Path) -> TextIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    full = log.exists() and log.stat().st_size > LOG_BYTES
    return log.open("w" if full else "a", encoding="utf-8")


def is_name(name: str) -> bool:
    return TOOL_NAME.fullmatch(name) is not None


# Calls run on threads (slow disks, remote servers) and report to ``then``.


class UnknownToolError(TokamacError):
    """No tool or server has this name."""


# Whether calls of a tool ask: each does, or none in this chat, or none at all.
Consent = Literal["asks", "chat", "always"]


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A row of the tool list. switch: name that turns it on and off, its own or its server's. consent: calls ask."""

    name: str
    about: str
    switch: str
    on: bool
    server: bool = False
    consent: Consent = "asks"

    @property
    def of_server(self) -> bool:
        return self.switch != self.name


class Toolbox:
    """Tools and MCP servers by name. folder: base of relative paths. log: of the servers' errors."""

    def __init__(self, settings: Settings, folder: Path, log: Path) -> None:
        folders = AllowedFolders([folder, *map(Path, settings.tools.folders)])
        built_in: tuple[Tool, ...] = (
            ReadFile(folders),
            ListFolder(folders),
            SearchFiles(folders),
            Calculate(),
            Clock(),
        )
        self.journal = WriteJournal()
        self._command = RunCommand(folders.roots)
        acting: tuple[ActingTool, ...] = (
            WriteFile(folders, self.journal),
            EditFile(folders, self.journal),
            self._command,
        )
        self.acting = {tool.spec.name: tool for tool in acting}
        self.built_in: dict[str, Tool] = {tool.spec.name: tool for tool in (*built_in, *acting)}
        self.servers: dict[str, McpConnection] = {}
        self._log = log
        self._offered: dict[str, list[McpTool]] = {}  # of the servers that have started
        self._starting: set[str] = set()
        self._failed: dict[str, str] = {}
        self._lock = threading.Lock()
        self.update(settings.mcp)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.built_in, *(name for name in self.servers if name not in self.built_in))

    @property
    def reading(self) -> tuple[str, ...]:
        """The built-in tools that change nothing."""
        return tuple(name for name in self.built_in if name not in self.acting)

    def furthest(self, name: str) -> Furthest:
        return "always" if (tool := self.acting.get(name)) is None else tool.furthest

    def preview(self, call: ToolCall) -> Preview | None:
        """Return what a call of a tool that acts would do; None: it only reads. Raises ToolError."""
        if (tool := self.acting.get(call.name)) is None:
            return None
        try:
            check_arguments(tool.spec, call.values)
            return tool.preview(call.values)
        except (OSError, ValueError) as error:
            raise ToolError(f"it can't be done: {error}") from error

    def update(self, servers: Mapping[str, McpServer]) -> None:
        known, wanted = self.servers, {name: each for name, each in servers.items() if is_name(name)}
        if {name: each.server for name, each in known.items()} == wanted:
            return
        same = {name for name, each in known.items() if wanted.get(name) == each.server}
        self.servers = {
            name: known[name] if name in same else McpConnection(name, each, self._log) for name, each in wanted.items()
        }
        for name in known.keys() - same:
            with self._lock:
                self._offered.pop(name, None)
                self._failed.pop(name, None)
            threading.Thread(target=known[name].close, name=f"end-{name}", daemon=True).start()

    def check(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return tool and server names without duplicates. Raises UnknownToolError."""
        wanted = tuple(dict.fromkeys(names))
        for name in wanted:
            if name not in self.names:
                raise UnknownToolError(f"there is no tool {name!r:.60}", f"There are: {', '.join(self.names)}.")
        return wanted

    def tools(self, names: Iterable[str]) -> list[Tool]:
        found: list[Tool] = []
        for name in dict.fromkeys(names):
            if name in self.built_in:
                found.append(self.built_in[name])
            else:
                with self._lock:
                    found += self._offered.get(name, [])
        return found

    def specs(self, names: Iterable[str]) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools(names))

    def pending(self, names: Iterable[str]) -> list[str]:
        with self._lock:
            return [
                name
                for name in names
                if name in self.servers and name not in self._offered and name not in self.built_in
            ]

    def start(self, name: str) -> int:
        """Start a server; return its number of tools. Raises McpError."""
        # A tool whose name is in use is omitted: consent given to the other one would hold for it, too.
        try:
            if (server := self.servers.get(name)) is None:
                raise McpError(f"the MCP server {name} is not in the settings any more")
            tools = server.tools()
        except McpError as error:
            with self._lock:
                self._failed[name] = error.one_line()
            raise
        with self._lock:
            taken = {*self.built_in, *(tool.spec.name for each in self._offered.values() for tool in each)}
            new = {tool.spec.name: tool for tool in reversed(tools) if tool.spec.name not in taken}
            self._offered[name] = list(reversed(new.values()))
            self._failed.pop(name, None)
        return len(new)

    def retry(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._failed.pop(name, None)

    def state_of(self, name: str) -> str:
        with self._lock:
            if name in self._starting:
                return "starting …"
            if (why := self._failed.get(name)) is not None:
                return f"failed: {why}"
            if (tools := self._offered.get(name)) is None:
                return "not started"
        many = f"{len(tools)} {'tool' if len(tools) == 1 else 'tools'}"
        return f"running, {many}" if self.servers[name].is_running else f"ended, {many}; a call starts it again"

    def listed(self, on: Collection[str], chat: Collection[str], always: Collection[str]) -> list[ListedTool]:
        """Return all tools and servers in display order, servers before their tools. chat, always: don't ask."""

        def row(tool: Tool, switch: str) -> ListedTool:
            name, about = tool.spec.name, tool.spec.description.split(". ")[0].rstrip(".")
            consent: Consent = "always" if name in always else "chat" if name in chat else "asks"
            return ListedTool(name, about, switch, switch in on, consent=consent)

        rows = [row(tool, name) for name, tool in self.built_in.items()]
        for name in (each for each in self.servers if each not in self.built_in):
            rows.append(ListedTool(name, self.state_of(name), name, name in on, server=True))
            rows += [row(tool, name) for tool in self.tools([name])]
        return rows

    def start_later(self, names: Sequence[str], then: Callable[[str], None]) -> None:
        for name in self.pending(names):
            with self._lock:
                if name in self._starting or name in self._failed:
                    continue
                self._starting.add(name)
            threading.Thread(target=self._start, args=(name, then), name=f"start-{name}", daemon=True).start()

    def _start(self, name: str, then: Callable[[str], None]) -> None:
        try:
            many = self.start(name)
            said = f"{name} is ready: {many} {'tool' if many == 1 else 'tools'}."
        except McpError as error:
            said = f"{name} has no tools here: {error.one_line()}"
        finally:
            with self._lock:
                self._starting.discard(name)
        then(said)

    def run(self, call: ToolCall) -> ToolResult:
        tool = next((each for each in self.tools(self.names) if each.spec.name == call.name), None)
        if tool is None:
            return ToolResult(call, f"Error: there is no tool {call.name!r:.60}", "failed")
        RUNNING.set(call)
        return result_of(tool, call)

    def run_later(self, call: ToolCall, then: Callable[[ToolResult], None], keep: Keep | None = None) -> None:
        """Run a call on a thread. keep: what keeps a note of what it writes."""

        def work() -> None:
            KEEPS.set(keep)
            then(self.run(call))

        threading.Thread(target=work, name=f"tool-{call.name}", daemon=True).start()

    def stop(self) -> None:
        """End the commands that run."""
        self._command.stop()

    def close(self) -> None:
        self.stop()
        for server in self.servers.values():
            server.close()

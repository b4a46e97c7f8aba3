"""The tools that a chat can have: those built in, and those of MCP servers, which start when they are turned on.

Calls run on threads, since a file may be on a slow disk and a server far away; what comes of them is told to ``then``.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import ToolSpec

from ..settings import Settings
from ..store.values import ToolResult
from .calculate import Calculate, Clock
from .files import AllowedFolders, ListFolder, ReadFile, SearchFiles
from .mcp import McpConnection, McpError, McpTool, is_name
from .tool import Tool, result_of


class UnknownToolError(TokamacError):
    """No tool and no server is called so."""


Consent = Literal["asks", "chat", "always"]
"""Whether calls of a tool ask: each does, or none in this chat, or none at all."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A row of the list of tools: a tool, or an MCP server.

    Attributes:
        name: its own; foreign text where it is a server's tool.
        about: what it does; of a server, its state.
        switch: what turns it on and off: its name, or that of its server.
        on: whether it is.
        server: it is a server.
        consent: whether its calls ask.
    """

    name: str
    about: str
    switch: str
    on: bool
    server: bool = False
    consent: Consent = "asks"

    @property
    def of_server(self) -> bool:
        """Whether it is one of a server's tools."""
        return self.switch != self.name


class Toolbox:
    """Tools by name, and MCP servers by name.

    Args:
        settings: Which folders may be read, and which servers there are.
        folder: What paths are relative to.
        log: Where servers write their errors.
    """

    def __init__(self, settings: Settings, folder: Path, log: Path) -> None:
        folders = AllowedFolders([folder, *map(Path, settings.tools.folders)])
        built_in: tuple[Tool, ...] = (
            ReadFile(folders),
            ListFolder(folders),
            SearchFiles(folders),
            Calculate(),
            Clock(),
        )
        self.built_in = {tool.spec.name: tool for tool in built_in}
        self.servers = {
            name: McpConnection(name, server, log) for name, server in settings.mcp.items() if is_name(name)
        }
        self._offered: dict[str, list[McpTool]] = {}  # of the servers that have started
        self._starting: set[str] = set()
        self._failed: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be turned on."""
        return (*self.built_in, *(name for name in self.servers if name not in self.built_in))

    def check(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return names of tools and servers, each once. Raises UnknownToolError."""
        wanted = tuple(dict.fromkeys(names))
        for name in wanted:
            if name not in self.names:
                raise UnknownToolError(f"there is no tool {name!r:.60}", f"There are: {', '.join(self.names)}.")
        return wanted

    def tools(self, names: Iterable[str]) -> list[Tool]:
        """Return the tools behind names, as far as their servers have started."""
        found: list[Tool] = []
        for name in dict.fromkeys(names):
            if name in self.built_in:
                found.append(self.built_in[name])
            else:
                with self._lock:
                    found += self._offered.get(name, [])
        return found

    def specs(self, names: Iterable[str]) -> tuple[ToolSpec, ...]:
        """Return what a model is told of them."""
        return tuple(tool.spec for tool in self.tools(names))

    def pending(self, names: Iterable[str]) -> list[str]:
        """Return the servers among ``names`` that have not said what their tools are."""
        with self._lock:
            return [
                name
                for name in names
                if name in self.servers and name not in self._offered and name not in self.built_in
            ]

    def start(self, name: str) -> int:
        """Start a server and learn its tools; return how many. Raises McpError.

        A tool whose name another one has already is left out: what the user allowed for that one would hold for this one, too.
        """
        try:
            tools = self.servers[name].tools()
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
        """Let servers that failed be started again."""
        with self._lock:
            for name in names:
                self._failed.pop(name, None)

    def state_of(self, name: str) -> str:
        """Return what a server is doing, in a few words: ``running, 3 tools``."""
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
        """Return all tools and servers in the order they are shown, each server before its tools.

        Args:
            on: what is turned on.
            chat: the tools that need not ask in the open chat.
            always: those that never ask.
        """

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
        """Start the servers among ``names`` on threads; tell ``then``, from there, a sentence on each.

        One that failed is not tried again until ``retry`` names it.
        """
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
        """Return what comes of a call."""
        tool = next((each for each in self.tools(self.names) if each.spec.name == call.name), None)
        if tool is None:
            return ToolResult(call, f"Error: there is no tool {call.name!r:.60}", "failed")
        return result_of(tool, call)

    def run_later(self, call: ToolCall, then: Callable[[ToolResult], None]) -> None:
        """Run a call on a thread, and tell ``then`` from there what came of it."""
        threading.Thread(target=lambda: then(self.run(call)), name=f"tool-{call.name}", daemon=True).start()

    def close(self) -> None:
        """End the servers."""
        for server in self.servers.values():
            server.close()

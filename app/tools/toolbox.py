"""The tools that a chat can have: those built in, and those of MCP servers, which start when they are turned on.

Calls run on threads, since a file may be on a slow disk and a server far away; what comes of them is told to ``then``.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import ToolSpec

from ..settings import Settings
from ..store.values import ToolResult
from .calculate import Calculate, Clock
from .files import AllowedFolders, ListFolder, ReadFile, SearchFiles
from .mcp import McpConnection, McpError, McpTool, is_name
from .tool import Tool, ToolError, result_of


class UnknownToolError(TokamacError):
    """No tool and no server is called so."""


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
        for name in names:
            if name in self.built_in:
                found.append(self.built_in[name])
            else:
                with self._lock:
                    found += self._offered.get(name, [])
        return list({tool.spec.name: tool for tool in found}.values())

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
        """Start a server and learn its tools; return how many. Raises McpError."""
        tools = self.servers[name].tools()
        with self._lock:
            self._offered[name] = tools
        return len(tools)

    def start_later(self, names: Sequence[str], then: Callable[[str, str], None]) -> None:
        """Start the servers among ``names`` on threads; tell ``then``, from there, each one's name and a sentence."""
        for name in self.pending(names):
            with self._lock:
                if name in self._starting:
                    continue
                self._starting.add(name)
            threading.Thread(target=self._start, args=(name, then), name=f"start-{name}", daemon=True).start()

    def _start(self, name: str, then: Callable[[str, str], None]) -> None:
        try:
            many = self.start(name)
            said = f"{name} is ready: {many} {'tool' if many == 1 else 'tools'}."
        except McpError as error:
            said = f"{name} has no tools here: {error.one_line()}"
        finally:
            with self._lock:
                self._starting.discard(name)
        then(name, said)

    def run(self, call: ToolCall, names: Iterable[str]) -> ToolResult:
        """Return what comes of a call of one of the tools behind ``names``."""
        tool = next((each for each in self.tools(names) if each.spec.name == call.name), None)
        if tool is None:
            return ToolResult(call, f"Error: {ToolError(f'there is no tool {call.name!r:.60}').one_line()}", "failed")
        return result_of(tool, call)

    def run_later(self, call: ToolCall, names: Sequence[str], then: Callable[[ToolResult], None]) -> None:
        """Run a call on a thread, and tell ``then`` from there what came of it."""
        work = threading.Thread(target=lambda: then(self.run(call, names)), name=f"tool-{call.name}", daemon=True)
        work.start()

    def close(self) -> None:
        """End the servers."""
        for server in self.servers.values():
            server.close()

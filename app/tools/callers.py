"""Tools for one answer of a command: their calls are asked for on the terminal, allowed by a flag, or refused."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Message, ToolCall
from tokamac.engine.options import ToolSpec

from .. import settings
from ..options import known_settings, warn
from ..output import note, quote
from ..store.values import ToolResult
from .loop import CallAsks, CallRuns, ToolLoop
from .tool import DENIED, call_line, call_lines, decision_of
from .toolbox import Toolbox


class AskTools:
    """The tools of one answer. box: None where there are none. allow: whether no call asks."""

    def __init__(self, box: Toolbox | None, names: Sequence[str], known: settings.ToolSettings, *, allow: bool) -> None:
        self._box = box
        self._loop = ToolLoop()
        self._loop.most = known.calls
        self._loop.specs = () if box is None else box.specs(names)
        self._loop.allowed = {spec.name for spec in self.specs} if allow else set(known.allowed)
        self._allowed: set[str] = set()  # for this answer

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told of them."""
        return self._loop.specs

    @property
    def most(self) -> int:
        """The limit of calls."""
        return self._loop.most

    @property
    def exhausted(self) -> bool:
        """Whether the limit of calls was reached, and the model was told so."""
        return self._loop.exhausted

    def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the results of calls, each asked for where it has to be."""
        self._loop.begin(calls, self._loop.specs, self._allowed)
        results = []
        while (step := self._loop.next()) is not None:
            match step:
                case ToolResult():
                    result = step
                case CallRuns(call):
                    result = self._run(call)
                case CallAsks(call):
                    result = self._asked(call)
            if result.outcome != "done":
                note(f"{call_line(result.call)}: {result.text}")
            results.append(Message("tool", result.text, tool_call_id=result.call.id, name=result.call.name))
        return results

    def _run(self, call: ToolCall) -> ToolResult:
        assert self._box is not None  # without it no tool has a name
        note(f"calling {call_line(call)}")
        return self._box.run(call)

    def _asked(self, call: ToolCall) -> ToolResult:
        if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
            note("nobody is here to allow a call; --allow-tools allows all of them")
            return ToolResult(call, DENIED, "refused")
        quote("\n".join(["The model wants to call:", *call_lines(call)]))
        decision = None
        while decision is None:
            sys.stderr.write("allow it? [o]nce, in this [c]hat, [a]lways, [d]eny> ")
            sys.stderr.flush()
            line = sys.stdin.readline()
            decision = decision_of(line) if line else "deny"
        if decision == "always":
            self._keep(call.name)
        return ToolResult(call, DENIED, "refused") if self._loop.decide(decision) is None else self._run(call)

    @staticmethod
    def _keep(name: str) -> None:
        known = known_settings()
        allowed = tuple(dict.fromkeys((*known.tools.allowed, name)))
        try:
            warn(settings.change(settings.default_path(), known, settings.with_allowed(known, allowed)))
        except OSError as error:
            note(f"the settings could not be written: {error.strerror}")


@contextmanager
def open_tools(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[AskTools]:
    """Yield the tools that the flags name; servers among them are started, and end with this."""
    names = [name.strip() for name in options.tools.split(",") if name.strip()]
    known = known_settings() if names else settings.Settings()
    if not names:
        if options.allow_tools:
            parser.error("--allow-tools allows the calls of --tools; name some")
        yield AskTools(None, (), known.tools, allow=False)
        return
    from platformdirs import user_log_path

    box = Toolbox(known, Path.cwd(), user_log_path("tokamac") / "mcp.log")
    try:
        try:
            names = list(box.check(names))
        except TokamacError as error:
            parser.error(error.one_line())
        for name in box.pending(names):
            box.start(name)
        yield AskTools(box, names, known.tools, allow=options.allow_tools)
    finally:
        box.close()

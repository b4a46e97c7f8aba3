"""The calls of a reply, one after another: which is next, and whether it needs to be allowed. Pure, as the session that steps it.

reply ends with calls ─▶ next ─▶ asks ─▶ runs ─▶ answered ─▶ next … ─▶ the model is given the results
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokamac.engine.events import ToolCall
from tokamac.engine.options import ToolSpec

from ..store.values import ToolResult
from .tool import STOPPED, STOPPED_RUNNING, Decision

MOST_CALLS = 16
"""For one prompt, unless the settings say otherwise."""


@dataclass(frozen=True, slots=True)
class CallAsks:
    """The call has to be allowed."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallRuns:
    """The call is run."""

    call: ToolCall


class ToolLoop:
    """The tools of a chat, and the calls that are being answered.

    Attributes:
        specs: what the model is told of. allowed: the tools that need not ask, in any chat. most: calls for one prompt.
        waiting: the call that asks to be allowed. running: the one that runs.
        exhausted: whether the limit was reached, and the model was told so.
    """

    def __init__(self) -> None:
        self.specs: tuple[ToolSpec, ...] = ()
        self.allowed: set[str] = set()
        self.most = MOST_CALLS
        self.waiting: ToolCall | None = None
        self.running: ToolCall | None = None
        self.exhausted = False
        self._left: list[ToolCall] = []
        self._offered: tuple[ToolSpec, ...] = ()
        self._allowed_here: set[str] = set()
        self._count = 0

    def reset(self) -> None:
        """A prompt of the user's is answered: count its calls from the beginning."""
        self._left, self._count = [], 0
        self.waiting = self.running = None
        self.exhausted = False

    def begin(self, calls: Sequence[ToolCall], offered: Sequence[ToolSpec], allowed: set[str]) -> None:
        """A reply ended with these calls.

        Args:
            calls: to be answered in this order.
            offered: the tools that its model was told of.
            allowed: those that need not ask in its chat; what the user allows there is added.
        """
        self._left, self._offered, self._allowed_here = list(calls), tuple(offered), allowed

    def next(self) -> CallAsks | CallRuns | ToolResult | None:
        """Take the next call: it asks, it runs, or is answered at once; None: all are answered."""
        self.waiting = self.running = None
        if not self._left:
            return None
        call = self._left.pop(0)
        self._count += 1
        if self._count > self.most:
            self.exhausted = True
            return ToolResult(
                call, f"Not run: the limit of {self.most} calls is reached. Answer with what you have.", "refused"
            )
        if call.problem:
            return ToolResult(
                call, f"Your call could not be read: {call.problem}. Write it again, in the right form.", "failed"
            )
        names = [spec.name for spec in self._offered]
        if call.name not in names:
            return ToolResult(
                call, f"There is no tool {call.name!r:.80}. There are: {', '.join(names) or 'none'}.", "failed"
            )
        if call.name not in self.allowed | self._allowed_here:
            self.waiting = call
            return CallAsks(call)
        self.running = call
        return CallRuns(call)

    def decide(self, decision: Decision) -> CallRuns | None:
        """Take what the user says to the call that asks; None: it is not run, and has to be answered."""
        call, self.waiting = self.waiting, None
        if call is None or decision == "deny":
            return None
        if decision != "once":
            (self.allowed if decision == "always" else self._allowed_here).add(call.name)
        self.running = call
        return CallRuns(call)

    def stop(self) -> list[ToolResult]:
        """Answer what is not answered yet: nothing more is run. A call that runs is not known to have had no effect."""
        running = [] if self.running is None else [ToolResult(self.running, STOPPED_RUNNING, "failed")]
        left = [*([] if self.waiting is None else [self.waiting]), *self._left]
        self.reset()
        return [*running, *(ToolResult(call, STOPPED, "refused") for call in left)]

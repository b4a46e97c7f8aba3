"""A tool and its calls: the protocol, bounds on results, consent, and which call of a reply is next."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import ToolSpec

from ..store.values import Attachment, ToolResult
from ..text.sanitise import reveal, sanitise, sanitise_line

LONGEST_RESULT = 24_000  # characters of a result: some 6,000 tokens
# Characters of a call's arguments that are shown when it asks to be allowed; longer ones are cut, and that is said.
LONGEST_SHOWN = 4_000
CUT = "\n[… {:,} more characters were left out]"
DENIED = "The user did not allow this call."
STOPPED = "The user stopped before this call was run."
STOPPED_RUNNING = "Stopped while this call ran; it may have had an effect."

# What the user says to a call: this one, those of its tool in this chat, for good, first another text, or not.
Decision = Literal["once", "chat", "always", "edit", "deny"]
Furthest = Literal["once", "chat", "always"]  # the most that calls of a tool can be allowed
# What a line of a question is: words, a heading, a note, or a row of a diff.
Mark = Literal["", "!", "note", "warning", "+", "-", " ", "@"]
Line = tuple[Mark, str]


class ToolError(TokamacError):
    """A call failed; the message is for the model."""


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec:
        """Name, description and argument schema."""

    def run(self, arguments: Mapping[str, Any]) -> "str | Shown":
        """Run on any thread, within seconds. Raises ToolError."""


@dataclass(frozen=True, slots=True)
class Shown:
    text: str
    pictures: tuple[Attachment, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What a call would do. furthest: the most that it can be allowed. edits: the argument that a user may edit."""

    lines: tuple[Line, ...]
    furthest: Furthest
    edits: str

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return ("once", "chat", "edit", "deny") if self.furthest == "chat" else ("once", "edit", "deny")


class ActingTool(Tool, Protocol):
    """A tool that changes something: its calls ask, unless they are allowed in this chat."""

    @property
    def furthest(self) -> Furthest:
        """The most that its calls can be allowed."""

    def preview(self, arguments: Mapping[str, Any]) -> Preview:
        """Return what a call would do, to be asked about. Raises ToolError where it can't be done."""


def result_of(tool: Tool, call: ToolCall) -> ToolResult:
    """Run a call; return its result or error. Never raises."""
    try:
        check_arguments(tool.spec, call.values)
        found = tool.run(call.values)
        shown = found if isinstance(found, Shown) else Shown(found, ())
        return ToolResult(call, bounded(shown.text), attachments=shown.pictures)
    except ToolError as error:
        return ToolResult(call, bounded(f"Error: {error.one_line()}"), "failed")
    except Exception as error:  # whatever a tool, or a server's reply, does must not end the chat
        reason = " ".join(str(error).split()) or type(error).__name__
        return ToolResult(call, bounded(f"Error: the tool failed: {reason}"), "failed")


def bounded(text: str) -> str:
    safe = sanitise(text[:LONGEST_RESULT])  # it only ever becomes shorter; a server may send any length
    left = len(text) - LONGEST_RESULT
    return (safe or "(empty)") if left <= 0 else safe + CUT.format(left)


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError for arguments that violate the schema's top level, where models err most."""
    schema = json.loads(spec.parameters)
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"the argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in known:
            if known and schema.get("additionalProperties") is not True:
                raise ToolError(f"there is no argument {name!r:.60}; there are: {', '.join(known)}")
            continue
        kinds = known[name].get("type") if isinstance(known[name], dict) else None
        fits = _KINDS.get(kinds) if isinstance(kinds, str) else None
        is_flag = isinstance(value, bool) and kinds in ("integer", "number")
        if fits is not None and (is_flag or not isinstance(value, fits)):
            raise ToolError(f"the argument {name!r} must be of type {kinds}")


def call_lines(call: ToolCall) -> list[str]:
    lines = [_on_one_line(call.name) or "(no name)"]
    for name, value in call.values.items():
        whole = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        left = len(whole) - LONGEST_SHOWN
        text = reveal(whole[:LONGEST_SHOWN]) + (CUT.format(left) if left > 0 else "")
        # The bar tells a value's later lines from an argument that they may pretend to be.
        lines += [f"  {'│ ' if at else f'{_on_one_line(name)}: '}{line}" for at, line in enumerate(text.split("\n"))]
    return (
        lines if not call.mistyped else [*lines, f"  not of the tool's type: {_on_one_line(', '.join(call.mistyped))}"]
    )


def _on_one_line(name: str) -> str:
    return " ".join(reveal(name).split())


def call_line(call: ToolCall) -> str:
    if call.problem:
        return "a call that could not be read"
    values = ", ".join(json.dumps(value, ensure_ascii=False) for value in call.values.values())
    mistyped = f" (not of the tool's type: {', '.join(call.mistyped)})" if call.mistyped else ""
    return sanitise_line(f"{call.name}({values}){mistyped}")


ASKED: tuple[Decision, ...] = ("once", "chat", "always", "deny")  # of a call that only reads
_WORDS: Mapping[Decision, str] = {
    "once": "[o]nce", "chat": "in this [c]hat", "always": "[a]lways", "edit": "[e]dit it first", "deny": "[d]eny",
}  # fmt: skip


def decisions_text(decisions: Sequence[Decision]) -> str:
    return f"allow it? {', '.join(_WORDS[each] for each in decisions)}> "


def question_of(call: ToolCall, preview: Preview | None) -> tuple[Line, ...]:
    if preview is not None:
        return preview.lines
    first, *rest = call_lines(call)
    return (("!", first), *(("", line) for line in rest))


def edited_arguments(call: ToolCall, name: str, text: str) -> str:
    """Return a call's arguments with another text; an editor drops the last line's end, which stays."""
    ends = "\n" if str(call.values[name]).endswith("\n") and not text.endswith("\n") else ""
    return json.dumps({**call.values, name: text + ends})


def decision_of(text: str, decisions: Sequence[Decision] = ASKED) -> Decision | None:
    word = text.strip().lower()
    names = {"yes": "once", "y": "once", "no": "deny", "n": "deny", "": "deny"}
    word = names.get(word, word)
    return next((each for each in decisions if word in (each, each[0])), None)


# reply ends with calls ─▶ next ─▶ asks ─▶ runs ─▶ answered ─▶ next … ─▶ the model gets the results


MOST_CALLS = 16  # for one prompt, unless the settings say otherwise


@dataclass(frozen=True, slots=True)
class CallAsks:
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallRuns:
    call: ToolCall


class ToolLoop:
    """The tools of a chat, and the calls being answered.

    allowed: never ask, in any chat. furthest: the most that calls of a tool can be allowed. most: call limit per
    prompt. waiting: the call that awaits consent. exhausted: the limit was reached and the model knows.
    """

    def __init__(self) -> None:
        self.specs: tuple[ToolSpec, ...] = ()
        self.allowed: set[str] = set()
        self.furthest: Callable[[str], Furthest] = lambda _: "always"
        self.most = MOST_CALLS
        self.waiting: ToolCall | None = None
        self.running: ToolCall | None = None
        self.exhausted = False
        self._left: list[ToolCall] = []
        self._offered: tuple[ToolSpec, ...] = ()
        self._allowed_here: set[str] = set()
        self._count = 0
        self._unread = False  # the reply before had only calls that could not be read

    def reset(self) -> None:
        self._left, self._count, self._unread = [], 0, False
        self.waiting = self.running = None
        self.exhausted = False

    def why_stop(self, calls: Sequence[ToolCall]) -> str:
        """Return why a reply's calls are not answered; "" where they are."""
        if self.exhausted:  # it was told, and goes on calling
            return f"the model made more than {self.most} calls"
        before, self._unread = self._unread, bool(calls) and all(call.problem for call in calls)
        return "the model's calls could not be read, twice in a row" if before and self._unread else ""

    def begin(self, calls: Sequence[ToolCall], offered: Sequence[ToolSpec], allowed: set[str]) -> None:
        self._left, self._offered, self._allowed_here = list(calls), tuple(offered), allowed

    def next(self) -> CallAsks | CallRuns | ToolResult | None:
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
        if not self._is_allowed(call.name):
            self.waiting = call
            return CallAsks(call)
        self.running = call
        return CallRuns(call)

    def _is_allowed(self, name: str) -> bool:
        furthest = self.furthest(name)
        return furthest != "once" and (name in self._allowed_here or (furthest == "always" and name in self.allowed))

    def revise(self, arguments: str) -> ToolCall | None:
        """Let the waiting call have what the user made of its arguments."""
        if self.waiting is not None:
            self.waiting = replace(self.waiting, arguments=arguments)
        return self.waiting

    def decide(self, decision: Decision) -> CallRuns | None:
        """Apply the user's decision; None: it isn't run and needs an answer."""
        call, self.waiting = self.waiting, None
        if call is None or decision in ("deny", "edit"):
            return None
        furthest = self.furthest(call.name)
        if decision != "once" and furthest != "once":
            (self.allowed if decision == furthest == "always" else self._allowed_here).add(call.name)
        self.running = call
        return CallRuns(call)

    def stop(self) -> list[ToolResult]:
        running = [] if self.running is None else [ToolResult(self.running, STOPPED_RUNNING, "failed")]
        left = [*([] if self.waiting is None else [self.waiting]), *self._left]
        self.reset()
        return [*running, *(ToolResult(call, STOPPED, "refused") for call in left)]

"""What a tool is, and what keeps its results within bounds. They are foreign text, made safe before anyone sees them."""

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import ToolCall
from tokamac.engine.options import ToolSpec

from ..sanitise import reveal, sanitise, sanitise_line
from ..store.values import ToolResult

LONGEST_RESULT = 24_000
"""Characters of a result: some 6,000 tokens."""
LONGEST_SHOWN = 4_000
"""Characters of a call's arguments that are shown when it asks to be allowed; longer ones are cut, and that is said."""
CUT = "\n[… {:,} more characters were left out]"
DENIED = "The user did not allow this call."
STOPPED = "The user stopped before this call was run."
STOPPED_RUNNING = "Stopped while this call ran; it may have had an effect."

Decision = Literal["once", "chat", "always", "deny"]
"""What the user says to a call: this one, those of its tool in this chat, for good, or not."""


class ToolError(TokamacError):
    """A call could not be done; the message is for the model."""


class Tool(Protocol):
    """A function that a model may call."""

    @property
    def spec(self) -> ToolSpec:
        """Its name, what it does, and the schema of its arguments."""

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Do it, on any thread, within seconds. Raises ToolError."""


def result_of(tool: Tool, call: ToolCall) -> ToolResult:
    """Return what comes of a call: its result, or why there is none. Raises nothing."""
    try:
        check_arguments(tool.spec, call.values)
        return ToolResult(call, bounded(tool.run(call.values)))
    except ToolError as error:
        return ToolResult(call, bounded(f"Error: {error.one_line()}"), "failed")
    except Exception as error:  # whatever a tool, or a server's reply, does must not end the chat
        reason = " ".join(str(error).split()) or type(error).__name__
        return ToolResult(call, bounded(f"Error: the tool failed: {reason}"), "failed")


def bounded(text: str) -> str:
    """Return a result made safe, and cut where it is too long."""
    safe = sanitise(text[:LONGEST_RESULT])  # it only ever becomes shorter; a server may send any length
    left = len(text) - LONGEST_RESULT
    return (safe or "(empty)") if left <= 0 else safe + CUT.format(left)


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError for arguments that the schema's top level does not allow: what a model gets wrong most."""
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
    """Return a call as it is shown when it asks to be allowed: the name, and each argument in full, safe."""
    lines = [_on_one_line(call.name) or "(no name)"]
    for name, value in call.values.items():
        whole = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        left = len(whole) - LONGEST_SHOWN
        text = reveal(whole[:LONGEST_SHOWN]) + (CUT.format(left) if left > 0 else "")
        # The bar tells a value's later lines from an argument that they may pretend to be.
        lines += [f"  {'│ ' if at else f'{_on_one_line(name)}: '}{line}" for at, line in enumerate(text.split("\n"))]
    return lines


def _on_one_line(name: str) -> str:
    return " ".join(reveal(name).split())


def call_line(call: ToolCall) -> str:
    """Return a call on one line."""
    if call.problem:
        return "a call that could not be read"
    values = ", ".join(json.dumps(value, ensure_ascii=False) for value in call.values.values())
    return sanitise_line(f"{call.name}({values})")


def decision_of(text: str) -> Decision | None:
    """Return the decision that a word, or its first letter, means; None where it means none."""
    word = text.strip().lower()
    decisions: tuple[Decision, ...] = ("once", "chat", "always", "deny")
    names = {"yes": "once", "y": "once", "no": "deny", "n": "deny", "": "deny"}
    word = names.get(word, word)
    return next((each for each in decisions if word in (each, each[0])), None)

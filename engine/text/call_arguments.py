"""The arguments of a call while a model writes them: pieces of JSON, none of which has to be taken back.

Where a model writes them as JSON, they are told as written, as far as they are JSON: what a parser repairs is not. Where it writes
each in tags, a text is told as it grows, anything else once it is whole and the parser has said what it is.

    {"path": "a.txt", "text": "one\\ntw      <parameter=path>a.txt</parameter><parameter=text>one tw
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

LONGEST_OPENING = 512
"""Characters before the arguments of a call, or between two of them, after which they are no longer waited for."""

SURE = 16
"""Characters after which the value of a text is what it looks like: parsers read a text such as "null" as something else."""

SPACE = re.compile(r"[ \t\n\r]*")
IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
IN_SCALAR = re.compile(r"[\w.+-]*")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


@dataclass(frozen=True, slots=True)
class Tags:
    """How a model writes an argument in tags.

    opening: up to its value, with its ``name``. closing: after it. lead: what of the value's beginning is no part of it. tail: what
    the parser needs after an argument that stands alone.
    """

    opening: re.Pattern[str]
    closing: str
    lead: re.Pattern[str]
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How calls can be told while they are written.

    opening: up to the arguments, with the ``name`` of the function, and the ``id`` where the model gives one. tags: around each
    argument; None where they are JSON. end: of one call of several between two marks; None where there is one.
    """

    opening: re.Pattern[str]
    tags: Tags | None = None
    end: str | None = None


class Arguments(Protocol):
    """Arguments that are being written. rest: what was taken and not used, after their end once they are over."""

    rest: str
    is_over: bool
    is_broken: bool

    def take(self, text: str) -> str:
        """Return what can be told, now that this text was written."""


class JsonArguments:
    """A JSON object, read as strictly as ``json.loads`` does. An escape, a number or a word is told whole."""

    def __init__(self) -> None:
        self.rest = ""
        self.is_over = self.is_broken = False
        self._closers: list[str] = []  # of what is open
        self._wants = "value"
        self._is_empty = False  # directly behind "{" or "["
        self._in_string = False

    def take(self, text: str) -> str:
        """See ``Arguments``."""
        self.rest += text
        at = 0
        while not (self.is_over or self.is_broken):
            end = self._step(self.rest, at)
            if end == at:
                break
            at = end
        told, self.rest = self.rest[:at], self.rest[at:]
        return told

    def _step(self, text: str, at: int) -> int:
        """Return where the next part ends; ``at`` where more has to be written, or it is not JSON."""
        if self._in_string:
            end = _end(IN_STRING, text, at)
            if text.startswith('"', end):
                self._in_string = False
                return end + 1
            self.is_broken = end < len(text) and HALF_ESCAPE.fullmatch(text, end) is None
            return end
        if (after := _end(SPACE, text, at)) > at:
            return after
        match text[at : at + 1]:
            case "":
                return at
            case '"' if self._closers and self._wants in ("key", "value"):
                self._in_string, self._wants = True, ":" if self._wants == "key" else ","
            case ":" if self._wants == ":":
                self._wants = "value"
            case "," if self._wants == ",":
                self._wants = "key" if self._closers[-1] == "}" else "value"
            case "{" | "[" as mark if self._wants == "value" and (self._closers or mark == "{"):
                self._closers.append("}" if mark == "{" else "]")
                self._wants, self._is_empty = "key" if mark == "{" else "value", True
                return at + 1
            case mark if self._closers[-1:] == [mark] and (self._wants == "," or self._is_empty):
                self._closers.pop()
                self._wants, self.is_over = ",", not self._closers
            case _:
                return self._scalar(text, at)
        self._is_empty = False
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        end = _end(IN_SCALAR, text, at)
        self.is_broken = self._wants != "value" or not self._closers or end == at
        if self.is_broken or end == len(text):
            return at
        self.is_broken = SCALAR.fullmatch(text, at, end) is None
        self._wants, self._is_empty = ",", False
        return at if self.is_broken else end


class TaggedArguments:
    """Arguments in tags of their own, told as the JSON object that the parser makes of them.

    Args:
        tags: Around each.
        head: What was written before the first.
        end: What ends the call; None where that is not a part of what is taken.
        parse: Reads the arguments of a whole call; may raise anything.
        texts: Names of those that are texts, whatever is written in them.
    """

    def __init__(
        self,
        tags: Tags,
        head: str,
        end: str | None,
        parse: Callable[[str], Mapping[str, Any]],
        texts: Collection[str],
    ) -> None:
        self.rest = ""
        self.is_over = self.is_broken = False
        self._tags, self._head, self._end, self._parse, self._texts = tags, head, end, parse, texts
        self._before = ""  # the next argument
        self._has_begun = False
        self._opened: re.Match[str] | None = None
        self._value: list[str] = []
        self._told: list[str] = []  # of this argument
        self._waiting = ""  # of its value

    def take(self, text: str) -> str:
        """See ``Arguments``."""
        self.rest += text
        told = [] if self._has_begun else ["{"]
        self._has_begun = True
        while not (self.is_over or self.is_broken):
            piece = self._begin() if self._opened is None else self._grow(self._opened)
            if piece is None:
                break
            told.append(piece)
        return "".join(told)

    def _begin(self) -> str | None:
        """Begin the next argument; None while it has not begun."""
        after = self.rest.lstrip()
        if self._end is not None and after.startswith(self._end):
            self.rest, self.is_over = after, True
            return "}"
        self._opened = self._tags.opening.match(self.rest, 0, LONGEST_OPENING)
        if self._opened is None:
            self.is_broken = len(self.rest) > LONGEST_OPENING
            return None
        self.rest = self.rest[self._opened.end() :]
        self._value, self._told, self._waiting = [], [], ""
        return ""

    def _grow(self, opened: re.Match[str]) -> str | None:
        """Return what more of the value can be told; None while it has to wait."""
        closing = self._tags.closing
        at = self.rest.find(closing)
        is_whole = at >= 0
        if not is_whole:
            at = max(0, len(self.rest) - len(closing) + 1)
        value, self.rest = self.rest[:at], self.rest[at:]
        self._value.append(value)
        if is_whole:
            self.rest = self.rest[len(closing) :]
            self._opened = None
            return self._whole(opened)
        name = opened["name"].strip()
        return (self._part(name, value) or None) if name in self._texts else None

    def _part(self, name: str, value: str) -> str:
        """Return what more of a text can be told: white space at its end may be no part of it."""
        self._waiting += value
        before = "" if self._told else f'{self._before}{json.dumps(name, ensure_ascii=False)}: "'
        begins = 0 if self._told else _end(self._tags.lead, self._waiting, 0)
        ends = len(self._waiting.rstrip())
        if not self._told and ends - begins < SURE:
            return ""
        ready, self._waiting = self._waiting[begins:ends], self._waiting[ends:]
        self._told.append(before + json.dumps(ready, ensure_ascii=False)[1:-1])
        return self._told[-1]

    def _whole(self, opened: re.Match[str]) -> str | None:
        """Return the rest of an argument; None where it is not what was told of it."""
        written = "".join((self._head, opened[0], *self._value, self._tags.closing, self._tags.tail))
        try:
            found = self._parse(written)
            whole = self._before + json.dumps(found, ensure_ascii=False, allow_nan=False)[1:-1]
        except Exception:  # a parser may raise anything, and raises it again when the call is read
            found, whole = {}, ""
        told = "".join(self._told)
        self.is_broken = len(found) != 1 or not whole.startswith(told)
        self._before = ", "
        return None if self.is_broken else whole[len(told) :]


ARGUMENTS = Streaming(re.compile(r"\s*(?=\{)"))
"""Of a call that is nothing but its arguments."""

_NAMED = Streaming(
    re.compile(
        r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,'
        r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )
)


def _keyed(prefix: str) -> Streaming:
    """Return how GLM's calls are told: a name, then keys and values in tags of their own."""
    return Streaming(
        re.compile(rf"\s*(?P<name>[\w.-]+)\s*(?=<{prefix}arg_key>)"),
        Tags(
            re.compile(rf"\s*<{prefix}arg_key>(?P<name>[^<]*)</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"),
            f"</{prefix}arg_value>",
            re.compile(r"\s*"),
        ),
    )


STREAMING: Mapping[str, Streaming] = {
    "bare": _NAMED,
    "harmony": ARGUMENTS,
    "json_tools": _NAMED,
    "mistral": Streaming(re.compile(r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"), end=""),
    "kimi_k2": Streaming(
        re.compile(
            r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        end="<|tool_call_end|>",
    ),
    "qwen3_coder": Streaming(
        re.compile(r"\s*<function=\s*(?P<name>[\w.-]+)>"),
        Tags(re.compile(r"\s*<parameter=\s*(?P<name>[^\s<>]+)>"), "</parameter>", re.compile(r"\n?"), "</function>"),
    ),
    "minimax_m2": Streaming(
        re.compile(r"""\s*<invoke name=(["']?)(?P<name>[\w.-]+)\1>"""),
        Tags(
            re.compile(r"""\s*<parameter name=(["']?)(?P<name>[^\s"'<>]+)\1>"""),
            "</parameter>",
            re.compile(r"\s*"),
            "</invoke>",
        ),
        end="</invoke>",
    ),
    "glm47": _keyed(""),
    "laguna": _keyed(""),
    "longcat": _keyed("longcat_"),
}
"""By the name of the format. The others (Python's syntax, Gemma's, types beside each argument) are told once they are whole."""


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a pattern that matches anywhere ends."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()

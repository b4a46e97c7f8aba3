"""How families of models write calls of tools, and which of them a chat template writes."""

# Most families write JSON between two marks, which are found in a rendered call; the others are a table, after what
# their templates and tokenizers publish.

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex

from ..events import ToolCall


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of ``regex``, compiled where it is first used: a model writes one dialect of thirty."""

    written: str

    def match(self, text: str, at: int = 0, *, partial: bool = False) -> Any:
        """Return the match at a place, or None."""
        return regex.compile(self.written).match(text, at, partial=partial)

    def finditer(self, text: str) -> Iterator[Any]:
        """Yield all matches."""
        yield from regex.compile(self.written).finditer(text)


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """How values are written. quotes: around texts, longest first. plain: a run of plain text, by quote."""

    quotes: tuple[str, ...] = ('"', "'")
    escapes: bool = True
    bare_keys: bool = False
    is_python: bool = False
    plain: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        escape = r"\\" if self.escapes else ""
        plain = {each: Pattern(rf"[^{each[0]}{escape}\x00-\x1f]*") for each in self.quotes}
        object.__setattr__(self, "plain", plain)


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments in tags.

    opening: of one, with its ``name`` and perhaps the ``kind`` of its value. closing: of its value; only what matches
    ``follow`` may follow it. end: of all. pad: white space within the tags that is none of the value's. block:
    around a JSON object of all arguments.
    """

    opening: Any
    closing: str
    follow: Any
    end: str
    pad: str = ""
    block: tuple[Any, Any] | None = None


JSON_VALUES = ValueSyntax()
PYTHON_VALUES = ValueSyntax(('"""', "'''", '"', "'"), is_python=True)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written.

    start: the mark before them, "" if there is none. ends: marks after them. bare: with what a call begins where
    ``start`` is missing. head: what comes before the arguments, with the ``name`` and perhaps an ``id``; None:
    objects that name their function. tail: what follows the arguments. is_alone: calls are the whole reply. late_id:
    the model's own id follows the arguments. id_form: of ids that the template writes in place of names. answer: what
    follows ``start`` where an answer, not a call, begins.
    """

    name: str
    start: str
    ends: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    head: Any = None
    tail: Any = None
    values: ValueSyntax = JSON_VALUES
    tags: Tags | None = None
    is_alone: bool = False
    late_id: bool = False
    id_form: str = ""
    answer: Any = None


NAME = r"(?P<name>[\w.-]+)"
QUOTED_NAME = rf"""(?P<quote>["']?){NAME}(?P=quote)"""
FENCED = r"\s*(?:```(?:json)?\s*)?(?=\{)"  # JSON in a block of code


def _tagged(
    name: str,
    marks: tuple[str, ...],
    call: tuple[str, str],
    value: tuple[str, str],
    *,
    pad: str = "",
    block: tuple[Any, Any] | None = None,
    bare: str | tuple[str, ...] = (),
) -> Dialect:
    """Return a dialect with arguments in tags. call, value: the pattern of what opens one, and what closes it."""
    closings = "|".join(regex.escape(each) for each in (call[1], *marks[1:]) if each)
    opening, follow = Pattern(rf"\s*{value[0]}"), Pattern(rf"\s*(?:{value[0]}|{closings})")
    tags = Tags(opening, value[1], follow, call[1], pad, block)
    bare = (bare,) if isinstance(bare, str) else bare
    return Dialect(name, marks[0], marks[1:], bare, Pattern(rf"\s*{call[0]}"), tags=tags)


def _keyed(name: str, prefix: str = "", suffix: str = "", *, section: bool = False) -> Dialect:
    key, value, marks = (
        (f"<{prefix}{each}{suffix}>", f"</{prefix}{each}{suffix}>") for each in ("arg_key", "arg_value", "tool_call")
    )
    opening = rf"{key[0]}(?P<name>[^<]*){key[1]}(?:\\n|\s)*{value[0]}"
    call = rf"{NAME}\s*(?:<tool_sep>\s*)?(?={key[0]}|{marks[1]})"
    if not section:
        return _tagged(name, marks, (call, ""), (opening, value[1]))
    around = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    return _tagged(name, around, (rf"{marks[0]}\s*{call}", marks[1]), (opening, value[1]), bare=marks[0])


def _functions(name: str, prefix: str, pad: str) -> Dialect:
    marks = (f"<{prefix}tool_call>", f"</{prefix}tool_call>")
    value = (r"<parameter=\s*(?P<name>[^\s<>]+)\s*>", "</parameter>")
    return _tagged(name, marks, (rf"<function=\s*{NAME}\s*>", "</function>"), value, pad=pad, bare="<function=")


def _invoked(name: str, section: str, prefix: str, attributes: str = "[^>]*", other: str = "") -> Dialect:
    """Return a dialect of ``invoke`` within a section; other: a section of another name, which it reads as well."""
    value = rf"""<{prefix}parameter\s+name=(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote){attributes}>"""
    call = rf"(?:<{other}>\s*)?<{prefix}invoke\s+name={QUOTED_NAME}\s*>"
    marks = (f"<{section}>", f"</{section}>", *([f"</{other}>"] if other else ()))
    bare = (f"<{prefix}invoke name=", *([f"<{other}>"] if other else ()))
    return _tagged(name, marks, (call, f"</{prefix}invoke>"), (value, f"</{prefix}parameter>"), bare=bare)


def _headed(
    name: str, marks: tuple[str, ...], call: tuple[str, str], between: tuple[str, str], id_form: str = ""
) -> Dialect:
    """Return a dialect of sections whose calls have a name, or an id with it, before their JSON.

    between: patterns of what stands before the name and after it.
    """
    named = (
        rf"(?P<id>(?:functions\.)?{NAME.replace('+', '+?')}:\d+)|(?:functions\.)?(?P<name>[\w.-]+)" if id_form else NAME
    )
    head = Pattern(rf"\s*{regex.escape(call[0])}\s*{between[0]}(?:{named}){between[1]}{FENCED}")
    tail = Pattern(rf"[\s}}]*(?:```)?\s*{regex.escape(call[1])}")
    return Dialect(name, marks[0], marks[1:], (call[0],), head, tail, id_form=id_form)


def _bars(text: str) -> str:
    return text.replace("|", "\uff5c").replace("_", "\u2581")  # as DeepSeek's marks have them


_DSML = _bars("|DSML|")
_DSML_VALUE = r'(?:\s+string="(?P<kind>true|false)")?\s*'
_SEPARATOR = regex.escape(_bars("<|tool_sep|>"))
_XTML_BLOCK = (
    Pattern(r"\s*<\|open\|>json[^<]*<\|sep\|>\s*(?=\{)"),
    Pattern(r"\s*<\|close\|>json<\|sep\|>"),
)

BARE = Dialect("bare", "<|python_tag|>", bare=("{",), is_alone=True)
HARMONY = Dialect("harmony", "")
JSON = Dialect("json_tools", "<tool_call>", ("</tool_call>",), ("{",))
MISTRAL_START = "[TOOL_CALLS]"
TABLE = (
    _functions("qwen3_coder", "", "\n"),
    _functions("seed_oss", "seed:", ""),
    _keyed("hunyuan_v3", section=True),  # before glm47, whose calls are the same without their section
    _keyed("hunyuan_v4", suffix=":opensource", section=True),
    _keyed("glm47"),
    _keyed("longcat", "longcat_"),
    _invoked("minimax_m2", "minimax:tool_call", ""),
    _invoked("muse_spark", "atem:function_calls", "atem:"),
    _invoked("deepseek_v32", f"{_DSML}function_calls", _DSML, _DSML_VALUE, f"{_DSML}tool_calls"),
    _invoked("deepseek_v4", f"{_DSML}tool_calls", _DSML, _DSML_VALUE, f"{_DSML}function_calls"),
    _tagged(
        "kimi_k3",
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        (r'<\|open\|>call(?:\s+index="\d*")?\s+tool="(?P<name>[\w.-]+)"[^<]*<\|sep\|>', "<|close|>call<|sep|>"),
        (r'<\|open\|>argument\s+key="(?P<name>[^"]*)"(?:\s+type="(?P<kind>\w*)")?<\|sep\|>', "<|close|>argument<|sep|>"),
        block=_XTML_BLOCK,
    ),
    _tagged(
        "minicpm5",
        ("",),
        (rf"<function\s+name={QUOTED_NAME}\s*>", "</function>"),
        (r"""<param\s+name=(?P<quote>["']?)(?P<name>[^\s"'<>]+)(?P=quote)\s*>""", "</param>"),
        bare="<function name=",
    ),
    Dialect("mistral", MISTRAL_START, late_id=True,
            head=Pattern(rf"\s*{NAME}\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?(?:\[ARGS\])?\s*(?=\{{)")),
    _headed("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("<|tool_call_begin|>", "<|tool_call_end|>"), ("", r"\s*<\|tool_call_argument_begin\|>"), "functions.{}:{}"),
    _headed("deepseek_v3", (_bars("<|tool_calls_begin|>"), _bars("<|tool_calls_end|>")),
            (_bars("<|tool_call_begin|>"), _bars("<|tool_call_end|>")), (f"(?:function{_SEPARATOR})?", f"(?:{_SEPARATOR})?")),
    _headed("hunyuan", ("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>"), ("", "")),
    Dialect("functionary", "", bare=("<function=",), head=Pattern(rf"\s*<function={NAME}>\s*(?=\{{)"),
            tail=Pattern(r"[\s}]*</function>")),
    Dialect("functionary_v32", ">>>", head=Pattern(rf"\s*{NAME}\n\s*(?=\{{)"), answer=Pattern(r"\s*all\n")),
    Dialect("pythonic", "<|tool_call_start|>", ("<|tool_call_end|>",), head=Pattern(rf"\s*{NAME}\("), values=PYTHON_VALUES),
    Dialect("olmo3", "<function_calls>", ("</function_calls>",), head=Pattern(rf"\s*{NAME}\("), values=PYTHON_VALUES),
    Dialect("gemma4", "<|tool_call>", ("<tool_call|>",), head=Pattern(rf"\s*call:{NAME}(?=\{{)"),
            values=ValueSyntax(('<|"|>', '"'), escapes=False, bare_keys=True)),
    Dialect("function_gemma", "<start_function_call>", ("<end_function_call>",), head=Pattern(rf"\s*call:{NAME}(?=\{{)"),
            values=ValueSyntax(("<escape>", '"'), escapes=False, bare_keys=True)),
)  # fmt: skip
# Of models whose templates write definitions of tools, but no calls.
UNWRITTEN = (
    Dialect("json", "<|tool_call|>", ("<|/tool_call|>",), ("{",)),
    JSON,
    *(each for each in TABLE if each.name == "olmo3"),
)
BY_NAME = {each.name: each for each in (BARE, HARMONY, JSON, *TABLE)} | {"laguna": _keyed("laguna")}

MARK = r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])"
MARK_BEFORE = regex.compile(rf"({MARK})\s*\[?\s*$")
MARK_AFTER = regex.compile(rf"[^<\[]*({MARK})")
TURN = 16  # characters by which a turn's beginning is told
OUTER = regex.compile(r'\{[^{}]*"function"\s*:\s*$')  # a call as OpenAI's interface has it


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """How a template begins and ends a turn, as far as calls and answers have it in common."""

    before: str
    after: str

    @classmethod
    def around(cls, text: str, rendered: str) -> "TurnMarks":
        at = rendered.rfind(text)
        after = MARK_AFTER.match(rendered, at + len(text)) if at >= 0 else None
        return cls(rendered[: max(at, 0)].rstrip(), "" if after is None else after[1])


def json_dialect(called: str, call: ToolCall, turn: TurnMarks) -> Dialect | None:
    """Return the dialect of a ``call`` that is rendered as JSON; None if it isn't."""
    place = called.rfind(*call.values.values())
    named = called.rfind(f'"{call.name}"', 0, max(place, 0))
    begin = called.rfind("{", 0, max(named, 0))
    if begin < 0:
        return None
    outer = OUTER.search(called, 0, begin)
    before = called[: outer.start() if outer else begin].rstrip()
    if before.endswith(turn.before[-TURN:]):
        return BARE
    start, end = MARK_BEFORE.search(before), MARK_AFTER.match(called, place)
    if start is None:
        return None
    is_own = end is None or end[1] == turn.after or start[1] == MISTRAL_START
    title = {JSON.start: JSON.name, MISTRAL_START: "mistral"}.get(start[1], "json")
    ends = () if end is None or is_own else (str(end[1]),)
    return Dialect(title, start[1], ends, ("{",), late_id=called.find(call.id, place) >= 0)


def written(dialect: Dialect, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls as a model of this dialect writes them, for a template that doesn't."""
    end = "".join(dialect.ends[:1])
    if dialect.values.is_python:
        lines = [
            f"{name}({', '.join(f'{key}={_json(each)}' for key, each in values.items())})" for name, values in calls
        ]
        return "\n".join(lines).join((dialect.start, end))
    objects = [_json({"name": name, "arguments": values}) for name, values in calls]
    if dialect.name == JSON.name:
        return "\n".join(f"{dialect.start}\n{each}\n{end}" for each in objects)
    return f"{dialect.start}[{', '.join(objects)}]{end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def padded(dialect: Dialect, rendered: str, word: str) -> Dialect:
    """Return the dialect with the white space that the template writes around a value."""
    if dialect.tags is None:
        return dialect
    found = [*dialect.tags.opening.finditer(rendered)]
    pad = rendered[found[-1].end() : rendered.rfind(word)] if found else dialect.tags.pad
    return dialect if pad.strip() else replace(dialect, tags=replace(dialect.tags, pad=pad))

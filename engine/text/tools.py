"""Calls of functions in a reply's text: how a model writes them, read by mlx-lm's parsers, and given back to its template.

mlx-lm tells a model's format from its template or vocabulary, and has a parser for each: between two marks a call, or several, in a
form of their own. Two families are not among them and are read here: Harmony, where a channel's header names the function, and
Llama 3's reply that is nothing but a JSON object.

    I'll look. <tool_call>{"name": "read_file", "arguments": {"path": "a.txt"}}</tool_call>
    text       start       what the parser reads                               end

What can't be read stays text, so that nothing is lost, and is told as a call with a problem, so that the model can be told. That
holds for a call of which pieces were told already: they can't be taken back, so the problem says that they are no call.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..errors import TemplateError
from ..events import Message, ToolCall, ToolCallDelta
from ..options import ToolSpec
from .call_arguments import ARGUMENTS, LONGEST_OPENING, STREAMING, Arguments, JsonArguments, Streaming, TaggedArguments

LONGEST_CALL = 1 << 18
"""Characters of a call that is given to a parser: regular expressions over foreign text take their time."""

CALLED_FUNCTION = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
"""Of a Harmony message: to which function its header is addressed."""

BARE = "bare"
HARMONY_CALLS = "harmony"
PARSER_NAME = re.compile(r"[a-z][a-z0-9_]*")
ID_LENGTH = 9
ID = re.compile(r"[A-Za-z0-9]{9}")
"""Mistral's templates refuse any other."""

PROBES = (
    ToolSpec("find_probe", "Finds a probe.", {"type": "object", "properties": {"word": {"type": "string"}}}),
    ToolSpec("count_probes", "Counts probes.", {"type": "object", "properties": {"word": {"type": "string"}}}),
)
"""Tried on a chat template: does it write definitions?"""
ASKED = Message("user", "What is prefill?")
CALLED = tuple(ToolCall(each.name, f'{{"word": "w{at}w"}}', f"probecal{at}") for at, each in enumerate(PROBES))
RESULTS = tuple(Message("tool", f"r{call.id}r", tool_call_id=call.id, name=call.name) for call in CALLED)
"""Tried on a chat template: does it write a call and its result, and several at once?"""

Parsed = tuple[str, Mapping[str, Any], str]
"""Name, arguments, and the id that the model gave or ""."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls. start, end: the marks around them; ``end`` is "" where the reply's end is that of the calls.

    parse: from what stands between the marks, and the definitions. Raises whatever a parser raises.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Sequence[Mapping[str, Any]]], list[Parsed]]

    @property
    def streaming(self) -> Streaming | None:
        """How calls are told while they are written; None where they are told once they are whole."""
        return STREAMING.get(self.name)


def find_format(template: str, vocabulary: Mapping[str, int], wanted: object) -> CallFormat | None:
    """Return mlx-lm's format for a model, found as mlx-lm finds it; None where it has none.

    wanted: what the model's tokenizer_config.json names, if it does.
    """
    from mlx_lm import tokenizer_utils

    shim = SimpleNamespace(chat_template=template, get_vocab=lambda: vocabulary)
    name = wanted if isinstance(wanted, str) else tokenizer_utils._infer_tool_parser(shim)
    if not isinstance(name, str) or not PARSER_NAME.fullmatch(name):
        return None
    try:
        module = import_module(f"mlx_lm.tool_parsers.{name}")
    except ImportError:
        return None

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Parsed]:
        found = module.parse_tool_call(text, list(tools))
        return [_parsed(each) for each in (found if isinstance(found, list) else [found])]

    return CallFormat(name, module.tool_call_start, module.tool_call_end, parse)


def harmony_format() -> CallFormat:
    """Return the format of models that write channels; the name of the function stands in the channel's header."""
    return CallFormat(HARMONY_CALLS, "", "", lambda text, _: [_parsed(json.loads(text))])


def bare_format() -> CallFormat:
    """Return the format of models whose call is a whole reply, a JSON object with a name and parameters."""
    return CallFormat(BARE, "", "", _parse_bare)


def _parse_bare(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Parsed]:
    names = {each["function"]["name"] for each in tools}
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        if not isinstance(value, dict) or value.get("name") not in names:
            raise ValueError("no tool is named")
        calls.append(_parsed(value))
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))
    return calls


def may_be_bare(text: str) -> bool:
    """Whether a reply that begins so may be a bare call."""
    begun = text.lstrip()
    return not begun or (begun[0] == "{" and (len(begun) < 200 or '"name"' in begun[:200]))


def _parsed(call: Any) -> Parsed:
    """Return what a parser found. Raises ValueError for what is no call."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"].strip():
        raise ValueError("it names no function")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are not a JSON object")
    given = call.get("id")
    return call["name"].strip(), arguments, given if isinstance(given, str) else ""


class CallReader:
    """Reads the calls of one reply.

    Args:
        form: The model's.
        tools: What it may call.
        seed: Tells this reply from others of the conversation: a number of its prompt.
    """

    def __init__(self, form: CallFormat, tools: Sequence[ToolSpec], seed: int) -> None:
        self.form = form
        self._tools = [each.as_dict for each in tools]
        self._texts = {each.name: _names_of_texts(each) for each in tools}
        self._seed = seed
        self._count = 0

    def is_bare(self, text: str) -> bool:
        """Whether a reply without marks begins with a call of a tool, up to its arguments."""
        streaming = self.form.streaming
        begun = None if streaming is None else streaming.opening.match(text, 0, LONGEST_OPENING)
        return begun is not None and begun["name"] in self._texts

    def begin(self, name: str, given: str) -> ToolCallDelta:
        """Return the beginning of a call: what is known before its arguments. given: the id that the model wrote, or ""."""
        return ToolCallDelta(name, "", given or self._id(name))

    def arguments(self, streaming: Streaming, head: str, name: str) -> Arguments:
        """Return the arguments of a call of ``name`` that begins with ``head``."""
        if streaming.tags is None:
            return JsonArguments()

        def parse(text: str) -> Mapping[str, Any]:
            ((called, arguments, _),) = self.form.parse(text, self._tools)
            return arguments if called == name else {}

        return TaggedArguments(streaming.tags, head, streaming.end, parse, self._texts.get(name, ()))

    def read(self, text: str, name: str = "", begun: ToolCallDelta | None = None) -> list[ToolCall]:
        """Return the calls in a text, or one with a problem.

        name: of the function, where the text does not say it. begun: what was told of the first: its arguments go on from there.
        """
        try:
            if len(text) > LONGEST_CALL:
                raise ValueError(f"it has more than {LONGEST_CALL:,} characters")
            found = [(name, _object(text), "")] if name else self.form.parse(text, self._tools)
            if begun is None:
                return [self._call(*each) for each in found]
            if not found or found[0][0] != begun.name:
                raise ValueError("it does not name the function that it began with")
            # An id that stands behind the arguments comes too late.
            first = ToolCall(begun.name, _completed(begun.arguments, _dumped(found[0][1])), begun.id)
            return [first, *(self._call(*each) for each in found[1:])]
        except Exception as error:  # a parser may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            begun = begun or ToolCallDelta(name, "", self._id(name))
            return [ToolCall(begun.name, text, begun.id, problem=reason)]

    def _call(self, name: str, arguments: Mapping[str, Any], given: str) -> ToolCall:
        return ToolCall(name, _dumped(arguments), given or self._id(name))

    def _id(self, name: str) -> str:
        """Return an id that the same reply to the same prompt has again, and that is known before the arguments are."""
        self._count += 1
        return short_id(f"{self._seed} {self._count} {name}")


class OpenCall:
    """What stands between the marks of calls, while a model writes it: told as far as it is known.

    Args:
        reader: Of the reply.
        header: What was written to begin it.
        name: The function, where the header names it.

    Attributes:
        header: The same, until a call was told.
    """

    def __init__(self, reader: CallReader, header: str, name: str = "") -> None:
        self.name = name
        self._reader, self.header = reader, header
        self._streaming = ARGUMENTS if name else reader.form.streaming
        self._has_told = False
        self._begin()

    def _begin(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._head = ""  # what comes before the arguments
        self._arguments: Arguments | None = None
        self._begun: ToolCallDelta | None = None
        self._told: list[str] = []  # of the arguments

    def take(self, text: str) -> Iterator[ToolCallDelta | ToolCall]:
        """Add what was written next; yield what is known now, and calls that are whole before the mark at the end."""
        while text:
            self._parts.append(text)
            self._length += len(text)
            yield from self._stream(text)
            behind = self._behind()
            if behind is None:
                return
            body = "".join(self._parts)
            yield from self._read(body[: len(body) - len(behind)])
            self._begin()
            self.header, self._has_told, text = "", True, behind

    def end(self) -> Iterator[ToolCallDelta | ToolCall]:
        """Yield the calls that were not told yet: nothing follows."""
        body = "".join(self._parts)
        if body.strip() or not self._has_told:
            yield from self._read(body)

    def _stream(self, text: str) -> Iterator[ToolCallDelta]:
        if self._streaming is None or self._length > LONGEST_CALL:
            return
        if self._begun is None or self._arguments is None:
            self._head += text
            opened = self._streaming.opening.match(self._head, 0, LONGEST_OPENING)
            if opened is None:
                self._streaming = self._streaming if len(self._head) < LONGEST_OPENING else None
                return
            named = opened.groupdict()
            self._begun = self._reader.begin(self.name or named["name"], named.get("id", ""))
            self._arguments = self._reader.arguments(self._streaming, opened[0], self._begun.name)
            text = self._head[opened.end() :]
        if self._arguments.is_broken or len(self._arguments.rest) > LONGEST_OPENING:
            return
        if piece := self._arguments.take(text):
            self._told.append(piece)
            yield replace(self._begun, arguments=piece)

    def _behind(self) -> str | None:
        """Return what was written behind a call that is whole; None where none is, or it ends with the mark."""
        if self._streaming is None or self._arguments is None or not self._arguments.is_over:
            return None
        end, after = self._streaming.end, self._arguments.rest
        if end:
            after = after.lstrip()
        return None if end is None or not after.startswith(end) else after[len(end) :]

    def _read(self, body: str) -> Iterator[ToolCallDelta | ToolCall]:
        told = "".join(self._told)
        begun = None if self._begun is None else replace(self._begun, arguments=told)
        for call in self._reader.read(body, self.name, begun):
            if not call.problem and (rest := call.arguments[len(told) :]):
                yield ToolCallDelta(call.name, rest, call.id)
            told = ""
            yield call


def _names_of_texts(tool: ToolSpec) -> set[str]:
    """Return the parameters of a tool that are texts and nothing else."""
    properties = tool.as_dict["function"]["parameters"].get("properties")
    others = {"enum", "const", "anyOf", "oneOf", "allOf"}
    return {
        name
        for name, schema in (properties.items() if isinstance(properties, dict) else ())
        if isinstance(schema, dict) and schema.get("type") == "string" and not others & schema.keys()
    }


def _dumped(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _completed(told: str, whole: str) -> str:
    """Return the arguments as they were told, with what is left of them. Raises ValueError where they became others."""
    if whole.startswith(told):
        return whole
    for text in (told, told + "}"):
        with suppress(ValueError):
            if _dumped(json.loads(text)) == whole:  # other white space, other escapes, a name twice
                return text
    raise ValueError("its arguments do not go on as they began")


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("its arguments are not a JSON object")
    return value


def short_id(text: str) -> str:
    """Return nine letters and digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]


def settled(messages: Sequence[Message], *, at_once: bool) -> list[Message]:
    """Return a conversation whose calls a template can write.

    A call that could not be read is in its reply's text, so what it is told is the user's message. at_once: whether the template
    writes several calls of one message; else each becomes a message of its own, its result after it.
    """
    known = {call.id for message in messages for call in message.tool_calls if not call.problem}
    out: list[Message] = []
    for message in messages:
        if message.role == "tool" and message.tool_call_id not in known:
            out.append(Message("user", message.content))
        elif message.tool_calls:
            out.append(replace(message, tool_calls=tuple(each for each in message.tool_calls if not each.problem)))
        else:
            out.append(message)
    return out if at_once else _one_by_one(out)


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    results = {each.tool_call_id: each for each in messages if each.role == "tool"}
    told: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in told:
            continue
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        for at, call in enumerate(message.tool_calls):
            first = message if at == 0 else Message("assistant", "")
            out.append(replace(first, tool_calls=(call,)))
            if call.id in results:
                out.append(results[call.id])
                told.add(call.id)
    return out


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with its calls and results as plain text, for a model whose template takes neither."""
    out: list[Message] = []
    for message in messages:
        if message.role == "tool":
            said = f"Result of {message.name or 'the call'}:\n{message.content}"
            last = out[-1] if out else None
            if last is not None and last.role == "user":
                out[-1] = replace(last, content=f"{last.content}\n\n{said}")
            else:
                out.append(Message("user", said))
        elif message.tool_calls:
            calls = [f"[calls {each.name} with {each.arguments}]" for each in message.tool_calls if not each.problem]
            content = "\n".join(part for part in (message.content, *calls) if part)
            out.append(Message("assistant", content, message.thinking))
        else:
            out.append(message)
    return out


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether a conversation holds calls or results."""
    return any(each.tool_calls or each.role == "tool" for each in messages)


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a chat template does with tools. form: how its model writes calls. at_once: several in one message."""

    form: CallFormat
    at_once: bool


def find_support(
    render: Callable[[Sequence[Message], Sequence[ToolSpec]], str], form: CallFormat | None
) -> ToolSupport | None:
    """Return what a template does with tools; None where it does not write them, or nothing reads the calls of its model.

    render: renders a conversation with definitions; may raise TemplateError. form: what is known without it.
    """

    def tried(messages: Sequence[Message]) -> str:
        try:
            return render(messages, PROBES)
        except TemplateError:
            return ""

    if not all(each.name in tried([ASKED]) for each in PROBES):
        return None
    one = tried([ASKED, Message("assistant", "", tool_calls=CALLED[:1]), RESULTS[0]])
    if "w0w" not in one or RESULTS[0].content not in one:
        return None
    if form is None and re.search(r'\{\s*"name":\s*"find_probe",\s*"parameters":', one):
        form = bare_format()
    if form is None:
        return None
    both = tried([ASKED, Message("assistant", "", tool_calls=CALLED), *RESULTS])
    return ToolSupport(form, all(each in both for each in ("w0w", "w1w", *(result.content for result in RESULTS))))

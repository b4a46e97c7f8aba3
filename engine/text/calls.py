"""Reads calls of tools while a model writes them: one incremental parser, whose states are where it waits for text."""

# Every step is a generator that yields where it needs more text, so that a whole text and its tokens are read alike.
# What is streamed is JSON from the first piece on: what is broken but plain is mended before it is told.

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import regex

from ..errors import OptionError
from ..events import ToolCall, ToolCallDelta
from ..options import ToolSpec
from .dialects import JSON_VALUES, NAME, Dialect, Tags, ValueSyntax

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more text is needed
Put = Callable[[str], None]

LONGEST_CALL = 1 << 18  # characters of a call
LONGEST_WAIT = 512  # characters in which an end mark is waited for after what is no call, before it is text
DEEPEST = 64  # brackets within brackets
ID_LENGTH = 9
SHORTEST_ID = 4  # a model's own id: shorter ones are numbers within one reply

SPACE = regex.compile(r"[ \t\n\r]*")
WORD = regex.compile(r"[\w.+-]*")
ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", regex.DOTALL)
NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
KEYWORD = regex.compile(r"(?P<name>\w+)\s*=\s*(?=[^=\s])")
FENCE, FENCE_END = regex.compile(r"```\w*\s*(?=[\[{])"), "```"  # a block of code
NAMED = regex.compile(rf"{NAME}\s*(?=[{{(])")
BARE_KEY = regex.compile(r"(?P<name>[\w.-]+)(?=\s*:)")
CDATA = "<![CDATA["

ANY: frozenset[str] = frozenset()  # of types

NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id")
FIELDS = frozenset({*NAMES, *ARGUMENTS, *IDS, "type", "index"})


class UnreadableCallError(Exception):
    """Why a call can't be read, for the model."""


def short_id(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def mended(text: str) -> str:
    """Return the JSON value that ``text`` plainly is. Raises UnreadableCallError."""
    reader, pieces = ValueReader(JSON_VALUES), list[str]()
    reader.text, reader.is_final = text.strip(), True
    for _ in reader.value(pieces.append):
        pass
    if reader.text[reader.at :].strip("}] \t\n\r"):
        raise UnreadableCallError("something follows its JSON")
    return "".join(pieces)


def mended_object(text: str) -> str:
    """Return the JSON object that ``text`` plainly is, or a JSON text of one. Raises UnreadableCallError."""
    for _ in range(2):
        found = mended(text) if text.strip() else "{}"
        if found == "null":
            return "{}"
        if found.startswith("{"):
            return found
        if found.startswith('"'):
            text = json.loads(found)
    raise UnreadableCallError("its arguments are not a JSON object")


class Scanner:
    """Text that is still being written. text[at:] is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end."""
        while self.at == len(self.text) and not self.is_final:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Steps[str]:
        begin = self.at
        while True:
            self.at = SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or self.is_final:
                return self.text[begin : self.at]
            yield

    def match(self, pattern: Any) -> Steps[Any]:
        """Read what matches, and return the match; None reads nothing."""
        while (found := pattern.match(self.text, self.at, partial=True)) is not None:
            if not found.partial:
                self.at = found.end()
                return found
            if self.is_final:
                return None
            yield
        return None

    def sees(self, *marks: str) -> Steps[str]:
        """Return which mark, if any, comes next."""
        longest = max(map(len, marks), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.is_final or not any(len(rest) < len(each) and each.startswith(rest) for each in marks):
                return next((each for each in marks if rest.startswith(each)), "")
            yield


class ValueReader(Scanner):
    """Copies values as JSON, mended. ends: marks at which what is open ends as well."""

    def __init__(self, values: ValueSyntax, ends: Sequence[str] = ()) -> None:
        super().__init__()
        self.values, self.ends = values, tuple(ends)
        self.is_cut = False  # the reply did not end by itself

    def value(self, put: Put, depth: int = 0) -> Steps[None]:
        put((yield from self.space()))
        match (yield from self.peek()):
            case "{":
                yield from self._bracketed(put, "{", "}", partial(self._member, put, depth), depth)
            case "[":
                yield from self._bracketed(put, "[", "]", partial(self.value, put, depth + 1), depth)
            case _ if quote := (yield from self.sees(*self.values.quotes)):
                yield from self._string(put, quote)
            case _:
                put((yield from self._word()))

    def items(self, put: Put, closer: str, item: Callable[[], Steps[None]]) -> Steps[None]:
        """Read what stands between brackets, the closing one included: a comma before it is dropped."""
        comma, count = "", 0
        while True:
            space = yield from self.space()
            after = yield from self.peek()
            if after == closer:
                self.at += 1
                put(space)
                return
            if count and not comma:
                if after == ",":
                    self.at += 1
                    comma = space + ","
                    continue
                if (yield from self._has_ended()):
                    return
                raise UnreadableCallError(f"{after!r} stands where a comma or {closer} belongs")
            if not after or (yield from self._has_ended()):
                raise UnreadableCallError("it ends too early")
            put(comma + space)
            yield from item()
            comma, count = "", count + 1

    def _has_ended(self) -> Steps[bool]:
        if (yield from self.peek()):
            return bool((yield from self.sees(*self.ends)))
        if self.is_cut:
            raise UnreadableCallError("it was cut")
        return True

    def _bracketed(
        self, put: Put, opener: str, closer: str, item: Callable[[], Steps[None]], depth: int
    ) -> Steps[None]:
        if depth > DEEPEST:
            raise UnreadableCallError("its arguments are nested too deeply")
        self.at += 1
        put(opener)
        yield from self.items(put, closer, item)
        put(closer)

    def _member(self, put: Put, depth: int) -> Steps[None]:
        if quote := (yield from self.sees(*self.values.quotes)):
            yield from self._string(put, quote)
        elif self.values.bare_keys and (name := (yield from self.match(BARE_KEY))):
            put(quoted(name["name"]))
        else:
            raise UnreadableCallError(f"{(yield from self.peek())!r} stands where a name in quotes belongs")
        put((yield from self.space()))
        yield from self.expect(":")
        put(":")
        yield from self.value(put, depth + 1)

    def expect(self, mark: str) -> Steps[None]:
        if (after := (yield from self.peek())) != mark:
            raise UnreadableCallError(f"{after!r} stands where {mark} belongs" if after else "it ends too early")
        self.at += 1

    def quoted_text(self) -> Steps[str]:
        pieces: list[str] = []
        quote = yield from self.sees(*self.values.quotes)
        if not quote:
            raise UnreadableCallError(f"{(yield from self.peek())!r} stands where a name in quotes belongs")
        yield from self._string(pieces.append, quote)
        return str(json.loads("".join(pieces)))

    def _string(self, put: Put, quote: str) -> Steps[None]:
        self.at += len(quote)
        put('"')
        plain = self.values.plain[quote]
        while True:
            run = plain.match(self.text, self.at)
            if run.end() > self.at:
                put(run[0] if quote == '"' else quoted(run[0])[1:-1])
                self.at = run.end()
            after = yield from self.peek()
            if not after:
                raise UnreadableCallError("a text in it is not closed")
            if (yield from self.sees(quote)):
                self.at += len(quote)
                put('"')
                return
            if after == "\\" and self.values.escapes:
                put((yield from self._escape()))
            elif self.at < len(self.text):  # a line end, or what only begins like the quote
                put(quoted(after)[1:-1])
                self.at += 1

    def _escape(self) -> Steps[str]:
        found = yield from self.match(ESCAPE)
        if found is None:
            raise UnreadableCallError("a text in it has a broken escape")
        escape = str(found[0])
        if escape[1] in '"\\/bfnrtu':
            return escape
        if escape == "\\'":
            return "'"
        if not self.values.is_python:
            raise UnreadableCallError(f"a text in it has the escape {escape}, which JSON has not")
        if escape[1] == "x":
            return f"\\u00{escape[2:]}"
        return "" if escape == "\\\n" else quoted(escape)[1:-1]

    def _word(self) -> Steps[str]:
        while (end := WORD.match(self.text, self.at).end()) == len(self.text) and not self.is_final:
            yield
        word, self.at = self.text[self.at : end], end
        if end == len(self.text) and self.is_cut:
            raise UnreadableCallError("it was cut")
        if word in WORDS:
            return WORDS[word]
        if NUMBER.fullmatch(word) is None:
            shown = word or self.text[self.at : self.at + 1]
            raise UnreadableCallError(f"{shown!r:.60} is no JSON value" if shown else "it ends too early")
        if not word.lstrip("-").isdigit() and abs(float(word)) == float("inf"):
            raise UnreadableCallError("a number in it is too large")
        return word


class Tools:
    """What tools are called, and the types of their arguments, in order."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._types = {each.name: _argument_types(each) for each in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def arguments(self, name: str) -> Mapping[str, frozenset[str]]:
        """Return the types that each argument may have; none: any."""
        return self._types.get(name, {})

    def types(self, name: str, argument: str) -> frozenset[str]:
        return self.arguments(name).get(argument, ANY)


def _argument_types(tool: ToolSpec) -> dict[str, frozenset[str]]:
    properties = tool.as_dict["function"]["parameters"].get("properties")
    return (
        {name: frozenset(_types(schema)) for name, schema in properties.items()} if isinstance(properties, dict) else {}
    )


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    found = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    values = [
        *(schema["enum"] if isinstance(schema.get("enum"), list) else ()),
        *[schema[key] for key in ("const",) if key in schema],
    ]
    if not found:
        found |= {_type_of(value) for value in values}
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list):
            found |= {kind for each in schema[several] for kind in _types(each)}
    return found


def _type_of(value: object) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def converted(text: str, types: frozenset[str]) -> str:
    """Return the JSON value that a text in tags stands for: the text itself where it is none of these types."""
    with_text = not types or "string" in types
    try:
        found = mended(text)
        value = json.loads(found)
    except (UnreadableCallError, ValueError):
        return quoted(text)
    kind = _type_of(value)
    if kind == "number" and "integer" in types and "number" not in types and value.is_integer():
        return str(int(value))
    return quoted(text) if not _fits(value, types) or (kind == "string" and with_text) else found


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


class CallReader:
    """Reads one reply's calls.

    seed: a number of the prompt that makes call ids distinct. opened: the prompt ends with the mark of a call.
    """

    def __init__(self, dialect: Dialect, tools: Sequence[ToolSpec], seed: int, *, opened: bool = False) -> None:
        self.dialect, self.tools, self.opened = dialect, Tools(tools), opened
        self._seed, self._count = seed, 0
        self._given: set[str] = set()

    def new_id(self, name: str, given: str = "") -> str:
        """Return the id that the model gave, unless it has it twice."""
        if given and given not in self._given:
            self._given.add(given)
            return given
        self._count += 1
        return short_id(f"{self._seed} {self._count} {name}")

    def read(self, text: str) -> list[ToolCall]:
        """Return the calls of a whole text after the dialect's opening mark."""
        call = OpenCall(self)
        return [each for each in (*call.feed(text), *call.end()) if isinstance(each, ToolCall)]


class OpenCall(ValueReader):
    """The calls after one opening mark, read while they are written.

    ``take`` and ``end`` return what is known now: pieces, calls, and text that turned out to be none. Once it
    ``is_over``, ``rest`` is the text behind.

    Args:
        head: The opening mark, and what stood before it, to be shown if no call follows.
        name: The function, where a header named it.
        ends: Marks, not of the dialect, that end it and are left to be read.
        bare: Characters that a call without its mark begins with: only a known tool makes it one.
        quiet: It may be talk of a call: nothing is told before it is whole, and then no problem either.
    """

    def __init__(
        self,
        reader: CallReader,
        head: str = "",
        name: str = "",
        *,
        ends: Sequence[str] = (),
        bare: int = 0,
        quiet: bool = False,
    ) -> None:
        dialect = reader.dialect
        super().__init__(dialect.values, (*dialect.ends, *ends))
        self.is_over = False
        self._reader, self._dialect, self._tools = reader, dialect, reader.tools
        self._head, self._named = head, name
        self._kept = frozenset(ends)
        self._bare, self._unsure, self._quiet = bare, bool(bare), quiet
        self._is_alone = dialect.is_alone or (bool(bare) and dialect.head is None)
        self._events: list[ToolCallDelta | ToolCall | str] = []
        self._reads_objects, self._fenced = dialect.head is None, False
        self._starts = (dialect.start,) if dialect.start else ()
        self._begin_call()
        self._steps = self._section()

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def feed(self, text: str) -> list[ToolCallDelta | ToolCall | str]:
        self.text += text
        return self._run()

    def end(self, *, cut: bool = False) -> list[ToolCallDelta | ToolCall | str]:
        self.is_final, self.is_cut = True, cut
        return self._run()

    def _run(self) -> list[ToolCallDelta | ToolCall | str]:
        if not self.is_over:
            self.is_over = next(self._steps, self) is self
            if not self._quiet:
                self._tell()
        events, self._events = self._events, []
        return events

    # The call that is being read.

    def _begin_call(self) -> None:
        self._from = self.at
        self._name = self._id = ""
        self._pieces: list[str] = []  # of the arguments
        self._told = 0  # of these pieces
        self._given: list[str] = []  # the names of arguments
        self._has_arguments = False

    def _call_of(self, name: str, given: str = "") -> None:
        if self._name and name != self._name:
            raise UnreadableCallError(f"it names two functions, {self._name} and {name:.80}")
        if self._unsure and name not in self._tools:
            self.at = self._from
            raise UnreadableCallError(f"there is no tool {name:.80}")
        self._name, self._id = name, self._id or self._reader.new_id(name, given)

    def _put(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self.at - self._from > LONGEST_CALL:
                raise UnreadableCallError(f"it has more than {LONGEST_CALL:,} characters")

    def _tell(self) -> None:
        if self._name and (piece := "".join(self._pieces[self._told :])):
            self._told = len(self._pieces)
            self._events.append(ToolCallDelta(self._name, piece, self._id))

    def _finish(self) -> None:
        arguments = "".join(self._pieces)
        try:
            call = ToolCall(self._name, arguments, self._id)
        except OptionError:
            raise UnreadableCallError("its arguments are not a JSON object") from None
        self._tell()
        mistyped = [
            name for name, value in call.values.items() if not _fits(value, self._tools.types(self._name, name))
        ]
        self._events.append(replace(call, mistyped=tuple(mistyped)) if mistyped else call)
        self._head, self._bare, self._unsure, self._quiet = "", 0, False, False
        self._begin_call()

    # States.

    def _section(self) -> Steps[None]:
        has_read = False
        try:
            if self._dialect.answer is not None and (yield from self.match(self._dialect.answer)):
                return
            while not (has_read and (yield from self._ends_here())):
                if (yield from self._call()):
                    yield from self._follow()
                    self._finish()
                has_read = True
        except UnreadableCallError as error:
            yield from self._give_up(str(error))

    def _ends_here(self) -> Steps[bool]:
        """Read what stands between two calls; return whether none follows."""
        dialect = self._dialect
        begin = yield from self._separators()
        if mark := (yield from self.sees(*self.ends)):
            self.at += 0 if mark in self._kept else len(mark)
            return True
        if not (yield from self.peek()):
            return True
        if dialect.start and (yield from self.sees(dialect.start)):
            self.at += len(dialect.start)
            self._head = dialect.start
        elif not (yield from self._begins_call()):
            self.at = begin
            return True
        self._from = self.at
        return False

    def _begins_call(self) -> Steps[bool]:
        if self._reads_objects and (yield from self.peek()) in "{[":
            return True
        if self._dialect.head is None:
            return False
        begin = self.at
        found = yield from self.match(self._dialect.head)
        self.at = begin
        return found is not None

    def _separators(self) -> Steps[int]:
        """Read what stands between calls; return the place after its brackets."""
        closed = self.at
        while True:
            yield from self.space()
            after = yield from self.peek()
            if self._fenced and (yield from self.sees(FENCE_END)):
                self.at += len(FENCE_END)
                closed = self.at
                continue
            if not after or (after not in ",;" and (after not in "]}" or self._dialect.tags is not None)):
                return closed
            self.at += 1
            closed = closed if after in ",;" else self.at

    def _call(self) -> Steps[bool]:
        """Read a call; False if it is a list of none."""
        if self._named:
            yield from self._arguments_of_header()
            return True
        yield from self.space()
        self._fenced = (yield from self.match(FENCE)) is not None or self._fenced
        if (yield from self.peek()) == "[" and self._dialect.tags is None:
            self.at += 1
            yield from self.space()
            if (yield from self.peek()) == "]":
                return False
        dialect = self._dialect
        head = None if dialect.head is None else (yield from self.match(dialect.head))
        if head is not None:
            found = head.groupdict()
            self._call_of(found["name"], found.get("id") or "")
            yield from self._arguments()
            if dialect.tail is not None:
                yield from self.match(dialect.tail)
        elif (yield from self.peek()) == "{":
            self._reads_objects = True
            yield from self._named_object()
        elif dialect.head is None and (head := (yield from self.match(NAMED))) is not None:
            yield from self._called(head["name"].removesuffix(".call"))
        else:
            raise UnreadableCallError("it does not begin like a call")
        return True

    def _called(self, name: str) -> Steps[None]:
        if name not in self._tools:
            raise UnreadableCallError("it does not begin like a call")
        self._call_of(name)
        yield from self._arguments()

    def _arguments(self) -> Steps[None]:
        if self._dialect.tags is not None:
            yield from self._tagged(self._dialect.tags)
        elif (yield from self.peek()) == "(" or self._dialect.values.is_python:
            self.at += self.text.startswith("(", self.at)
            self._put("{")
            yield from self.items(self._put, ")", self._keyword)
            self._put("}")
        elif (yield from self.peek()) == "{":
            yield from self.value(self._put)
        else:
            raise UnreadableCallError("its arguments are not a JSON object")

    def _arguments_of_header(self) -> Steps[None]:
        self._call_of(self._named)
        yield from self.space()
        if (yield from self._has_ended()):
            self._put("{}")
        else:
            yield from self._arguments()

    def _follow(self) -> Steps[None]:
        if not (self._dialect.ends or self._named or self._is_alone):
            return
        begin = self.at
        yield from self._separators()
        after = yield from self.peek()
        if not after or (yield from self.sees(*self.ends, *self._starts)) or (yield from self._begins_call()):
            self.at = begin
            return
        place = self.at
        if not self._is_alone and not (yield from self._end_mark(place, LONGEST_WAIT)):
            self.at = begin  # the end mark is missing
            return
        self.at = place
        raise UnreadableCallError("something follows its arguments")

    def _end_mark(self, place: int, longest: int) -> Steps[str]:
        """Read up to the first end mark at most so far after ``place``, and return it; "" if there is none."""
        search, within = place, max(map(len, self.ends), default=0)
        while True:
            found = [(at, -len(each), each) for each in self.ends if (at := self.text.find(each, search)) >= 0]
            if found and min(found)[0] <= place + longest:
                self.at, _, mark = min(found)
                return mark
            if self.is_final or len(self.text) - place > longest + within:
                return ""
            search = max(search, len(self.text) - within)
            yield

    def _give_up(self, reason: str) -> Steps[None]:
        broken, is_prose = self.at, not (self._name or self.text[self._from : self.at].strip())
        mark = ""
        if not self._quiet and not (self._unsure and not self._name):
            mark = yield from self._end_mark(broken, LONGEST_WAIT if is_prose else LONGEST_CALL << 2)
            if not mark and not is_prose:
                mark = yield from self._end_mark(self._from, LONGEST_CALL)  # a text that is not closed took it along
                self.at = self.at if mark else len(self.text)
        if mark or not (self._quiet or is_prose or (self._unsure and not self._name)):
            raw = self.text[self._from : self.at]
            self._events += [
                ToolCall(self._name, raw, self._id or self._reader.new_id(self._name), problem=reason),
                self._head + raw + ("" if mark in self._kept else mark),
            ]
            self.at += 0 if mark in self._kept else len(mark)
        else:
            self.at = self._from + self._bare
            self._events.append(self._head + self.text[self._from : self.at])
        self._begin_call()

    # Arguments.

    def _keyword(self) -> Steps[None]:
        found = yield from self.match(KEYWORD)
        if found is not None:
            name = found["name"]
        else:
            order = [*self._tools.arguments(self._name)]
            if len(self._given) >= len(order):
                raise UnreadableCallError("an argument has no name")
            name = order[len(self._given)]
        self._given.append(name)
        self._put(f"{quoted(name)}: ")
        yield from self.value(self._put)

    def _named_object(self) -> Steps[None]:
        self.at += 1
        kept: list[str] = []
        yield from self.items(_drop, "}", partial(self._field, kept))
        if not self._name:
            raise UnreadableCallError("it names no function")
        if kept or not self._has_arguments:
            self._put("".join(kept) or "{}")

    def _field(self, kept: list[str]) -> Steps[None]:
        key = yield from self.quoted_text()
        if self._unsure and not self._name and key not in FIELDS and key not in self._tools:
            self.at = self._from
            raise UnreadableCallError("it names no function")
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()
        after = yield from self.peek()
        is_text = bool((yield from self.sees(*self.values.quotes)))
        if key == "function" and after == "{":
            self.at += 1
            yield from self.items(_drop, "}", partial(self._field, kept))
        elif key in NAMES and is_text:
            self._call_of((yield from self.quoted_text()).strip().removeprefix("functions."))
        elif key in IDS and is_text:
            given = yield from self.quoted_text()
            if len(given) >= SHORTEST_ID and not self._pieces:
                self._id = self._reader.new_id(self._name, given)
        elif key in ARGUMENTS or (after == "{" and not self._name and key in self._tools):
            if self._has_arguments:
                raise UnreadableCallError("it has arguments twice")
            if key not in ARGUMENTS:
                self._call_of(key)
            yield from self._object_or_text(kept, after, is_text)
            self._has_arguments = True
        else:
            yield from self.value(_drop)

    def _object_or_text(self, kept: list[str], after: str, is_text: bool) -> Steps[None]:
        if after == "{":
            yield from self.value(self._put if self._name and not self._dialect.late_id else kept.append)
        elif is_text:
            kept.append(mended_object((yield from self.quoted_text())))
        else:
            pieces: list[str] = []
            yield from self.value(pieces.append)
            kept.append(mended_object("".join(pieces)))

    # Arguments in tags.

    def _tagged(self, tags: Tags) -> Steps[None]:
        if tags.block is not None and (yield from self.match(tags.block[0])):
            yield from self.value(self._put)
            yield from self.match(tags.block[1])
            yield from self.space()
            self.at += len((yield from self.sees(tags.end)))
            return
        self._put("{")
        inside = set[str]()
        while (opened := (yield from self.match(tags.opening))) is not None:
            name = opened["name"].strip()
            self._put(f"{', ' if self._given else ''}{quoted(name)}: ")
            self._given.append(name)
            text = yield from self._tag_value(tags, _allowed(opened, self._tools.types(self._name, name)))
            inside.update(each["name"].strip() for each in tags.opening.finditer(text))
        if lost := (inside & self._tools.arguments(self._name).keys()) - set(self._given):
            raise UnreadableCallError(f"the argument before {min(lost)} is not closed")
        yield from self.space()
        if tags.end and (mark := (yield from self.sees(tags.end))):
            self.at += len(mark)
        elif not (yield from self._has_ended()) and not (yield from self.sees(*self._starts)):
            raise UnreadableCallError("something stands between its arguments")
        self._put("}")

    def _tag_value(self, tags: Tags, types: frozenset[str]) -> Steps[str]:
        """Copy a value up to the closing tag that ends it; return the text."""
        closing, pad = tags.closing, tags.pad
        if (yield from self.sees(CDATA)):
            self.at += len(CDATA)
            closing, pad = f"]]>{closing}", ""
        elif pad and (yield from self.sees(pad)):
            self.at += len(pad)
        begin = search = self.at
        is_text = types == {"string"}
        if is_text:
            self._put('"')
        while True:
            place = self.text.find(closing, search)
            is_end = place >= 0 and (yield from self._is_closed(tags, place + len(closing)))
            if place < 0 and self.is_final:
                raise UnreadableCallError("an argument is not closed")
            if place >= 0 and not is_end:
                search = place + 1
                continue
            if is_end:
                text = self.text[begin:place]
                text = text.removesuffix(pad) if pad and place - len(pad) >= begin else text
                ready = begin + len(text)
            else:
                ready = max(self.at, len(self.text) - len(closing) - len(pad))
                search = max(search, ready)
            if is_text and ready > self.at:
                self._put(quoted(self.text[self.at : ready])[1:-1])
            self.at = max(self.at, ready)
            if is_end:
                self._put('"' if is_text else converted(text, types))
                self.at = place + len(closing)
                return text
            if len(self.text) - self._from > LONGEST_CALL:
                raise UnreadableCallError(f"it has more than {LONGEST_CALL:,} characters")
            yield

    def _is_closed(self, tags: Tags, place: int) -> Steps[bool]:
        while True:
            found = tags.follow.match(self.text, place, partial=True)
            if found is None or not found.partial:
                return found is not None
            if self.is_final:
                return not self.text[place:].strip()
            yield


def _drop(_: str) -> None:
    pass


def _allowed(opened: Any, types: frozenset[str]) -> frozenset[str]:
    """Return the types of a value in a tag, which may say what it is."""
    kind = opened.groupdict().get("kind")
    return types if not kind else frozenset({"string"}) if kind in ("string", "true") else ANY

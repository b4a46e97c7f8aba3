"""Calls told while a model writes them: pieces that join to the call, however the reply is cut into tokens."""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any, AnyStr

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokamac.engine import TextChunk, ToolCall, ToolCallDelta, ToolSpec
from tokamac.engine.text.calls import LONGEST_CALL, CallReader, UnreadableCallError, ValueReader, mended_object
from tokamac.engine.text.dialects import BY_NAME, JSON_VALUES
from tokamac.engine.text.stream import ReplyText

FILE = ToolSpec(
    "write_file",
    "",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
    },
)
ASK = ToolSpec("ask", "", {"type": "object", "properties": {"any": {}}})


class Cut:
    """A tokenizer whose tokens are the pieces of one text."""

    eos_ids: frozenset[int] = frozenset()
    hidden_ids: frozenset[int] = frozenset()
    thinking = None
    end_texts: tuple[str, ...] = ()
    is_whole = True

    def __init__(self, pieces: Sequence[str], *, writes_channels: bool = False) -> None:
        self.pieces, self.writes_channels = pieces, writes_channels

    def token_ids(self, _: str) -> frozenset[int]:
        return frozenset()

    def detokenizer(self, _: object) -> "Cut":
        return self

    def add(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return ""


Part = TextChunk | ToolCallDelta | ToolCall


def told(name: str, pieces: Sequence[str]) -> list[list[Part]]:
    """Return what each token, and then the end, makes known."""
    cut: Any = Cut(pieces, writes_channels=name == "harmony")
    reply = ReplyText(cut, calls=CallReader(BY_NAME[name], (FILE, ASK), 7))
    return [*(list(reply.add(token)) for token in range(len(pieces))), list(reply.finish())]


def calls_in(parts: Sequence[Part]) -> list[ToolCall]:
    """Return the calls; each follows its own pieces, which join to its arguments."""
    calls, pieces = [], list[ToolCallDelta]()
    for part in parts:
        if isinstance(part, ToolCallDelta):
            assert part.arguments
            pieces.append(part)
        elif isinstance(part, ToolCall):
            assert {(each.id, each.name) for each in pieces} <= {(part.id, part.name)}
            if not part.problem:
                assert "".join(each.arguments for each in pieces) == part.arguments
            calls.append(part)
            pieces = []
        else:
            assert not pieces, "a call is told before any other text"
    assert not pieces
    return calls


# By format: what is before the calls, a call {f} with arguments {a}, what is between two, what is after them; and one
# argument of those in tags.
KEYED = (
    "<{0}tool_call>{{f}}\n{{a}}</{0}tool_call>",
    "<{0}arg_key>{{}}</{0}arg_key>\n<{0}arg_value>{{}}</{0}arg_value>\n",
)
GLM, LONGCAT = ([each.format(prefix) for each in KEYED] for prefix in ("", "longcat_"))
FORMATS = {
    "json_tools": ("", '<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>', "\n", ""),
    "harmony": ("", "<|channel|>commentary to=functions.{f} json<|message|>{a}<|call|>", "<|start|>assistant", ""),
    "mistral": ("", "[TOOL_CALLS]{f}[ARGS]{a}", "", ""),
    "kimi_k2": ("<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{f}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
    "bare": ("", '{{"name": "{f}", "parameters": {a}}}', "; ", ""),
    "qwen3_coder": ("", "<tool_call>\n<function={f}>\n{a}</function>\n</tool_call>", "\n", "",
        "<parameter={}>\n{}\n</parameter>\n"),
    "minimax_m2": ("<minimax:tool_call>\n", '<invoke name="{f}">\n{a}</invoke>\n', "", "</minimax:tool_call>",
        '<parameter name="{}">{}</parameter>\n'),
    "longcat": ("", LONGCAT[0], "", "", LONGCAT[1]),
    "glm47": ("", GLM[0], "", "", GLM[1]),
    "laguna": ("", GLM[0], "", "", GLM[1]),
}  # fmt: skip


def written(name: str, called: Sequence[tuple[str, dict[str, Any]]], **style: Any) -> str:
    """Return a reply that calls functions, as a model of this format writes it."""

    def arguments(given: dict[str, Any]) -> str:
        if not tag:
            return json.dumps(given, **style)
        plain = {key: each if isinstance(each, str) else json.dumps(each) for key, each in given.items()}
        return "".join(tag[0].format(*pair) for pair in plain.items())

    before, call, between, after, *tag = FORMATS[name]
    return before + between.join(call.format(f=f, a=arguments(a), i=i) for i, (f, a) in enumerate(called)) + after


def pieces_of(text: AnyStr, cuts: Sequence[int]) -> list[AnyStr]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


EVERYWHERE = range(5000)
CUTS = st.lists(st.integers(0, 5000), max_size=40)
WORDS = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\{}[]:, \n\t<é😀'), max_size=60)
WORDS = WORDS.filter(lambda text: "<|" not in text and "</" not in text)  # a mark ends a call wherever it stands
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=4)
JSON_FORMATS = ("bare", "harmony", "json_tools", "kimi_k2", "mistral")
TAG_FORMATS = ("glm47", "laguna", "longcat", "minimax_m2", "qwen3_coder")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(JSON_FORMATS), st.lists(st.tuples(st.sampled_from(["write_file", "ask"]), OBJECTS), min_size=1, max_size=3),
    CUTS, st.booleans(), st.none() | st.integers(0, 2),
)  # fmt: skip
def test_json_is_told_as_it_is_written_however_it_is_cut(
    name: str, called: list[tuple[str, dict[str, Any]]], cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = written(name, called, ensure_ascii=ascii_only, indent=indent)
    calls = calls_in([*chain(*told(name, pieces_of(text, cuts)))])
    assert [(each.name, each.values, each.problem) for each in calls] == [(f, a, "") for f, a in called]
    assert [each.id for each in calls] == [each.id for each in calls_in([*chain(*told(name, [text]))])]


TAGGED = st.fixed_dictionaries(
    {},
    optional={
        "path": WORDS, "text": WORDS.map(lambda words: words * 9),
        "mode": st.integers(-9, 999), "more": st.sampled_from(["null", "12", "[1, 2]", "x y"]),
    },
).filter(bool)  # fmt: skip
UNTYPED = {"null": None, "12": 12, "[1, 2]": [1, 2], "x y": "x y"}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TAG_FORMATS), st.lists(TAGGED, min_size=1, max_size=3), CUTS)
@example("qwen3_coder", [{"text": "null", "mode": 3}], EVERYWHERE)
@example("minimax_m2", [{"text": "NULL", "path": "\n"}], EVERYWHERE)
@example("qwen3_coder", [{"text": "\n\n two lines before and after \n\n"}], EVERYWHERE)
@example("glm47", [{"text": "\u2003 white space around the whole \u2003"}], EVERYWHERE)
@example("glm47", [{"text": "    indented\n", "path": "a </arg_value> b"}], EVERYWHERE)
def test_arguments_in_tags_come_as_written(name: str, called: list[dict[str, Any]], cuts: Sequence[int]) -> None:
    text = written(name, [("write_file", arguments) for arguments in called])
    calls = calls_in([*chain(*told(name, pieces_of(text, cuts)))])
    wanted = [
        {key: UNTYPED.get(each, each) if key == "more" else each for key, each in call.items()} for call in called
    ]
    assert [(each.values, each.problem) for each in calls] == [(arguments, "") for arguments in wanted]


@pytest.mark.parametrize("name", [*JSON_FORMATS, *TAG_FORMATS])
def test_a_long_text_is_told_while_it_is_written(name: str) -> None:
    long = "All work and no play. " * 40
    text = written(name, [("write_file", {"path": "a.txt", "text": long})])
    steps = told(name, pieces_of(text, range(0, len(text), 4)))
    first = next(at for at, parts in enumerate(steps) for part in parts if isinstance(part, ToolCallDelta))
    assert first < 30
    pieces = [part for parts in steps for part in parts if isinstance(part, ToolCallDelta)]
    assert len(pieces) > len(long) // 8
    half = "".join(
        part.arguments for parts in steps[: len(steps) // 2] for part in parts if isinstance(part, ToolCallDelta)
    )
    assert 0.3 * len(long) < len(half) < 0.7 * len(long)


def copied(pieces: Sequence[str]) -> tuple[str, str]:
    """Return what is told of a value in pieces, and the text behind it. Raises UnreadableCallError."""
    reader, sent = ValueReader(JSON_VALUES), list[str]()
    steps = reader.value(sent.append)
    for piece in (*pieces, None):
        reader.text += piece or ""
        reader.is_final = piece is None
        if next(steps, steps) is steps:
            break
    return "".join(sent), reader.text[reader.at :] + "".join(pieces)[len(reader.text) :]


@settings(max_examples=200, deadline=None)
@given(VALUES, CUTS, st.none() | st.integers(0, 2), st.integers(0, 200), st.sampled_from('"{},x1\\ '))
def test_what_is_not_quite_json_becomes_it(value: Any, cuts: list[int], indent: int | None, at: int, more: str) -> None:
    text = json.dumps({"a": value}, indent=indent)
    at = 1 + at % len(text)
    text = text[:at] + more + text[at:]
    try:
        sent, rest = copied(pieces_of(text, cuts))
    except UnreadableCallError:
        with suppress(ValueError):
            assert "Infinity" in json.dumps(json.JSONDecoder().raw_decode(text)[0])
        return
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert isinstance(json.loads(sent), dict)
    else:
        assert (sent, rest) == (text[:end], text[end:])


@pytest.mark.parametrize("text", ['{"a" "b"', '{"a": 01, ', '{"a": NaN, ', '{"a": "\\x', '{"a": tru, ', "{,", '{"a": 1 2',
    '{"a": {]', "[1]", "{1", '{"a": 1e999}', '{"a', "{", '{"a": 1,', '{"a": ' + "[" * 999])  # fmt: skip
def test_what_is_no_json_is_never_told(text: str) -> None:
    with pytest.raises(UnreadableCallError):
        mended_object(text)


@pytest.mark.parametrize(("text", "json_text"), [
    ("{'a': 'it\\'s'}", '{"a": "it\'s"}'), ("{'a': [True, None,],}", '{"a": [true, null]}'), ('{"a": "b\nc"}', '{"a": "b\\nc"}'),
    ('{"a": {"b": 1}', '{"a": {"b": 1}}'), ('{"a": 1}}', '{"a": 1}'), ('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ("", "{}"),
])  # fmt: skip
def test_what_is_plainly_meant_is_read(text: str, json_text: str) -> None:
    assert mended_object(text) == json_text


@pytest.mark.parametrize("properties", [[], None, {"text": []}, {"text": {"type": ["string"]}}])
def test_a_schema_that_says_nothing_of_its_texts_is_no_trouble(properties: object) -> None:
    tool = ToolSpec("write_file", "", {"properties": properties})
    assert CallReader(BY_NAME["json_tools"], (tool,), 7).read('{"name": "write_file"}')[0].values == {}


@pytest.mark.parametrize("arguments", ["{'a': 1, 'b': 2}", "{\"a\": 1, 'b': 2}"])
def test_what_a_parser_repairs_goes_on_from_what_was_told(arguments: str) -> None:
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{begin}functions.ask:0{middle}{arguments}{end}<|tool_calls_section_end|>"
    (call,) = calls_in([*chain(*told("kimi_k2", list(text)))])
    assert (call.arguments, call.id) == ('{"a": 1, "b": 2}', "functions.ask:0")


def test_a_name_that_is_written_twice_counts_as_the_parser_has_it() -> None:
    text = '<tool_call>{"name": "ask", "arguments": {"a": 1, "a": 2}}</tool_call>'
    (call,) = calls_in([*chain(*told("json_tools", list(text)))])
    assert (call.arguments, call.values) == ('{"a": 1, "a": 2}', {"a": 2})
    twice = "<parameter=path>a</parameter><parameter=path>b</parameter>"
    (call,) = calls_in(
        [*chain(*told("qwen3_coder", list(f"<tool_call><function=write_file>{twice}</function></tool_call>")))]
    )
    assert (call.values, call.problem) == ({"path": "b"}, "")


def test_of_several_calls_one_that_breaks_off_leaves_the_others() -> None:
    parts = [*chain(*told("mistral", list(written("mistral", [("ask", {"any": 1}), ("ask", {"any": 2})])[:-3])))]
    first, second = calls_in(parts)
    assert (first.values, bool(second.problem)) == ({"any": 1}, True)
    assert "".join(part.text for part in parts if isinstance(part, TextChunk)) == '[TOOL_CALLS]ask[ARGS]{"any":'


def test_a_call_is_told_as_soon_as_it_is_whole_where_no_mark_ends_it() -> None:
    text = written("mistral", [("ask", {"any": 1}), ("ask", {"any": 2})])
    steps = told("mistral", list(text))
    at = next(at for at, parts in enumerate(steps) if any(isinstance(part, ToolCall) for part in parts))
    assert text[: at + 1].endswith("}")
    assert text[at + 1 :].startswith("[TOOL_CALLS]")


def test_an_answer_of_json_that_names_no_tool_is_never_told_as_a_call() -> None:
    text = '{"name": "somebody", "parameters": {"a": 1}}'
    parts = [*chain(*told("bare", list(text)))]
    assert "".join(part.text for part in parts if isinstance(part, TextChunk)) == text
    assert all(isinstance(part, TextChunk) for part in parts)


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_a_call_that_is_too_long_ends_as_one_that_can_not_be_read(name: str) -> None:
    text = written(name, [("write_file", {"text": "x" * (LONGEST_CALL + 1)})])
    parts = [part for parts in told(name, pieces_of(text, range(0, len(text), 64))) for part in parts]
    (call,) = calls_in(parts)
    assert "more than" in call.problem
    assert "".join(part.text for part in parts if isinstance(part, TextChunk)) == text

"""Calls told while a model writes them: pieces that join to the call, however the reply is cut into tokens."""

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.text.test_tools import RECORDED, form
from tokamac.engine import TextChunk, ToolCall, ToolCallDelta, ToolSpec
from tokamac.engine.text.call_arguments import STREAMING, JsonArguments
from tokamac.engine.text.stream import ReplyText
from tokamac.engine.text.tools import LONGEST_CALL, CallReader

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
    thinking = None
    is_whole = True

    def __init__(self, pieces: Sequence[str], *, writes_channels: bool = False) -> None:
        self.pieces, self.writes_channels = pieces, writes_channels

    def token_ids(self, _: str) -> frozenset[int]:
        return frozenset()

    def is_hidden(self, _: int) -> bool:
        return False

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
    reply = ReplyText(cut, calls=CallReader(form(name), (FILE, ASK), 7))
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


def written(name: str, called: Sequence[tuple[str, dict[str, Any]]], **style: Any) -> str:
    """Return a reply that calls functions, as a model of this format writes it."""

    def dumped(value: object) -> str:
        return json.dumps(value, **style)

    def plain(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    def tagged(arguments: dict[str, Any], before: str, between: str, after: str) -> str:
        return "".join(f"{before}{key}{between}{plain(value)}{after}" for key, value in arguments.items())

    match name:
        case "json_tools":
            return "\n".join(
                f'<tool_call>\n{{"name": "{f}", "arguments": {dumped(a)}}}\n</tool_call>' for f, a in called
            )
        case "harmony":
            head = "<|channel|>commentary to=functions."
            return "<|start|>assistant".join(f"{head}{f} json<|message|>{dumped(a)}<|call|>" for f, a in called)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{dumped(a)}" for f, a in called)
        case "kimi_k2":
            begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            all_ = "".join(f"{begin}functions.{f}:{i}{middle}{dumped(a)}{end}" for i, (f, a) in enumerate(called))
            return f"<|tool_calls_section_begin|>{all_}<|tool_calls_section_end|>"
        case "bare":
            return "; ".join(f'{{"name": "{f}", "parameters": {dumped(a)}}}' for f, a in called)
        case "qwen3_coder":
            around = ("<parameter=", ">\n", "\n</parameter>\n")
            return "\n".join(
                f"<tool_call>\n<function={f}>\n{tagged(a, *around)}</function>\n</tool_call>" for f, a in called
            )
        case "minimax_m2":
            around = ('<parameter name="', '">', "</parameter>\n")
            all_ = "".join(f'<invoke name="{f}">\n{tagged(a, *around)}</invoke>\n' for f, a in called)
            return f"<minimax:tool_call>\n{all_}</minimax:tool_call>"
        case "longcat":
            around = ("<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n")
            return "".join(f"<longcat_tool_call>{f}\n{tagged(a, *around)}</longcat_tool_call>" for f, a in called)
        case _:
            around = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
            return "".join(f"<tool_call>{f}\n{tagged(a, *around)}</tool_call>" for f, a in called)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


EVERYWHERE = range(5000)
CUTS = st.lists(st.integers(0, 5000), max_size=40)
WORDS = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\{}[]:, \n\t<é😀'), max_size=60)
WORDS = WORDS.filter(lambda text: "<|" not in text and "</" not in text)
"""A mark ends a call wherever it stands."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=4)
JSON_FORMATS = sorted(name for name, streaming in STREAMING.items() if streaming.tags is None)
TAG_FORMATS = sorted(name for name, streaming in STREAMING.items() if streaming.tags is not None)


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
        "path": WORDS.map(str.strip), "text": WORDS.map(lambda words: words.strip() * 9),
        "mode": st.integers(-9, 999), "more": st.sampled_from(["null", "12", "[1, 2]", "x y"]),
    },
).filter(bool)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TAG_FORMATS), st.lists(TAGGED, min_size=1, max_size=3), CUTS)
@example("qwen3_coder", [{"text": "null", "mode": 3}], EVERYWHERE)
@example("minimax_m2", [{"text": "NULL", "path": "\n"}], EVERYWHERE)
@example("qwen3_coder", [{"text": "\n\n two lines before and after \n\n"}], EVERYWHERE)
@example("glm47", [{"text": "\u2003 white space around the whole \u2003"}], EVERYWHERE)
def test_tags_become_the_json_that_the_parser_makes_of_them(
    name: str, called: list[dict[str, Any]], cuts: Sequence[int]
) -> None:
    for arguments in called:  # of what stands in tags, the tags themselves can't be a part
        for key in ("path", "text"):
            if key in arguments:
                arguments[key] = arguments[key].replace("<", "(")
    text = written(name, [("write_file", arguments) for arguments in called])
    form_ = form(name)
    calls = calls_in([*chain(*told(name, pieces_of(text, cuts)))])
    body = text
    wanted = [
        arguments
        for part in body.split(form_.start)[1:]
        for _, arguments, _ in form_.parse(part.partition(form_.end)[0], [FILE.as_dict, ASK.as_dict])
    ]
    assert [(each.values, each.problem) for each in calls] == [(arguments, "") for arguments in wanted]


@pytest.mark.parametrize("name", STREAMING)
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


@settings(max_examples=200, deadline=None)
@given(VALUES, CUTS, st.none() | st.integers(0, 2), st.integers(0, 200), st.sampled_from('"{},x1\\ '))
def test_what_is_told_is_how_json_begins_and_all_of_it_where_it_is_json(
    value: Any, cuts: list[int], indent: int | None, at: int, more: str
) -> None:
    text = json.dumps({"a": value}, indent=indent)
    at = 1 + at % len(text)
    text = text[:at] + more + text[at:]
    reader, sent = JsonArguments(), ""
    for piece in pieces_of(text, cuts):
        if not reader.is_broken:
            sent += reader.take(piece)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert not reader.is_over
        assert text.startswith(sent)
    else:
        assert reader.is_over
        assert (sent, reader.rest) == (text[:end], text[end:])


@pytest.mark.parametrize("text", ['{"a" "b"', "{'a'", '{"a": 01, ', '{"a": NaN, ', '{"a": [1,]', '{"a": 1,}', '{"a": "\n',
    '{"a": "\\x',
    '{"a": tru, ', "{,", '{"a": 1 2', '{"a": {]', "[1", "{1"])  # fmt: skip
def test_what_is_no_json_is_never_told(text: str) -> None:
    reader = JsonArguments()
    sent = "".join(reader.take(letter) for letter in text if not reader.is_broken)
    assert reader.is_broken
    assert text.startswith(sent)
    assert sent != text


@pytest.mark.parametrize("properties", [[], None, {"text": []}, {"text": {"type": ["string"]}}])
def test_a_schema_that_says_nothing_of_its_texts_is_no_trouble(properties: object) -> None:
    tool = ToolSpec("write_file", "", {"properties": properties})
    assert CallReader(form("json_tools"), (tool,), 7).read('{"name": "write_file"}')[0].values == {}


# What the model did not go on with as it began.

WHOLE = {
    "the name comes last": ("json_tools", '<tool_call>{"arguments": {"a": 1}, "name": "ask"}</tool_call>', {"a": 1}),
    "arguments as a text": (
        "json_tools",
        '<tool_call>{"name": "ask", "arguments": "{\\"a\\": 1}"}</tool_call>',
        {"a": 1},
    ),
    "an id comes later": (
        "mistral",
        '[TOOL_CALLS][{"name": "ask", "arguments": {"a": 1}, "id": "abcdef123"}]',
        {"a": 1},
    ),
    "nothing at all": ("harmony", "<|channel|>commentary to=functions.ask json<|message|><|call|>", {}),
    **{
        f"{name} as a whole": (name, RECORDED[name][0], RECORDED[name][1][-1][1])
        for name in ("gemma4", "function_gemma")
    },
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_call_that_can_not_be_told_in_pieces_is_one_piece(case: str) -> None:
    name, text, arguments = WHOLE[case]
    parts = [*chain(*told(name, list(text)))]
    (call,) = calls_in(parts)
    assert (call.values, call.problem) == (arguments, "")
    assert len([part for part in parts if isinstance(part, ToolCallDelta)]) == 1


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
    text = f"<tool_call><function=write_file>{twice}</function></tool_call>"
    (call,) = calls_in([*chain(*told("qwen3_coder", list(text)))])
    assert (call.values, call.problem) == ({"path": "b"}, "")


BROKEN = {
    "it was cut": ("json_tools", 'A <tool_call>{"name": "ask", "arguments": {"a": "b'),
    "it is no JSON": ("json_tools", 'A <tool_call>{"name": "ask", "arguments": {"a": 1, b}}</tool_call> B'),
    "something follows": ("json_tools", 'A <tool_call>{"name": "ask", "arguments": {"a": 1}} no</tool_call> B'),
    "another name": (
        "json_tools",
        'A <tool_call>{"name": "ask", "arguments": {"a": 1}, "name": "write_file"}</tool_call>',
    ),
    "other arguments": (
        "json_tools",
        'A <tool_call>{"name": "ask", "parameters": {"a": 1}, "arguments": {}}</tool_call>',
    ),
    "NaN": ("harmony", '<|channel|>commentary to=functions.ask json<|message|>{"a": [1, NaN]}<|call|>'),
    "too large a number": ("mistral", 'A[TOOL_CALLS]ask[ARGS]{"a": 1e999}'),
    "no number": (
        "qwen3_coder",
        "<tool_call><function=write_file><parameter=mode>x</parameter></function></tool_call>",
    ),
    "an answer after all": ("bare", '{"name": "ask", "parameters": {"a": 1}} would ask.'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_of_a_call_that_can_not_be_read_nothing_is_lost_and_its_pieces_are_void(case: str) -> None:
    name, text = BROKEN[case]
    parts = [*chain(*told(name, list(text)))]
    (call,) = calls_in(parts)
    assert call.problem
    begun = [part for part in parts if isinstance(part, ToolCallDelta)]
    assert begun
    assert {each.id for each in begun} == {call.id}
    shown = "".join(part.text for part in parts if isinstance(part, TextChunk))
    assert shown == text.removesuffix("<|call|>")


def test_of_several_calls_one_that_breaks_off_leaves_the_others() -> None:
    text = written("mistral", [("ask", {"any": 1}), ("ask", {"any": 2})])[:-3]
    parts = [*chain(*told("mistral", list(text)))]
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
    assert [type(part) for part in parts] == [TextChunk]


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_a_call_that_is_too_long_ends_as_one_that_can_not_be_read(name: str) -> None:
    text = written(name, [("write_file", {"text": "x" * (LONGEST_CALL + 1)})])
    parts = [part for parts in told(name, pieces_of(text, range(0, len(text), 64))) for part in parts]
    (call,) = calls_in(parts)
    assert "more than" in call.problem
    assert "".join(part.text for part in parts if isinstance(part, TextChunk)) == text

"""What models really write: kinds of replies taken from public reports, read alike whole, token by token and at any cut."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.text.test_calls import Cut, calls_in, pieces_of
from tokamac.engine import TextChunk, ToolCallDelta, ToolSpec
from tokamac.engine.text.calls import CallReader
from tokamac.engine.text.dialects import BY_NAME, Dialect
from tokamac.engine.text.stream import ReplyText
from tokamac.engine.text.tokenizer import Detokenizer

TOOLS = (
    ToolSpec("write", "", {"type": "object", "properties": {
        "path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}}}),
    ToolSpec("read", "", {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}),
)  # fmt: skip
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
Case = dict[str, Any]
DATA = tomllib.loads(Path(__file__).with_name("replies.toml").read_text(encoding="utf-8"))
CASES: dict[str, Case] = {each["kind"]: each for each in DATA["reply"]}
DIALECTS = BY_NAME | {
    name: Dialect("json", start, tuple(ends), ("{",)) for name, (start, *ends) in DATA["json"].items()
}


class ByteCut(Cut):
    """A tokenizer whose tokens are pieces of a text's bytes."""

    def detokenizer(self, _: object) -> Any:
        return Detokenizer(lambda ids: b"".join(self.pieces[each] for each in ids).decode("utf-8", "replace"))


def read(case: Case, pieces: list[Any]) -> tuple[Any, ...]:
    """Return calls, answer, thinking and their ids."""
    is_harmony = case["dialect"] == "harmony"
    kind = ByteCut if isinstance(pieces[0], bytes) else Cut
    cut: Any = kind(pieces, writes_channels=is_harmony)
    cut.thinking = HARMONY if is_harmony else tuple(case["marks"]) if "marks" in case else None
    cut.end_texts = tuple(case.get("ends", ()))
    calls_read = CallReader(DIALECTS[case["dialect"]], TOOLS, 7, opened=case.get("opened", False))
    reply = ReplyText(cut, calls=calls_read)
    parts = [part for token in range(len(pieces)) for part in reply.add(token)] + [*reply.finish()]
    shown = {
        kind: "".join(part.text for part in parts if isinstance(part, TextChunk) and part.kind == kind)
        for kind in ("answer", "thinking")
    }
    assert (shown["answer"], shown["thinking"]) == (reply.answer, reply.thinking)
    calls = calls_in(parts)
    assert len({call.id for call in calls}) == len(calls)
    told = sum(isinstance(part, ToolCallDelta) for part in parts)
    assert told == case.get("pieces", told)
    assert told or not (case.get("void") and len(pieces) > 9)
    mistyped = [name for call in calls for name in call.mistyped]
    assert mistyped == case.get("mistyped", mistyped)
    found = [("", {}) if call.problem else (call.name, call.values) for call in calls]
    return found, reply.answer, reply.thinking, [call.id for call in calls]


@pytest.mark.parametrize("kind", CASES)
def test_replies_of_reported_kinds_are_read_right(kind: str) -> None:
    case = CASES[kind]
    whole = read(case, [case["text"]])
    wanted = [(name, json.loads(arguments)) for name, arguments in case.get("calls", ())]
    assert whole[:3] == (wanted, case.get("answer", ""), case.get("thinking", ""))
    assert read(case, list(case["text"])) == whole
    assert read(case, pieces_of(case["text"].encode(), range(9999))) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 500), max_size=8))
def test_they_are_read_alike_at_any_cut(kind: str, cuts: list[int]) -> None:
    case = CASES[kind]
    assert read(case, pieces_of(case["text"].encode(), cuts)) == read(case, [case["text"]])


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 500),
    st.text("{}[]<>\"'\\,:()/ \nae", max_size=3),
    st.lists(st.integers(0, 500), max_size=9),
)
def test_whatever_is_broken_is_read_alike_and_never_fails(kind: str, at: int, more: str, cuts: list[int]) -> None:
    given = ("dialect", "marks", "text", "ends", "opened")
    case = {name: each for name, each in CASES[kind].items() if name in given}
    at %= len(case["text"]) + 1
    text = case["text"][:at] + more + case["text"][at + len(more) % 2 :]
    assert read(case, pieces_of(text, cuts)) == read(case, [text])


@pytest.mark.parametrize(
    ("kind", "id"), [("Mistral v11 has an id", "abc123def"), ("Mistral v3", "abcdef123"), ("Kimi", "functions.read:0")]
)
def test_a_models_own_id_is_the_calls(kind: str, id: str) -> None:
    assert read(CASES[kind], [CASES[kind]["text"]])[3] == [id]

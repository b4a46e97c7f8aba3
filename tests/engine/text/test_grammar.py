"""Replies held to a form: JSON of a schema and calls of tools, by a model that otherwise writes nonsense."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import within, write_model
from tests.engine.text.test_tools import CHANNELS, GLM, HARMONY, LLAMA, MISTRAL, QWEN, WITHOUT_THINKING, tokenizer
from tokamac.engine import Engine, Finished, Message, OptionError, Sampling, Speculation, TemplateOptions, ToolSpec
from tokamac.engine.errors import GrammarError
from tokamac.engine.text.grammar import GrammarConstraint
from tokamac.engine.text.tokenizer import Tokenizer

PLACE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["city", "village"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "old": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "size", "old", "tags"],
    "additionalProperties": False,
}
MOVE = ToolSpec(
    "move",
    "Moves.",
    {
        "type": "object",
        "properties": {"to": {"enum": ["left", "right"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
)
STOP = ToolSpec("stop", "Stops.", {"type": "object", "properties": {}, "additionalProperties": False})
ROLES = ("<|im_start|>", "<|im_end|>")


def constraint(model: Tokenizer, schema: Any = None, must_call: tuple[str, ...] = (), **how: Any) -> GrammarConstraint:
    made = model.constraint(
        None if schema is None else json.dumps(schema),
        must_call,
        **{"thought": False, "may_think": False, "begun": None, **how},
    )
    assert made is not None
    return made


def takes(held: GrammarConstraint, model: Tokenizer, text: str) -> bool:
    """Whether a reply may be this text, token by token, and may end there."""
    for token in model.encode(text):
        if not held.allowed()[token]:
            return False
        held.accept(token)
    return held.is_over or bool(held.allowed()[sorted(model.eos_ids)].all())


# What may be written ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "fits"), [
    ('{"kind": "city", "size": 7, "old": true, "tags": []}', True), ('{"kind":"city","size":7,"old":true,"tags":["a"]}', True),
    ('{"kind": "town", "size": 7, "old": true, "tags": []}', False), ('{"kind": "city", "size": 107}', False),
    ('Here: {"kind": "city"}', False), ('{"kind": "city", "size": 7, "old": true', False), ("[]", False), ("", False),
])  # fmt: skip
def test_only_json_of_the_schema_may_be_written(tmp_path: Path, text: str, fits: bool) -> None:
    model = tokenizer(tmp_path, QWEN, thinking=False)
    assert takes(constraint(model, PLACE), model, text) is fits


def test_white_space_has_an_end(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, thinking=False)
    assert takes(constraint(model, PLACE), model, '{\n  "kind": "city",\n  "size": 7, "old": true, "tags": []\n}')
    assert not takes(constraint(model, PLACE), model, "{" + " " * 1000 + '"kind"')
    assert not takes(constraint(model, PLACE), model, "{" + "\n" * 1000 + '"kind"')


def test_thinking_before_the_answer_is_free(tmp_path: Path) -> None:
    model, answer = tokenizer(tmp_path, QWEN), '{"a":1}'
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    may = {"may_think": True}
    assert takes(constraint(model, schema, **may), model, answer)
    assert takes(constraint(model, schema, **may), model, f"<think>\nHm {{ [ é\n</think>\n\n{answer}")
    assert takes(constraint(model, schema, thought=True), model, f"Hm\n</think>\n\n{answer}")
    assert not takes(constraint(model, schema, thought=True), model, "Hm\n")  # it may not end there
    assert not takes(constraint(model, schema, **may), model, f"<think>Hm</think>No {answer}")
    assert not takes(constraint(model, schema), model, f"<think>Hm</think>{answer}")


def test_a_continued_answer_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, thinking=False)
    begun = Message("assistant", '{"kind": "vil')
    assert takes(constraint(model, PLACE, begun=begun), model, 'lage", "size": 1, "old": false, "tags": []}')
    with pytest.raises(GrammarError, match="begins with"):
        constraint(model, PLACE, begun=Message("assistant", "Sure, here it is"))


@pytest.mark.parametrize(("schema", "why"), [
    ({"type": "nothing"}, "nothing"), ({"type": "string", "format": "zip-code"}, "zip-code"),
    ({"$ref": "https://example.com/schema"}, "example.com/schema' leads outside"), ({"type": "object", "not": {"const": 1}}, "not"),
])  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_an_error_that_says_why(tmp_path: Path, schema: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        constraint(tokenizer(tmp_path, QWEN, thinking=False), schema)


def test_a_schema_that_leads_nowhere_is_an_error_that_says_so(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, thinking=False)
    with pytest.raises(GrammarError, match="as a \\$ref to itself does"):
        constraint(model, {"$ref": "#"}).allowed()


def test_whole_numbers_have_an_end(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, thinking=False)
    for schema, text, fits in (({}, "-1234567890123456789", True), ({}, "1" * 20, False), ({"minimum": 5}, "4", False),
                               ({"minimum": 5}, "1" * 20, False), ({"maximum": -5}, "-9", True)):  # fmt: skip
        assert takes(constraint(model, {"type": "integer", **schema}), model, text) is fits


CALLS = {
    "qwen": (QWEN, ROLES, '<tool_call>\n{"name": "move", "arguments": {"to": "left"}}\n</tool_call>'),
    "llama": (LLAMA, ("<|start|>", "<|eot|>"), '{"name": "move", "parameters": {"to": "left"}}'),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[INST]", "</s>"),
                '[TOOL_CALLS][{"name": "move", "arguments": {"to": "left"}, "id": "abcdef123"}]'),
    "harmony": (HARMONY, (*CHANNELS, "<|constrain|>"),
                '<|channel|>commentary to=functions.move <|constrain|>json<|message|>{"to": "left"}'),
    "glm": (GLM, ("<|user|>",), "<tool_call>move<arg_key>to</arg_key><arg_value>left</arg_value></tool_call>"),
}  # fmt: skip


@pytest.mark.parametrize("family", CALLS)
def test_a_call_is_written_as_the_model_writes_it(tmp_path: Path, family: str) -> None:
    template, marks, call = CALLS[family]
    model = tokenizer(tmp_path, template, marks=marks, thinking=False).using(TemplateOptions(tools=(MOVE, STOP)))
    assert takes(constraint(model, must_call=("move",)), model, call)
    assert takes(constraint(model, must_call=("move", "stop")), model, call)
    assert not takes(constraint(model, must_call=("stop",)), model, call)
    assert not takes(constraint(model, must_call=("move",)), model, "It is done.")
    assert not takes(constraint(model, must_call=("move",)), model, call[:-1])
    if family != "glm":  # written as tags, arguments are the model's
        assert not takes(constraint(model, must_call=("move",)), model, call.replace("left", "up"))


@pytest.mark.parametrize("family", [each for each in CALLS if each != "glm"])
def test_the_arguments_of_a_strict_tool_are_held_and_all_else_is_free(tmp_path: Path, family: str) -> None:
    template, marks, call = CALLS[family]
    tools = (replace(MOVE, strict=True), STOP)
    model = tokenizer(tmp_path, template, marks=marks, thinking=False).using(TemplateOptions(tools=tools))
    assert model.holds_calls
    final = "<|channel|>final<|message|>" if family == "harmony" else ""
    alone = family in ("harmony", "llama")  # a call is all of a reply there
    wrong, other = call.replace("left", "up"), call.replace("move", "stop")
    said = [] if alone else [(f"I go.\n{call}", True), (f"I go.\n{wrong}", False), ("", True)]
    said += [(call, True), (wrong, False), (other, True), (call.replace("move", "fly"), False)]
    for text, fits in (*said, (f"{final}I go, [a] < b", True), (f'{final}{{"a": 1}}', True)):
        assert takes(constraint(model), model, text) is fits, text


def test_thinking_stays_free_before_a_strict_call(tmp_path: Path) -> None:
    tools, call = (replace(MOVE, strict=True),), CALLS["qwen"][2]
    model = tokenizer(tmp_path, QWEN, marks=ROLES).using(TemplateOptions(tools=tools))
    assert takes(constraint(model, may_think=True), model, f"<think>\n<tool_call> so\n</think>\n\n{call}\n{call}")
    assert takes(constraint(model, thought=True), model, f"Hm\n</think>\n\nI go. {call}")
    assert not takes(constraint(model, thought=True), model, f"Hm\n</think>\n\nI go. {call.replace('left', 'up')}")


def test_how_calls_are_written_is_found_out_once_for_all_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, marks, call = CALLS["qwen"]
    own = tokenizer(tmp_path, template, marks=marks, thinking=False)
    found: list[None] = []
    find = Tokenizer._find_call_shape
    monkeypatch.setattr(Tokenizer, "_find_call_shape", lambda self: found.append(None) or find(self))
    for tools in ((MOVE, STOP), (MOVE,)):
        model = own.using(TemplateOptions(tools=tools))
        assert takes(constraint(model, must_call=("move",)), model, call)
    assert len(found) == 1


def test_a_call_may_follow_thoughts_and_other_calls(tmp_path: Path) -> None:
    call = CALLS["qwen"][2]
    model = tokenizer(tmp_path, QWEN, marks=ROLES).using(TemplateOptions(tools=(MOVE,)))
    assert takes(
        constraint(model, must_call=("move",), may_think=True), model, f"<think>\nHm\n</think>\n\n{call}\n{call}"
    )
    assert not takes(constraint(model, must_call=("move",)), model, f"{call}\nDone")
    template, marks, call = CALLS["harmony"]
    channels = tokenizer(tmp_path, template, marks=marks, thinking=False).using(TemplateOptions(tools=(MOVE,)))
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    assert takes(constraint(channels, must_call=("move",), may_think=True), channels, thought + call)
    schema = {"type": "object"}
    answer = f"{thought}<|channel|>final<|message|>{{}}"
    assert takes(constraint(channels.using(TemplateOptions()), schema, may_think=True), channels, answer)


def test_with_tools_an_answer_of_a_schema_or_a_call_may_come(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, marks=ROLES, thinking=False).using(TemplateOptions(tools=(MOVE,)))
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}
    assert takes(constraint(model, schema), model, '{"a": 1}')
    assert takes(constraint(model, schema), model, CALLS["qwen"][2])
    assert not takes(constraint(model, schema), model, "No")


def test_what_there_is_no_form_for_is_an_error(tmp_path: Path) -> None:
    model = tokenizer(tmp_path, QWEN, marks=ROLES, thinking=False)
    with pytest.raises(OptionError, match="no tool 'fly'"):
        constraint(model.using(TemplateOptions(tools=(MOVE,))), must_call=("fly",))
    with pytest.raises(OptionError, match="and to a call"):
        constraint(model.using(TemplateOptions(tools=(MOVE,))), PLACE, ("move",))


@given(
    word=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12),
    number=st.integers(-99, 99),
)
@settings(deadline=None, max_examples=25)
def test_what_json_writes_fits_its_schema(tmp_path_factory: pytest.TempPathFactory, word: str, number: int) -> None:
    model = tokenizer(tmp_path_factory.mktemp("model"), QWEN, thinking=False)
    schema = {"type": "object", "properties": {"word": {"const": word}, "number": {"type": "integer"}},
              "required": ["word", "number"]}  # fmt: skip
    text = json.dumps({"word": word, "number": number}, ensure_ascii=False)
    assert takes(constraint(model, schema), model, text)


# What is written -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes nonsense, but has a template for tools."""
    return write_model(
        tmp_path_factory.mktemp("model") / "tiny", template=WITHOUT_THINKING, max_position_embeddings=4096
    )


def checked(text: str) -> None:
    found = json.loads(text)
    assert found["kind"] in ("city", "village")
    assert 0 <= found["size"] <= 99
    assert isinstance(found["old"], bool)
    assert all(each in ("a", "b") for each in found["tags"])
    assert list(found) == PLACE["required"]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_nonsense_becomes_json_of_the_schema(folder: Path, temperature: float) -> None:
    how = Sampling(temperature=temperature, seed=3, json_schema=PLACE)
    with Engine.load(folder, prompt_cache=None) as engine:
        end = engine.ask("Where?", how)
        assert end.reason == "stop"
        checked(end.text)
        again = engine.ask("Where?", how)
        assert (again.text, again.ids) == (end.text, end.ids)
        free = engine.ask("Where?", Sampling(temperature=temperature, seed=3, max_tokens=20))
        assert free.reason == "length"  # nobody holds the next reply


def test_others_in_the_same_pass_are_held_each_to_its_own(folder: Path) -> None:
    prompts = [[Message("user", text)] for text in ("Where?", "Who?", "When?", "Why is it so?")]
    how = Sampling(temperature=1, seed=5, json_schema=PLACE, logprobs=1)
    with Engine.load(folder, prompt_cache=None, speculation=None) as engine:
        alone = {at: engine.ask(prompt, how).text for at, prompt in enumerate(prompts)}
        free = engine.ask(prompts[0], Sampling(temperature=0, max_tokens=30)).text
        found: dict[int, Finished] = {}
        for at, _, event in engine.generate_many(prompts, how):
            if isinstance(event, Finished):
                found[at] = event
        assert {at: end.text for at, end in found.items()} == alone
        assert engine.ask(prompts[0], Sampling(temperature=0, max_tokens=30)).text == free
    for end in found.values():
        checked(end.text)


def test_a_reply_without_a_form_is_not_disturbed_by_one_with_a_form(folder: Path) -> None:
    how = Sampling(temperature=0, max_tokens=40)
    with Engine.load(folder, prompt_cache=None) as engine:
        alone = engine.ask("Who?", how).text
        texts: dict[str, str] = {}
        barrier = Barrier(2)

        def ask(name: str, sampling: Sampling) -> None:
            barrier.wait()
            texts[name] = engine.ask("Who?", sampling).text

        threads = [Thread(target=ask, args=("free", how)),
                   Thread(target=ask, args=("held", Sampling(temperature=0, json_schema=PLACE)))]  # fmt: skip
        for each in threads:
            each.start()
        for each in threads:
            within(each.join)
        assert texts["free"] == alone
        checked(texts["held"])


def test_a_tokenizer_that_begins_with_a_space_writes_json_as_others_do() -> None:
    schema = {"type": "array", "items": {"enum": ["a b", "c"]}, "minItems": 3, "maxItems": 3}
    with Engine.load("guide", prompt_cache=None) as engine:
        end = engine.ask("What is decode?", Sampling(temperature=0, json_schema=schema))
    assert end.reason == "stop"
    assert len(json.loads(end.text)) == 3


LIST = {"type": "array", "items": {"enum": ["the same word", "another word"]}, "minItems": 6, "maxItems": 6}
REPEATED = {"type": "object", "properties": {"list": LIST}, "required": ["list"]}


def test_guesses_are_verified_within_the_form(folder: Path) -> None:
    """The text is the same, with guesses of what the form and the conversation say."""
    text = json.dumps({"list": ["the same word"] * 6})
    prompt = [Message("user", "A list?"), Message("assistant", text), Message("user", "A list?")]
    with Engine.load(folder, prompt_cache=None, speculation=None) as engine:
        plain = [engine.ask(prompt, Sampling(temperature=heat, seed=1, json_schema=REPEATED)) for heat in (0, 1)]
    with Engine.load(folder, prompt_cache=None, speculation=Speculation()) as engine:
        found = [engine.ask(prompt, Sampling(temperature=heat, seed=1, json_schema=REPEATED)) for heat in (0, 1)]
    assert [each.text for each in found] == [each.text for each in plain]
    assert json.loads(found[0].text)["list"]


def test_a_reply_that_is_cut_is_continued_in_its_form(folder: Path) -> None:
    how = Sampling(temperature=0, json_schema=PLACE)
    with Engine.load(folder, prompt_cache=None) as engine:
        whole = engine.ask("Where?", how).text
        begun = [Message("user", "Where?"), Message("assistant", whole[:20])]
        end = next(each for each in engine.generate(begun, how, continues=True) if isinstance(each, Finished))
        assert end.text.startswith(whole[:20])
        checked(end.text)


def test_options_that_contradict_each_other_are_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="min tokens"):
        Sampling(min_tokens=3, json_schema=PLACE)
    with pytest.raises(OptionError, match="not a JSON object"):
        Sampling(json_schema="[1]")
    with Engine.load(folder, prompt_cache=None) as engine:
        told = TemplateOptions(tools=(MOVE,), must_call="move")
        with pytest.raises(OptionError, match="min tokens"):
            engine.ask("Go", Sampling(min_tokens=3), template=told)
        with pytest.raises(OptionError, match="no tool"):
            engine.ask("Go", template=TemplateOptions(must_call="move"))
        with pytest.raises(GrammarError, match="zip"):
            engine.ask("Go", Sampling(json_schema={"format": "zip", "type": "string"}))
        assert engine.ask("Go", Sampling(max_tokens=2)).reason == "length"


def test_without_the_extra_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with Engine.load(folder, prompt_cache=None) as engine:
        with pytest.raises(GrammarError, match="needs llguidance") as refused:
            engine.ask("Where?", Sampling(json_schema=PLACE))
        assert "tokamac[schema]" in refused.value.hint
        assert engine.ask("Where?", Sampling(max_tokens=2)).reason == "length"

"""Answers of a JSON schema and calls that have to come, asked for by the real clients of a model that writes nonsense."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import hypothesis
import openai
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.app.serve.serving import Served, events, serving, user
from tests.engine.helpers import write_model
from tests.engine.text.test_tools import WITHOUT_THINKING
from tokamac.app.serve import request

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Place(BaseModel):
    """What is asked for."""

    kind: Literal["city", "village"]
    old: bool


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
MOVE = {
    "type": "object",
    "properties": {"to": {"enum": ["left", "right"]}},
    "required": ["to"],
    "additionalProperties": False,
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = {"move": MOVE, "stop": STOP}
NESTED: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]
FLAT: Any = [
    {"type": "function", "name": name, "parameters": each, "strict": False} for name, each in FUNCTIONS.items()
]
TOOLS: Any = [{"name": name, "input_schema": each} for name, each in FUNCTIONS.items()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("nonsense")
    model = write_model(folder / "model", template=WITHOUT_THINKING, max_position_embeddings=4096)
    with serving(str(model), folder / "log", aliases=("nonsense",)) as found:
        yield found


@pytest.fixture(scope="module")
def gpt(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


ASKED: Any = {"model": "nonsense", "temperature": 1, "seed": 1}


def test_a_chat_completion_is_json_of_the_schema(gpt: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "messages": user("Where?")}
    parsed = gpt.chat.completions.parse(**asked, response_format=Place).choices[0]
    assert isinstance(parsed.message.parsed, Place)
    assert parsed.finish_reason == "stop"
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    whole = gpt.chat.completions.create(**asked, response_format=wanted)
    text = whole.choices[0].message.content or ""
    assert Place.model_validate_json(text)
    chunks = gpt.chat.completions.create(**asked, response_format=wanted, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == text
    several = gpt.chat.completions.create(**asked, n=4, extra_body={"json_schema": SCHEMA})
    assert several.choices[0].message.content == text
    assert all(Place.model_validate_json(each.message.content or "") for each in several.choices)
    anything = gpt.chat.completions.create(**asked, response_format={"type": "json_object"}, max_tokens=60)
    assert (anything.choices[0].message.content or "").startswith("{")


def test_a_response_is_json_of_the_schema(gpt: openai.OpenAI) -> None:
    parsed = gpt.responses.parse(model="nonsense", input="Where?", text_format=Place, temperature=1)
    assert isinstance(parsed.output_parsed, Place)
    assert parsed.text.format.type == "json_schema"


def test_a_message_is_json_of_the_schema(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "nonsense", "max_tokens": 500, "messages": user("Where?")}
    parsed = claude.messages.parse(**asked, output_format=Place)
    assert isinstance(parsed.parsed_output, Place)
    told = claude.messages.create(**asked, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert Place.model_validate_json(told.content[0].text)  # type: ignore[union-attr]
    older = claude.messages.create(**asked, extra_body={"output_format": {"type": "json_schema", "schema": SCHEMA}})
    assert Place.model_validate_json(older.content[0].text)  # type: ignore[union-attr]


def test_a_text_is_continued_with_json_of_the_schema(gpt: openai.OpenAI) -> None:
    told = gpt.completions.create(**ASKED, prompt="Where? ", max_tokens=500, extra_body={"json_schema": SCHEMA})
    assert Place.model_validate_json(told.choices[0].text)


def arguments(name: str, text: str) -> None:
    given = json.loads(text)
    assert given == {} if name == "stop" else given["to"] in ("left", "right")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_calls_what_it_has_to(gpt: openai.OpenAI, stream: bool) -> None:
    asked: Any = {**ASKED, "messages": user("Go"), "tools": NESTED, "max_tokens": 400}

    def calls(choice: Any, **more: Any) -> tuple[list[tuple[str, str]], str | None, str | None]:
        if not stream:
            told = gpt.chat.completions.create(**asked, tool_choice=choice, **more).choices[0]
            made = told.message.tool_calls or []
            return (
                [(each.function.name, each.function.arguments) for each in made],
                told.finish_reason,
                told.message.content,
            )  # type: ignore[union-attr]
        found: dict[int, list[str]] = {}
        pieces: list[Any] = []
        text, reason = "", None
        for chunk in gpt.chat.completions.create(**asked, tool_choice=choice, stream=True, **more):
            for part in chunk.choices[0].delta.tool_calls or ():
                pieces.append(part)
                one = found.setdefault(part.index, ["", ""])
                one[0] += part.function.name or ""
                one[1] += part.function.arguments or ""
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert len(pieces) >= 3 * len(found)  # a beginning, the first piece as soon as it is there, and others
        return [(name, given) for name, given in found.values()], reason, text or None

    made, reason, text = calls({"type": "function", "function": {"name": "move"}})
    assert ([name for name, _ in made], reason, text) == (["move"], "tool_calls", None)
    arguments(*made[0])
    made, reason, _ = calls("required", parallel_tool_calls=False)
    assert (len(made), reason) == (1, "tool_calls")
    arguments(*made[0])
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    made, _, _ = calls({"type": "allowed_tools", "allowed_tools": allowed}, parallel_tool_calls=False)
    assert [name for name, _ in made] == ["stop"]
    arguments(*made[0])
    assert calls("none")[0] == []


def test_a_response_calls_what_it_has_to(gpt: openai.OpenAI) -> None:
    asked: Any = {"model": "nonsense", "input": "Go", "tools": FLAT, "max_output_tokens": 400}
    named = gpt.responses.create(**asked, tool_choice={"type": "function", "name": "move"})
    assert [each.type for each in named.output] == ["function_call"]
    arguments("move", named.output[0].arguments)  # type: ignore[union-attr]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
    one = gpt.responses.create(**asked, tool_choice=allowed, parallel_tool_calls=False)
    assert [each.name for each in one.output] == ["stop"]  # type: ignore[union-attr]


def test_a_message_calls_what_it_has_to(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "nonsense", "max_tokens": 400, "messages": user("Go"), "tools": TOOLS}
    named = claude.messages.create(**asked, tool_choice={"type": "tool", "name": "move"})
    assert ([each.type for each in named.content], named.stop_reason) == (["tool_use"], "tool_use")
    assert named.content[0].input["to"] in ("left", "right")  # type: ignore[union-attr,index]
    one = claude.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [each.type for each in one.content] == ["tool_use"]


@pytest.mark.parametrize(("path", "given", "param"), [
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"format": "zip", "type": "string"}}}},
     "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "json_schema"),
    (CHAT, {"json_schema": []}, "json_schema"),
    (CHAT, {"json_schema": SCHEMA, "min_tokens": 2}, ""), (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": NESTED}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "web_search"}, "tools": NESTED}, "tool_choice.type"),
    (CHAT, {"tool_choice": "required", "tools": NESTED, "json_schema": SCHEMA}, ""),
    (CHAT, {"tool_choice": "always", "tools": NESTED}, "tool_choice"),
    (CHAT, {"tool_choice": {}, "tools": NESTED}, "tool_choice.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "text.format"),
    (RESPONSES, {"tool_choice": {"type": "file_search"}, "tools": FLAT}, "tool_choice.type"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "fly"}, "tools": TOOLS}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_form_is_a_400(
    served: Served, path: str, given: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"input": "Hi"} if path == RESPONSES else {"messages": user("Hi"), "max_tokens": 5}
    status, told = served.ask(path, {**body, **given, "stream": stream})
    assert status == 400, told
    if path == MESSAGES:
        assert param in told["error"]["message"] or "schema" in told["error"]["message"]
    elif param:
        assert told["error"]["param"] == param


def test_without_the_extra_the_answer_says_what_to_install(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda _: None)
    for given, param in (
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"tool_choice": "required", "tools": NESTED}, "tool_choice"),
    ):
        status, told = served.ask(CHAT, {"messages": user("Hi"), **given})
        assert (status, told["error"]["param"]) == (400, param)
        assert "pip install 'tokamac[schema]'" in told["error"]["message"]


@pytest.mark.parametrize(("path", "tools"), [(CHAT, NESTED), (RESPONSES, FLAT), (MESSAGES, TOOLS)])
def test_two_tools_of_one_name_are_refused_by_the_field_that_has_them(served: Served, path: str, tools: Any) -> None:
    said = {"input": "Go"} if path == RESPONSES else {"messages": user("Go"), "max_tokens": 9}
    status, told = served.ask(path, {**said, "tools": [*tools, tools[0]]})
    assert status == 400
    assert told["error"]["message"] == "there are two tools called move. Give each a name of its own."
    assert path == MESSAGES or told["error"]["param"] == "tools"


ANY_SCHEMA = st.recursive(
    st.sampled_from(
        [True, {}, {"type": "string"}, {"type": "integer", "minimum": 3}, {"enum": ["a", 1, None]}, {"const": "é"}]
    )
    | st.builds(
        lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(["a+", "(", "^[a-z]{2}$", "\\d"])
    )
    | st.sampled_from([{"$ref": "#/nowhere"}, {"type": 3}, {"type": "object", "properties": []}, None, 3]),
    lambda inner: (
        st.builds(lambda each: {"type": "array", "items": each}, inner)
        | st.builds(
            lambda each, most: {"type": "object", "properties": each, "required": [*each][:most]},
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
            st.integers(0, 3),
        )
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=4,
)
ANY_PARAMETERS = ANY_SCHEMA | st.builds(
    lambda inner: {"type": "object", "properties": inner, "additionalProperties": False},
    st.dictionaries(st.text(max_size=4), ANY_SCHEMA, max_size=3),
)
ANY_NAME = st.sampled_from(["f", "f", "look_up", "g", "F" * 64, "a b"])
ANY_FUNCTION = st.fixed_dictionaries(
    {"name": ANY_NAME}, optional={"description": st.text(max_size=9), "parameters": ANY_PARAMETERS}
)
ANY_TOOL = {
    CHAT: st.builds(lambda function: {"type": "function", "function": function}, ANY_FUNCTION),
    RESPONSES: st.builds(lambda function: {"type": "function", **function}, ANY_FUNCTION),
    MESSAGES: st.builds(lambda name, schema: {"name": name, "input_schema": schema}, ANY_NAME, ANY_PARAMETERS),
}
ANY_CHOICE = {
    CHAT: st.sampled_from(["auto", "none", "required", "f", {"type": "function", "function": {"name": "f"}}]),
    RESPONSES: st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}]),
    MESSAGES: st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}]),
}


@pytest.mark.parametrize("path", ANY_TOOL)
def test_no_tool_and_no_schema_is_more_than_the_server_bears(served: Served, path: str) -> None:
    said = (
        {"input": "Hello", "max_output_tokens": 16}
        if path == RESPONSES
        else {"messages": user("Hello"), "max_tokens": 9}
    )

    @settings(max_examples=40)
    @hypothesis.given(
        st.lists(ANY_TOOL[path], max_size=3), ANY_CHOICE[path] | st.none(), ANY_SCHEMA, st.booleans(), st.booleans()
    )
    def tried(tools: list[Any], choice: Any, schema: Any, held: bool, stream: bool) -> None:
        body = {**said, "tools": tools, "tool_choice": choice, "stream": stream}
        if held and path == CHAT:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, told = served.ask(path, {name: value for name, value in body.items() if value is not None})
        assert status in (200, 400), (status, told)
        if status == 400:
            assert told["error"]["message"]
        elif stream:
            name, last = events(told)[-1]
            assert last == "[DONE]" or name in ("response.completed", "response.incomplete", "message_stop"), (
                name,
                last,
            )

    tried()
    assert served.health()["status"] == "ok"

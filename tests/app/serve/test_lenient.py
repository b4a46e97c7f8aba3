"""What unmodified clients send is answered: fields without effect are named, and what can be honoured is."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.app.serve.serving import Served, events, serving, user
from tests.clients.shapes import recorded, with_words
from tests.scripted_engine import ANSWER, SCRIPTED, model_spec
from tests.waiting import until
from tokamac.app.serve.anthropic_messages import MessageExchange
from tokamac.app.serve.openai import ChatExchange
from tokamac.app.serve.request import ServedModel
from tokamac.engine.events import Message

HERE = Path(__file__).parent
RECORDED = [each for each in recorded() if each["path"].startswith("/v1/")]
CASES = tomllib.loads((HERE / "lenient.toml").read_text())["case"]
SAID: dict[str, dict[str, Any]] = {
    "chat": {"messages": user("Hi")},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": user("Hi"), "max_tokens": 99},
}
PATHS = {name: f"/v1/{'chat/completions' if name == 'chat' else name}" for name in SAID}


@pytest.fixture(scope="module")
def scripted_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("calls", tmp_path_factory.mktemp("log") / "log", command=SCRIPTED) as served:
        yield served


def figures(path: str, told: Any) -> dict[str, Any]:
    found: dict[str, Any] = (told["choices"][0] if "choices" in told else told)["tokamac"]
    return found


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case['path']}" for at, case in enumerate(CASES)])
def test_what_changes_nothing_is_named_in_reply_and_log(guide: Served, scripted_calls: Served, case: Any) -> None:
    path, body = case["path"], {**SAID[case["path"]], **case.get("body", {})}
    served = guide if path == "completions" else scripted_calls
    status, heads, told = served.told(PATHS[path], body)
    assert status == 200, told
    assert sorted(figures(path, told).get("ignored", [])) == sorted(case["ignored"])
    until(lambda: any(heads["x-request-id"] in line for line in served.lines))
    line = next(each for each in served.lines if heads["x-request-id"] in each)
    assert ("ignored" in line) is bool(case["ignored"])
    if "stream_options" in body:
        return
    status, raw = served.ask(PATHS[path], {**body, "stream": True})
    assert status == 200
    ends = [data.get("response", data) for _, data in events(raw) if '"tokamac"' in json.dumps(data)]
    (end,) = ends
    assert sorted(figures(path, end).get("ignored", [])) == sorted(case["ignored"])


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory, scripted_calls: Served) -> Iterator[dict[str, Served]]:
    """Servers by the model that a client was recorded with."""
    log = tmp_path_factory.mktemp("log")
    with serving("claude-code", log / "a", command=SCRIPTED) as a, serving("codex", log / "b", command=SCRIPTED) as b:
        yield {"calls": scripted_calls, "claude-code": a, "codex": b}


@pytest.mark.parametrize("request_", RECORDED, ids=[f"{at}-{each['client']}" for at, each in enumerate(RECORDED)])
def test_the_first_messages_of_clients_are_answered(agents: dict[str, Served], request_: Any) -> None:
    body = with_words(request_["body"])
    status, told = agents[request_["model"]].ask(request_["path"], body)
    assert status == 200, told
    if not body.get("stream"):
        assert figures("", told)["generated_tokens"] > 0
        return
    *_, (name, last) = events(told)
    assert last == "[DONE]" or name in ("response.completed", "message_stop")
    said = told.decode()
    assert "I look." in said or ANSWER[:4] in said  # the script calls tools, or has their results


def turns(reading: Any, **body: Any) -> list[tuple[str, str]]:
    (prompt,) = reading({"max_tokens": 9, **body}, ServedModel("m", model_spec("m"))).request.prompts
    return [(each.role, each.content) for each in prompt if isinstance(each, Message)]


def test_a_system_message_anywhere_and_several_of_a_kind_are_turns_that_any_template_takes() -> None:
    roles = ("system", "developer", "user", "user", "system", "assistant", "assistant", "system")
    said = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    note = "System message: "
    turned = [("system", "0\n\n1"), ("user", f"2\n\n3\n\n{note}4"), ("assistant", "5\n\n6"), ("user", f"{note}7")]
    assert turns(ChatExchange, messages=said) == turned
    assert (
        turns(MessageExchange, system="0\n\n1", messages=[said[2], {"role": "user", "content": ""}, *said[3:]])
        == turned
    )


def test_a_namespace_and_a_free_text_are_told_as_the_client_knows_them(scripted_calls: Served) -> None:
    tools: Any = [
        {"type": "namespace", "name": "read", "description": "Reads.",
         "tools": [{"type": "function", "name": "file", "parameters": {"type": "object"}}]},
        {"type": "custom", "name": "calculate"},
    ]  # fmt: skip
    with openai.OpenAI(base_url=f"{scripted_calls.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="calls", input="Go", tools=tools)
        custom = next(each for each in first.output if each.type == "custom_tool_call")
        assert (custom.name, json.loads(custom.input)) == ("calculate", {"expression": "6 * 7"})
        with client.responses.stream(model="calls", input="Go", tools=tools) as stream:
            done = [each for each in stream if each.type == "response.custom_tool_call_input.done"]
            final = stream.get_final_response()
        assert [each.input for each in done] == [custom.input]
        assert [each.type for each in final.output] == [each.type for each in first.output]
        outputs: Any = [
            {"type": f"{each.type}_output", "call_id": each.call_id, "output": "42"}
            for each in first.output
            if "call" in each.type
        ]
        again = client.responses.create(model="calls", input=outputs, tools=tools, previous_response_id=first.id)
        assert (again.status, again.previous_response_id) == ("completed", first.id)
        items: Any = [
            {"role": "user", "content": "Go"},
            *({"type": "item_reference", "id": each.id} for each in first.output),
        ]
        by_name = client.responses.create(model="calls", input=[*items, *outputs], tools=tools, store=False)
        assert by_name.usage.input_tokens == again.usage.input_tokens
        assert again.usage.input_tokens > first.usage.input_tokens
        unkept = client.responses.create(model="calls", input="Go", store=False)
        with pytest.raises(openai.BadRequestError, match="Send the whole conversation"):
            client.responses.create(model="calls", input="On", previous_response_id=unkept.id)


def test_a_text_is_given_back_before_its_continuation(guide: Served) -> None:
    asked = {"prompt": ["Decode is", "A cache"], "max_tokens": 3, "n": 2, "temperature": 0}
    plain, echoed = (guide.ask(PATHS["completions"], {**asked, "echo": echo})[1]["choices"] for echo in (False, True))
    before = [text for text in asked["prompt"] for _ in range(2)]  # type: ignore[attr-defined]
    assert [each["text"] for each in echoed] == [a + b["text"] for a, b in zip(before, plain, strict=True)]
    told = events(
        guide.ask(PATHS["completions"], {**asked, "prompt": "Decode is", "n": 1, "echo": True, "stream": True})[1]
    )
    assert "".join(data["choices"][0]["text"] for _, data in told[:-1]) == echoed[0]["text"]
    assert guide.ask(PATHS["completions"], {**asked, "echo": True, "logprobs": 1})[0] == 400


def test_strict_tools_are_held_where_the_model_can_be() -> None:
    tool = {"type": "function", "function": {"name": "move", "strict": True, "parameters": {"type": "object"}}}
    for holds in (True, False):
        model = ServedModel("m", model_spec("m", takes_tools=True, holds_calls=holds))
        exchange = ChatExchange({"messages": user("Go"), "tools": [tool]}, model)
        assert [each.strict for each in exchange.request.template.tools] == [holds]
        assert list(exchange.ignored) == ([] if holds else ["tools[].function.strict"])

"""Anthropic's own client against the server: messages, streams, tools, thinking, the count of tokens."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import pytest

from tests.app.serve.serving import QUESTION, Served, events, user
from tests.scripted_engine import model_spec
from tokamac.app.serve.anthropic_messages import MessageExchange
from tokamac.app.serve.request import ServedModel, ServedRequest
from tokamac.engine import Finished

TOOL: Any = {"name": "read_file", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
Scripted = Callable[..., AbstractContextManager[Served]]


def client_of(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(guide: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(guide) as made:
        yield made


def test_an_answer_is_the_engines_own_whole_and_streamed(client: anthropic.Anthropic, alone: Finished) -> None:
    asked: Any = {"model": "guide", "max_tokens": 100, "messages": user(QUESTION), "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "text"
    assert (block.text, whole.stop_reason, whole.stop_sequence) == (alone.text, "end_turn", None)
    assert whole.usage.output_tokens == alone.metrics.generated_tokens
    counted = (whole.usage.input_tokens, whole.usage.cache_read_input_tokens or 0)
    assert sum(counted) == alone.metrics.prompt_tokens
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == alone.text
        final = stream.get_final_message()
    assert final.usage.cache_read_input_tokens == alone.metrics.prompt_tokens - 1
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"


def test_the_prompt_is_counted_before_it_is_computed(guide: Served) -> None:
    asked = {"max_tokens": 2, "messages": user("Another question, please"), "stream": True}
    told = events(guide.ask("/v1/messages", asked)[1])
    assert told[0][0] == "message_start"
    assert told[0][1]["message"]["usage"]["input_tokens"] > 1
    assert told[-1] == ("message_stop", {"type": "message_stop"})


def test_why_it_ended_is_told(client: anthropic.Anthropic, alone: Finished) -> None:
    asked: Any = {"model": "guide", "messages": user(QUESTION), "extra_body": {"temperature": 0}}
    cut = client.messages.create(**asked, max_tokens=2)
    assert cut.stop_reason == "max_tokens"
    stop = alone.text.split()[2]
    stopped = client.messages.create(**asked, max_tokens=99, stop_sequences=["never", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_a_reply_goes_on_from_what_it_is_given(client: anthropic.Anthropic, alone: Finished) -> None:
    words = alone.text.split(" ")
    begun: Any = [*user(QUESTION), {"role": "assistant", "content": " ".join(words[:4])}]
    rest = client.messages.create(model="guide", max_tokens=99, messages=begun, extra_body={"temperature": 0})
    assert rest.content[0].text.strip() == " ".join(words[4:])  # type: ignore[union-attr]


def test_a_prompt_is_counted(client: anthropic.Anthropic, alone: Finished) -> None:
    counted = client.messages.count_tokens(model="guide", messages=user(QUESTION))  # type: ignore[arg-type]
    assert counted.input_tokens == alone.metrics.prompt_tokens
    begun: Any = [*user(QUESTION), {"role": "assistant", "content": " ".join(alone.text.split(" ")[:4])}]
    counted = client.messages.count_tokens(model="guide", messages=begun)
    usage = client.messages.create(model="guide", max_tokens=1, messages=begun).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    long = client.messages.count_tokens(model="guide", messages=user("long " * 5000))  # type: ignore[arg-type]
    assert long.input_tokens > 5000  # more than the context holds: who asks wants to know by how much


def test_calls_are_told_and_their_results_are_read(scripted: Scripted) -> None:
    with scripted("calls") as served, client_of(served) as client:
        asked: Any = {"model": "calls", "max_tokens": 999, "tools": [TOOL]}
        whole = client.messages.create(**asked, messages=user("Read it"))
        assert whole.stop_reason == "tool_use"
        calls = [each for each in whole.content if each.type == "tool_use"]
        assert [(each.name, each.input) for each in calls] == [
            ("read_file", {"path": "notes.md"}),
            ("calculate", {"expression": "6 * 7"}),
        ]
        with client.messages.stream(**asked, messages=user("Read it")) as stream:
            final = stream.get_final_message()
        assert [each.input for each in final.content if each.type == "tool_use"] == [each.input for each in calls]
        results: Any = [
            {"type": "tool_result", "tool_use_id": each.id, "content": [{"type": "text", "text": "42"}]}
            for each in calls
        ]
        results[0]["is_error"] = True
        talked: Any = [
            *user("Read it"),
            {"role": "assistant", "content": [each.model_dump() for each in whole.content]},
            {"role": "user", "content": results},
        ]
        more: Any = {"role": "user", "content": [{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}]}
        assert client.messages.create(**asked, messages=[*talked, more]).content
        assert client.messages.create(**asked, messages=talked).stop_reason == "end_turn"
        one = client.messages.create(
            **asked, messages=user("Read it"), tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert (one.stop_reason, len([each for each in one.content if each.type == "tool_use"])) == ("tool_use", 1)
        none = client.messages.create(**asked, messages=user("Read it"), tool_choice={"type": "none"})
        assert none.stop_reason == "end_turn"


def test_thinking_is_a_block_and_goes_back_as_it_came(scripted: Scripted) -> None:
    with scripted("thinks-fast") as served, client_of(served) as client:
        asked: Any = {"model": "thinks-fast", "max_tokens": 999}
        whole = client.messages.create(**asked, messages=user("Hi"))
        assert [each.type for each in whole.content] == ["thinking", "text"]
        with client.messages.stream(**asked, messages=user("Hi")) as stream:
            final = stream.get_final_message()
        assert [each.to_dict() for each in final.content] == [each.to_dict() for each in whole.content]
        talked: Any = [
            *user("Hi"), {"role": "assistant", "content": [each.model_dump() for each in whole.content]}, *user("Go on"),
        ]  # fmt: skip
        assert client.messages.create(**asked, messages=talked).content


def test_a_failure_is_told_in_anthropics_words(scripted: Scripted) -> None:
    with scripted("tiny-context") as served, client_of(served) as client:
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="context holds 8"):
                client.messages.create(  # type: ignore[call-overload]
                    model="tiny-context", max_tokens=9, messages=user("much too long a prompt"), stream=stream
                )
        with pytest.raises(anthropic.NotFoundError, match="This server has tiny-context"):
            client.messages.create(model="claude", max_tokens=9, messages=user("Hi"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [
    ("thinking", {"type": "always"}), ("tool_choice", {"type": "any"}), ("tools", [TOOL]), ("top_k", -2), ("max_tokens", 0),
    ("max_tokens", None), ("messages", []), ("output_config", {"format": {"type": "json_schema"}}),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
])  # fmt: skip
def test_what_can_not_be_honoured_is_a_400_that_names_it(guide: Served, field: str, value: object) -> None:
    status, told = guide.ask("/v1/messages", {"max_tokens": 1, "messages": user("Hi"), field: value})
    assert status == 400, told
    assert told["error"]["type"] == "invalid_request_error"
    assert field in told["error"]["message"]


def read(**body: object) -> ServedRequest:
    model = ServedModel("m", model_spec("m", takes_tools=True))
    return MessageExchange({"model": "m", "max_tokens": 9, **body}, model).request


def test_examples_of_a_tools_input_are_told_with_it() -> None:
    tool = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    (spec,) = read(messages=user("Hi"), tools=[tool]).template.tools
    assert spec.description == 'Finds.\nExamples of its input:\n{"a":1}'

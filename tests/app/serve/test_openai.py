"""OpenAI's own client against the server: chat completions, completions, responses, models."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.app.serve.serving import QUESTION, Served, serving, user
from tests.tiny import make_tiny
from tokamac.app.serve.openai import OTHERS
from tokamac.engine import Engine, Finished, Sampling

TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
Scripted = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="module")
def client(guide: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guide.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


# Chat completions.


def test_an_answer_is_the_engines_own_whole_and_streamed(client: openai.OpenAI, alone: Finished) -> None:
    asked: Any = {"model": "guide", "messages": user(QUESTION), "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == (alone.text, "stop")
    assert whole.usage.completion_tokens == alone.metrics.generated_tokens
    assert whole.usage.prompt_tokens == alone.metrics.prompt_tokens
    assert choice.model_extra["tokamac"]["ttft_s"] > 0
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in streamed[:-1]) == alone.text
    assert [each.choices[0].finish_reason for each in streamed[:-1] if each.choices[0].finish_reason] == ["stop"]
    assert {each.id for each in streamed} == {streamed[0].id}
    assert streamed[0].choices[0].delta.role == "assistant"
    assert sum(bool(each.choices and each.choices[0].delta.content) for each in streamed) > 1  # in pieces
    usage = streamed[-1].usage
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (
        whole.usage.total_tokens,
        whole.usage.prompt_tokens - 1,  # read once
    )


def test_limits_stops_and_seeds_are_honoured(client: openai.OpenAI, alone: Finished) -> None:
    def said(**options: Any) -> tuple[str, str]:
        made = client.chat.completions.create(model="guide", messages=user(QUESTION), **options)
        return made.choices[0].message.content or "", made.choices[0].finish_reason

    stop = alone.text.split()[2]
    assert said(temperature=0, stop=stop) == (alone.text.partition(stop)[0], "stop")
    assert said(temperature=0, max_completion_tokens=3)[1] == "length"
    assert said(temperature=0, logit_bias={str(alone.ids[0]): -100})[0].split()[0] != alone.text.split()[0]
    assert said(temperature=2, seed=5, max_tokens=20) == said(temperature=2, seed=5, max_tokens=20)
    assert len({said(temperature=2, seed=seed, max_tokens=20)[0] for seed in range(4)}) > 1


def test_several_choices_have_seeds_of_their_own_and_share_one_prompt(client: openai.OpenAI) -> None:
    asked: Any = {"model": "guide", "messages": user(QUESTION), "temperature": 2, "max_tokens": 12}
    several = client.chat.completions.create(**asked, n=3, seed=7)
    texts = [each.message.content for each in several.choices]
    assert [each.index for each in several.choices] == [0, 1, 2]
    assert texts == [client.chat.completions.create(**asked, seed=7 + i).choices[0].message.content for i in range(3)]
    assert several.usage.prompt_tokens < 20  # once, not three times
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, n=3, seed=7, stream=True):
        choice = chunk.choices[0]
        assert chunk.usage is None  # it was not asked for
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts


def test_log_probabilities_are_the_engines(client: openai.OpenAI, alone: Finished) -> None:
    asked: Any = {"model": "guide", "messages": user(QUESTION), "temperature": 0, "logprobs": True, "top_logprobs": 3}
    scores = client.chat.completions.create(**asked).choices[0].logprobs
    assert len(scores.content) == alone.metrics.generated_tokens - 1  # the end is none of the text's
    for each in scores.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token  # greedy
        assert each.bytes == list(each.token.encode())
    streamed = [
        score.token
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for score in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == [each.token for each in scores.content]


def test_thirty_two_streams_at_once_are_each_as_alone(client: openai.OpenAI) -> None:
    def said(number: int) -> str:
        asked: Any = {"model": "guide", "messages": user(f"What is a KV cache? {number % 4}"), "max_tokens": 24}
        streamed = client.chat.completions.create(**asked, temperature=1, seed=number, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in streamed)

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(said, range(32)))
    assert together[::8] == [said(number) for number in range(0, 32, 8)]


def test_parts_of_text_are_read_and_others_refused(client: openai.OpenAI) -> None:
    def said(part: dict[str, Any]) -> str:
        asked: Any = [{"role": "user", "content": [part]}]
        made = client.chat.completions.create(model="guide", messages=asked, temperature=0)
        return made.choices[0].message.content or ""

    assert said({"type": "text", "text": QUESTION}).startswith("Decode")
    with pytest.raises(openai.BadRequestError) as refused:
        said({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})
    assert refused.value.param == "messages[0].content[0].image_url.url"
    with pytest.raises(openai.BadRequestError, match="No model here hears"):
        said({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})


@pytest.mark.parametrize(("field", "value"), [
    *((name, {"a": 1}) for name in OTHERS),
    ("response_format", {"type": "grammar"}), ("tool_choice", "required"), ("modalities", ["audio"]), ("n", 0), ("n", 65),
    ("temperature", 11), ("seed", -2), ("stop", [1]), ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("max_tokens", 0),
    ("max_tokens", "9"), ("reasoning_effort", 3), ("tools", [TOOL]), ("messages", []), ("messages", "hi"), ("stream", "yes"),
    ("chat_template_kwargs", [1]), ("presence_penalty", 3), ("logprobs", 1), ("parallel_tool_calls", 1),
    ("continue_final_message", True),
])  # fmt: skip
def test_what_can_not_be_honoured_is_a_400_that_names_it(guide: Served, field: str, value: object) -> None:
    status, told = guide.ask("/v1/chat/completions", {"messages": user("Hi"), "max_tokens": 1, field: value})
    assert status == 400, told
    assert field in told["error"]["message"]
    assert (told["error"]["param"] or field).startswith(field)


def test_sampling_beyond_openais_is_honoured(guide: Served, alone: Finished) -> None:
    told = guide.ask("/v1/chat/completions", {"messages": user(QUESTION), "temperature": 9, "top_k": 1})[1]
    assert told["choices"][0]["message"]["content"] == alone.text


def test_a_prompt_that_is_too_long_is_a_400_also_of_a_stream(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="guide", messages=user("long " * 5000), stream=stream)  # type: ignore[call-overload]
        assert refused.value.code == "context_length_exceeded"


def test_the_models_are_the_one_that_is_loaded(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["guide"]
    assert client.models.retrieve("guide").owned_by == "tokamac"
    with pytest.raises(openai.NotFoundError, match="This server has guide"):
        client.models.retrieve("another/one")


# Thinking and tools, by a script: what a model would do.


def test_thinking_is_told_apart_whole_and_streamed(scripted: Scripted) -> None:
    with scripted("thinks-fast") as served, client_of(served) as client:
        asked: Any = {"model": "thinks-fast", "messages": user("Hi")}
        message = client.chat.completions.create(**asked).choices[0].message
        thought = message.model_extra["reasoning_content"]
        assert thought.startswith("The user asks")
        streamed = list(client.chat.completions.create(**asked, stream=True))
        deltas = [each.choices[0].delta for each in streamed]
        assert "".join((each.model_extra or {}).get("reasoning_content", "") for each in deltas) == thought
        assert "".join(each.content or "" for each in deltas) == message.content


def test_calls_are_told_and_their_results_are_read(scripted: Scripted) -> None:
    with scripted("calls") as served, client_of(served) as client:
        messages: list[Any] = user("Read it")
        asked: Any = {"model": "calls", "tools": [TOOL]}
        whole = client.chat.completions.create(**asked, messages=messages)
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [  # type: ignore[union-attr]
            ("read_file", {"path": "notes.md"}),
            ("calculate", {"expression": "6 * 7"}),
        ]
        told: dict[int, dict[str, str]] = {}
        for chunk in client.chat.completions.create(**asked, messages=messages, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                one = told.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                one["id"] += call.id or ""
                one["name"] += call.function.name or ""
                one["arguments"] += call.function.arguments or ""
        assert [each["name"] for each in told.values()] == ["read_file", "calculate"]
        assert [each["arguments"] for each in told.values()] == [each.function.arguments for each in calls]  # type: ignore[union-attr]
        two: dict[int, list[str]] = {0: [], 1: []}
        for chunk in client.chat.completions.create(**asked, messages=messages, stream=True, n=2):
            for call in chunk.choices[0].delta.tool_calls or ():
                two[chunk.choices[0].index].append(f"{call.index}{call.function.name or call.function.arguments}")
        for pieces in two.values():
            assert [each for each in pieces if each[1:] in ("read_file", "calculate")] == ["0read_file", "1calculate"]
        with client.chat.completions.stream(**asked, messages=messages, parallel_tool_calls=False) as stream:
            events = list(stream)
            one = stream.get_final_completion().choices[0]
        done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
        assert [(each.index, each.arguments) for each in done] == [(0, '{"path": "notes.md"}')]
        assert (one.finish_reason, len(one.message.tool_calls or ())) == ("tool_calls", 1)
        answered = [{"role": "tool", "tool_call_id": each.id, "content": "42"} for each in calls]
        again = client.chat.completions.create(**asked, messages=[*messages, choice.message, *answered])
        assert again.choices[0].finish_reason == "stop"
        function = {"type": "function", "id": "1", "function": {"name": "read_file", "arguments": '{"path": "a'}}
        strange = [  # what other programs and models left in a history is read: no request after it would be answered
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}], "tool_calls": [function]},
            {"role": "tool", "tool_call_id": "1", "content": "no"}, *answered, {"role": "narrator", "content": "Go on."},
        ]  # fmt: skip
        assert client.chat.completions.create(**asked, messages=[*messages, *strange]).choices[0].message.content
        one = client.chat.completions.create(**asked, messages=messages, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls or ()) == 1
        assert one.finish_reason == "tool_calls"
        unasked = client.chat.completions.create(**asked, messages=messages, tool_choice="none").choices[0]
        assert (unasked.finish_reason, unasked.message.tool_calls) == ("stop", None)


def test_a_call_that_breaks_off_stays_as_it_is_and_no_reason(scripted: Scripted) -> None:
    broken, tool = '{"path": "no', {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with scripted("calls-and-breaks-off") as served, client_of(served) as client:
        model = "calls-and-breaks-off"
        asked: Any = {"model": model, "tools": [TOOL], "messages": user("Read it")}
        deltas = [each.choices[0] for each in client.chat.completions.create(**asked, stream=True)]
        calls = [call for each in deltas for call in each.delta.tool_calls or ()]
        assert {each.index for each in calls} == {0, 1}
        assert sum(bool(each.function and each.function.arguments) for each in calls) > 4  # as they are written
        assert "".join(each.function.arguments or "" for each in calls if each.index == 1 and each.function) == broken
        assert "".join(each.delta.content or "" for each in deltas) == f"I look.{broken}"
        assert deltas[-1].finish_reason == "length"
        whole = client.chat.completions.create(**asked).choices[0].message
        assert [each.function.name for each in whole.tool_calls or ()] == ["calculate"]  # type: ignore[union-attr]
        with client.responses.stream(model=model, tools=[tool], input="Read it") as stream:
            events: list[Any] = list(stream)
        final = events[-1].response
        assert [each.sequence_number for each in events] == list(range(len(events)))
        items: list[Any] = final.output
        assert [(each.type, each.status) for each in items] == [
            ("message", "completed"), ("function_call", "completed"), ("function_call", "incomplete"), ("message", "completed"),
        ]  # fmt: skip
        assert items[2].arguments == broken
        assert [each.output_index for each in events if each.type == "response.output_item.done"] == [0, 1, 2, 3]
        done = [each for each in events if each.type == "response.function_call_arguments.done"]
        assert [each.arguments for each in done] == [items[1].arguments]
        assert sum(each.type == "response.function_call_arguments.delta" for each in events) > 4
        assert (final.status, final.output_text) == ("incomplete", f"I look.{broken}")


# Completions of a text.


def test_a_text_is_continued_as_its_tokens_are(client: openai.OpenAI, tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", context=4096))
    sampling = Sampling(temperature=0, max_tokens=20, logprobs=2)
    with Engine.load(folder, prompt_cache=None) as engine:
        ids = engine.tokenizer.encode("Once upon")
        alone = engine.ask(ids, sampling)
        with_penalties = engine.ask(ids, replace(sampling, frequency_penalty=2, presence_penalty=1))
    with serving(folder, tmp_path / "log", aliases=("tiny",)) as served, client_of(served) as tiny:
        asked: Any = {"model": "tiny", "max_tokens": 20, "temperature": 0}
        for prompt in ("Once upon", ids, ["Once upon"], [ids]):
            assert tiny.completions.create(**asked, prompt=prompt).choices[0].text == alone.text
        several = tiny.completions.create(**asked, prompt=["Once upon", "Twice"], n=2)
        assert [each.index for each in several.choices] == [0, 1, 2, 3]
        assert [each.text for each in several.choices[:2]] == [alone.text, alone.text]
        assert several.usage.prompt_tokens == len("Once upon") + len("Twice")
        scored = tiny.completions.create(**asked, prompt="Once upon", logprobs=2).choices[0].logprobs
        assert scored.tokens == [each.text for each in alone.logprobs]
        assert scored.token_logprobs == pytest.approx([each.logprob for each in alone.logprobs], abs=1e-4)
        penalised = tiny.completions.create(**asked, prompt="Once upon", frequency_penalty=2, presence_penalty=1)
        assert penalised.choices[0].text == with_penalties.text != alone.text
        streamed = tiny.completions.create(**asked, prompt="Once upon", stream=True)
        assert "".join(each.choices[0].text for each in streamed) == alone.text
        for name, value in {"echo": 1, "prompt": [], "logprobs": 6}.items():
            with pytest.raises(openai.BadRequestError) as refused:
                tiny.completions.create(**{"prompt": "a", **asked, name: value})
            assert (refused.value.param or "").startswith(name)


# Responses.


def test_a_response_is_the_engines_own_whole_and_streamed(client: openai.OpenAI, alone: Finished) -> None:
    asked: Any = {"model": "guide", "input": QUESTION, "temperature": 0, "store": False}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (alone.text, "completed")
    assert whole.usage.output_tokens == alone.metrics.generated_tokens
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == alone.text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [each.sequence_number for each in events] == list(range(len(events)))
    cut = client.responses.create(**asked, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    talked: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"role": "user", "content": QUESTION},
    ]
    later = client.responses.create(**{**asked, "input": talked}, instructions="Be brief.")
    assert later.usage.input_tokens > whole.usage.input_tokens


def test_a_responses_calls_and_thinking_go_back_as_they_came(scripted: Scripted) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with scripted("calls") as served, client_of(served) as client:
        asked: Any = {"model": "calls", "tools": [tool]}
        first = client.responses.create(**asked, input="Read it")
        calls = [each for each in first.output if each.type == "function_call"]
        assert [each.name for each in calls] == ["read_file", "calculate"]
        with client.responses.stream(**asked, input="Read it") as stream:
            done = [each for each in stream if each.type == "response.function_call_arguments.done"]
        assert [each.arguments for each in done] == [each.arguments for each in calls]
        outputs = [{"type": "function_call_output", "call_id": each.call_id, "output": "42"} for each in calls]
        items = [{"role": "user", "content": "Read it"}, *(each.model_dump() for each in first.output), *outputs]
        assert client.responses.create(**asked, input=items).output_text
    with scripted("thinks-fast") as served, client_of(served) as client:
        first = client.responses.create(model="thinks-fast", input="Hi")
        assert [each.type for each in first.output] == ["reasoning", "message"]
        items = [{"role": "user", "content": "Hi"}, *(each.model_dump() for each in first.output), *user("Go on")]
        assert client.responses.create(model="thinks-fast", input=items).output_text  # type: ignore[arg-type]
        with client.responses.stream(model="thinks-fast", input="Hi") as stream:
            list(stream)
            assert stream.get_final_response().output_text == first.output_text


@pytest.mark.parametrize(("field", "value"), [
    ("previous_response_id", "resp_1"), ("conversation", "c"), ("store", "yes"), ("prompt", {"id": "p"}), ("input", []),
    ("text", {"format": {"type": "grammar"}}), ("input", [{"type": "item_reference", "id": "x"}]),
])  # fmt: skip
def test_what_a_response_can_not_honour_is_a_400_that_names_it(guide: Served, field: str, value: object) -> None:
    status, told = guide.ask("/v1/responses", {"input": "Hi", field: value})
    assert status == 400, told
    assert told["error"]["param"].startswith(field)

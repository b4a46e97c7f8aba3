"""Ollama's own Python client against the server, and the requests of programs that speak to Ollama."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.serve.serving import QUESTION, Served, user
from tests.engine.gguf.written import write as write_gguf
from tests.scripted_engine import model_spec
from tests.waiting import until
from tokamac.app.serve.ollama import OllamaChat, OllamaGenerate, facts_of, keep_alive_s
from tokamac.app.serve.request import RequestError, ServedModel
from tokamac.engine import Finished, Sampling

Scripted = Callable[..., AbstractContextManager[Served]]
RECORDED = json.loads(Path(__file__).with_name("ollama_requests.json").read_text(encoding="utf-8"))
COLD: Any = {"temperature": 0, "num_predict": 100}
SPEC = model_spec("m", capacity=4096, thinks=True, thinking_modes=("on", "off", "low", "high"), takes_tools=True)


@pytest.fixture(scope="module")
def client(guide: Served) -> Iterator[ollama.Client]:
    with ollama.Client(guide.url) as made:
        yield made


def lines(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.splitlines()]


def sampling_of(options: dict[str, Any]) -> Sampling:
    return OllamaChat({"messages": user("Hi"), "options": options}, ServedModel("m", SPEC)).request.sampling


def test_an_answer_is_the_engines_own_whole_and_streamed(client: ollama.Client, alone: Finished) -> None:
    whole = client.chat("guide", user(QUESTION), options=COLD)
    assert (whole.message.content, whole.done, whole.done_reason) == (alone.text, True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (alone.metrics.prompt_tokens, alone.metrics.generated_tokens)
    assert whole.total_duration
    assert whole.prompt_eval_duration
    assert whole.total_duration >= whole.load_duration + whole.prompt_eval_duration
    *parts, end = client.chat("guide:latest", user(QUESTION), options=COLD, stream=True)
    assert "".join(part.message.content or "" for part in parts) == alone.text
    assert len(parts) > 1
    assert not any(part.done for part in parts)
    assert (end.model, end.message.content, end.done_reason) == ("guide:latest", "", "stop")
    assert end.eval_count == whole.eval_count
    assert end.eval_duration
    assert client.generate("guide", QUESTION, options=COLD).response == alone.text


def test_a_cut_answer_says_so_and_its_rate_is_the_measured_one(guide: Served) -> None:
    asked = {"messages": user(QUESTION), "stream": False, "options": {"num_predict": 5, "temperature": 0}}
    told = guide.ask("/api/chat", asked)[1]
    assert (told["done_reason"], told["eval_count"]) == ("length", 5)
    assert told["eval_count"] / told["eval_duration"] * 1e9 == pytest.approx(told["tokamac"]["decode_tps"], rel=1e-6)
    one = guide.ask("/api/chat", {**asked, "options": {"num_predict": 1}})[1]
    assert "eval_duration" not in one  # of one token there is no rate


def test_a_conversation_goes_on_from_its_context(client: ollama.Client) -> None:
    first = client.generate("guide", QUESTION, system="Answer briefly.", options=COLD)
    second = client.generate("guide", "And prefill?", context=first.context, options=COLD)
    messages = [
        {"role": "system", "content": "Answer briefly."},
        *user(QUESTION),
        {"role": "assistant", "content": first.response},
    ]
    told = client.chat("guide", [*messages, *user("And prefill?")], options=COLD)
    assert (second.response, second.prompt_eval_count) == (told.message.content, told.prompt_eval_count)


def test_a_raw_prompt_has_no_template(client: ollama.Client, guide: Served) -> None:
    asked = {"prompt": "Decode is", "max_tokens": 5, "temperature": 0}
    (choice,) = guide.ask("/v1/completions", asked)[1]["choices"]
    told = client.generate("guide", "Decode is", raw=True, options={"num_predict": 5, "temperature": 0})
    assert (told.response, told.context) == (choice["text"], None)


def test_tokens_are_told_with_their_logprobs(client: ollama.Client) -> None:
    asked: Any = {"model": "guide", "messages": user(QUESTION), "logprobs": True, "top_logprobs": 2}
    whole = client.chat(**asked, options={"num_predict": 4})
    assert len(whole.logprobs) == 4
    assert all(each.logprob <= 0 and len(each.top_logprobs or ()) == 2 for each in whole.logprobs)
    parts = client.chat(**asked, options={"num_predict": 4}, stream=True)
    assert sum(len(part.logprobs or ()) for part in parts) == 4


def test_an_answer_is_held_to_a_form(client: ollama.Client) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    told = client.chat("guide", user("A number?"), format=schema, options={"num_predict": 40, "seed": 1})
    assert isinstance(json.loads(told.message.content or "")["n"], int)


def test_calls_are_objects_and_their_results_are_read(scripted: Scripted) -> None:
    def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: Its name.
        """
        return path

    with scripted("calls") as served, ollama.Client(served.url) as client:
        told = client.chat("calls", user("Read it"), tools=[read_file])
        calls = told.message.tool_calls or []
        wanted = [("read_file", {"path": "notes.md"}), ("calculate", {"expression": "6 * 7"})]
        assert [(each.function.name, each.function.arguments) for each in calls] == wanted
        parts = client.chat("calls", user("Read it"), tools=[read_file], stream=True)
        streamed = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(each.function.name, each.function.arguments) for each in streamed] == wanted
        results: Any = [{"role": "tool", "tool_name": each.function.name, "content": "42"} for each in calls]
        assert client.chat("calls", [*user("Read it"), told.message, *results], tools=[read_file]).done


def test_results_answer_calls_by_id_by_name_or_in_turn() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": at}}} for at, name in enumerate(("a", "b", "a"))]
    for named in ([{}, {}, {}], [{"tool_name": "a"}, {"tool_name": "b"}, {"tool_name": "a"}]):
        results = [{"role": "tool", "content": str(at), **more} for at, more in enumerate(named)]
        asked = {"messages": [*user("Hi"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]}
        (prompt,) = OllamaChat(asked, ServedModel("m", SPEC)).request.prompts
        assert [(each.name, each.content) for each in prompt[2:]] == [("a", "0"), ("b", "1"), ("a", "2")]  # type: ignore[union-attr]
        assert [each.tool_call_id for each in prompt[2:]] == [each.id for each in prompt[1].tool_calls]  # type: ignore[union-attr]


def test_thinking_is_apart(scripted: Scripted) -> None:
    with scripted("thinks-fast") as served, ollama.Client(served.url) as client:
        told = client.chat("thinks-fast", user("Hi"), think=True)
        assert (told.message.thinking or "").startswith("The user asks")
        assert not (told.message.content or "").startswith("The user asks")
        parts = list(client.generate("thinks-fast", "Hi", stream=True))
        assert "".join(part.thinking or "" for part in parts) == told.message.thinking
        assert client.chat("thinks-fast", user("Hi"), think=False).message.thinking is None


@pytest.mark.parametrize(
    ("think", "mode", "ignored"),
    [
        (None, None, []), (True, "on", []), (False, "off", []), ("low", "low", []), ("medium", "on", []),
        ("max", "high", []),
    ],
)  # fmt: skip
def test_how_much_is_thought(think: object, mode: str | None, ignored: list[str]) -> None:
    exchange = OllamaChat({"messages": user("Hi"), "think": think}, ServedModel("m", SPEC))
    assert (exchange.request.template.thinking, list(exchange.ignored)) == (mode, ignored)
    always = replace(SPEC, thinking_modes=())
    assert list(OllamaChat({"messages": user("Hi"), "think": False}, ServedModel("m", always)).ignored) == ["think"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": 4096}),
        ({"seed": -1, "top_k": -1, "top_p": 0}, {"seed": None, "top_k": 0, "top_p": 1e-9}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 0}, {"repetition_penalty": 1.0}),
        ({"stop": "END"}, {"stop": ("END",)}),
        (
            {"temperature": 1, "min_p": 0.1, "frequency_penalty": 0.5},
            {"temperature": 1, "min_p": 0.1, "frequency_penalty": 0.5},
        ),
    ],
)
def test_options_are_sampling(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sampling_of(options) == Sampling(**wanted)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, 0), (300, 300), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("0", 0), (-1, math.inf), ("-1", math.inf),
     ("-1m", math.inf), ("2.5s", 2.5)],
)  # fmt: skip
def test_how_long_a_model_stays(given: object, seconds: float | None) -> None:
    assert keep_alive_s({"keep_alive": given}) == seconds


@given(st.none() | st.booleans() | st.floats() | st.text(max_size=6) | st.lists(st.none()))
@settings(max_examples=50)
def test_no_duration_is_an_error_of_the_request(given: object) -> None:
    with suppress(RequestError):
        assert (keep_alive_s({"keep_alive": given}) or 0) >= 0


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["client"])
def test_a_programs_own_request_is_answered(guide: Served, recorded: dict[str, Any]) -> None:
    status, heads, raw = guide.told(recorded["path"], recorded["body"])
    assert status == 200, raw
    whole = recorded["body"].get("stream") is False
    told = [raw] if whole else lines(raw)
    assert heads["content-type"] == ("application/json" if whole else "application/x-ndjson")
    assert told[-1]["done"]
    assert told[-1]["eval_count"] <= 4
    assert sorted(told[-1]["tokamac"].get("ignored", [])) == recorded["ignored"]
    for each in told:
        assert each["model"] == recorded["body"]["model"]
        assert len(each["created_at"]) == len("2026-01-01T00:00:00.000000000Z")  # OllamaKit reads no other


def test_models_are_told(client: ollama.Client, guide: Served) -> None:
    assert guide.ask("/")[1] == b"Ollama is running"
    assert guide.ask("/", method="HEAD")[0] == 200
    assert guide.ask("/api/version")[1]["version"] >= "0.12"
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert (listed.model, running.model) == ("guide:latest", "guide:latest")
    assert listed.digest == running.digest
    assert listed.size
    assert running.size
    assert listed.modified_at < datetime.now(UTC) < (running.expires_at or datetime.now(UTC))
    shown = client.show("guide:latest")
    assert shown.capabilities == ["completion"]
    assert shown.template
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == running.context_length
    assert shown.details.family == info["general.architecture"]
    assert guide.ask("/api/show", {"name": "guide"})[1]["details"] == guide.ask("/api/tags")[1]["models"][0]["details"]


def test_a_model_that_is_not_in_memory_is_told_from_its_files(scripted: Scripted, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 4096, "hidden_size": 64, "quantization": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}<think>{% endif %}")
    with scripted("guide", allowed=(str(tmp_path),)) as served:
        names = [each["name"] for each in served.ask("/api/tags")[1]["models"]]
        assert names == ["guide:latest", f"{tmp_path}:latest"]
        shown = served.ask("/api/show", {"model": names[1]})[1]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["details"]["quantization_level"] == "4bit"
        assert shown["model_info"]["qwen3.context_length"] == 4096
        assert len(served.ask("/api/ps")[1]["models"]) == 1


def test_an_empty_request_loads_a_model(client: ollama.Client) -> None:
    assert client.generate("guide", "").done_reason == "load"
    assert client.chat("guide", []).done_reason == "load"
    assert client.generate("guide", keep_alive=0).done_reason == "unload"


def test_a_model_leaves_when_its_keep_alive_is_over(scripted: Scripted) -> None:
    def running() -> list[Any]:
        return list(client.ps().models)

    with scripted("fast") as served, ollama.Client(served.url) as client:
        client.chat("fast", user("Hi"), keep_alive="10m")
        until(lambda: (running()[0].expires_at or datetime.now(UTC)).year < 2100)  # not in use any more
        (kept,) = running()
        left = (kept.expires_at or datetime.now(UTC)) - datetime.now(UTC)
        assert 500 < left.total_seconds() <= 600
        for asked in ({"prompt": "Hi"}, {"prompt": ""}):
            client.generate("fast", **asked, keep_alive=0)
            until(lambda: not running())
            assert client.chat("fast", user("Hi"), keep_alive=-1).message.content  # loaded again, to stay
            assert (running()[0].expires_at or datetime.now(UTC)).year > 2100
        assert sum("fast leaves memory: its keep_alive is over" in line for line in served.lines) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", b"{", 400, "not JSON"),
        ("/api/chat", {"model": "other", "messages": user("Hi")}, 404, "model 'other' not found"),
        ("/api/show", {"model": "other"}, 404, "model 'other' not found"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/chat", {"messages": user("Hi"), "think": True}, 400, '"guide" does not support thinking'),
        ("/api/chat", {"messages": user("Hi"), "think": 3}, 400, "think"),
        ("/api/chat", {"messages": user("Hi"), "tools": [{"function": {"name": "f"}}]}, 400, "does not support tools"),
        ("/api/chat", {"messages": user("Hi"), "format": "xml"}, 400, "format"),
        ("/api/chat", {"messages": user("Hi"), "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/chat", {"messages": user("Hi"), "options": {"temperature": "hot"}}, 400, "options.temperature"),
        ("/api/chat", {"messages": user("Hi"), "options": {"temperature": 99}}, 400, "temperature 99"),
        ("/api/chat", {"messages": [{"content": "Hi"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": "Hi"}, 400, "messages"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "does not support insert"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "raw mode"),
        ("/api/generate", {"prompt": 5}, 400, "prompt"),
        ("/api/generate", {"prompt": "long " * 9000}, 400, "tokens"),
        ("/api/pull", {"model": "other"}, 404, "tokamac models pull"),
        ("/api/create", {"model": "other"}, 404, "GGUF"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(guide: Served, path: str, body: Any, status: int, says: str) -> None:
    found, told = guide.ask(path, body)
    assert (found, list(told)) == (status, ["error"])
    assert says in told["error"]
    assert "\n" not in told["error"]


def test_an_engine_that_dies_ends_the_stream_with_an_error(scripted: Scripted) -> None:
    with scripted("dies-decoding") as served:
        *_, end = lines(served.ask("/api/chat", {"messages": user("Hi")})[1])
        assert list(end) == ["error"]


def test_a_context_of_another_server_changes_nothing() -> None:
    for context in ([1, 2, 3], [300, -1], *map(list, (b'{"messages": 3}', b'{"messages": [{"content": 1}]}', b"[]"))):
        exchange = OllamaGenerate({"prompt": "Hi", "context": context}, ServedModel("m", SPEC))
        assert (list(exchange.ignored), len(exchange.request.prompts[0])) == (["context"], 1)


def test_a_gguf_file_is_told_of_as_one_with_its_size(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {"architecture": "llama", "case": "llama"})
    entry = facts_of("model", str(tmp_path / "model.gguf"), None).entry
    assert (entry["details"]["format"], entry["size"]) == ("gguf", (tmp_path / "model.gguf").stat().st_size)

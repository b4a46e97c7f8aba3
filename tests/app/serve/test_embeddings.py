"""Embeddings over HTTP: OpenAI's and Ollama's own clients, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from tests.app.serve.serving import Served, serving
from tests.engine.test_embedding import TOLERANCE, build, off

TEXTS = "why is decode slow?", "the"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("embedding") / "model"
    return {**build("gemma3", folder), "folder": folder}


@pytest.fixture(scope="module")
def served(stored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(str(stored["folder"]), tmp_path_factory.mktemp("log") / "log", aliases=("small",)) as running:
        yield running


def test_openais_client_is_told_the_models_vectors(served: Served, stored: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(
            model="small", input=stored["texts"]
        )  # in base64, as the client asks by itself
        plain = client.embeddings.create(model="small", input=stored["texts"], encoding_format="float")
        for told in (packed, plain):
            assert off([each.embedding for each in told.data], stored["vectors"]) < TOLERANCE
            assert [each.index for each in told.data] == [0, 1, 2, 3]
            assert told.usage.prompt_tokens == told.usage.total_tokens == sum(map(len, stored["ids"]))
        odd = client.embeddings.create(model="small", input="the", extra_body={"input_type": "query"})
        assert (odd.model_extra or {})["tokamac"] == {"ignored": ["input_type"]}
        (one,) = client.embeddings.create(model="small", input="the", dimensions=8).data
        assert len(one.embedding) == 8
        assert float(np.linalg.norm(one.embedding)) == pytest.approx(1, abs=1e-5)
        many = client.embeddings.create(model="small", input=["the", "a word"] * 40)
        assert off([each.embedding for each in many.data[::2]], [many.data[0].embedding] * 40) < TOLERANCE
        asked = client.embeddings.create(model="small", input="the", extra_body={"prompt_name": "query"})
        prompt = json.loads((stored["folder"] / "config_sentence_transformers.json").read_text())["prompts"]["query"]
        (same,) = client.embeddings.create(model="small", input=f"{prompt}the").data
        assert off(asked.data[0].embedding, same.embedding) < TOLERANCE


def test_ollamas_client_is_told_the_same(served: Served, stored: dict[str, Any]) -> None:
    with ollama.Client(served.url) as client:
        told = client.embed("small", stored["texts"])
        assert off(told.embeddings, stored["vectors"]) < TOLERANCE
        assert told.prompt_eval_count == sum(map(len, stored["ids"]))
        assert told.total_duration
        assert len(client.embed("small:latest", "the", dimensions=8).embeddings[0]) == 8
        assert off(client.embeddings("small", "the").embedding, stored["vectors"][0]) < TOLERANCE
        assert client.embed("small", "word " * 400).prompt_eval_count == 256  # cut, as Ollama does
        assert client.embed("small", "").embeddings == []
        assert client.embeddings("small", "").embedding == []
        assert client.show("small").capabilities == ["embedding"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [1, 2]}, 400, "token ids"),
        ("/v1/embeddings", {"input": [["a"]]}, 400, "token ids"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, 400, "64 dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, 400, "query, document"),
        ("/v1/embeddings", {"input": "word " * 400}, 400, "context is 256"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "2,048"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "other"),
        ("/api/embed", {"input": 5}, 400, "input"),
        ("/api/embed", {"input": "word " * 400, "truncate": False}, 400, "context is 256"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, 400, "makes embeddings"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(served: Served, path: str, body: Any, status: int, says: str) -> None:
    found, told = served.ask(path, body)
    error = told["error"] if path.startswith("/api") else told["error"]["message"]
    assert found == status
    assert says in error
    assert "\n" not in error


def test_a_chat_model_embeds_too_and_figures_are_a_page(guide: Served, tmp_path: Path) -> None:
    before = page(guide)
    told = guide.ask("/v1/embeddings", {"input": list(TEXTS)})[1]
    assert float(np.linalg.norm(told["data"][0]["embedding"])) == pytest.approx(1, abs=1e-5)
    guide.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    guide.ask("/v1/nothing", {})
    after = page(guide)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more('tokamac_requests_total{endpoint="/v1/embeddings",status="200"}') == 1
    assert more('tokamac_requests_total{endpoint="other",status="404"}') == 1
    assert more('tokamac_tokens_total{kind="embedded"}') == told["usage"]["prompt_tokens"]
    assert more('tokamac_tokens_total{kind="generated"}') == 3
    assert more("tokamac_ttft_seconds_count") == more("tokamac_queue_seconds_count") == 1
    assert after["tokamac_models_loaded"] == 1
    assert after['tokamac_replies{state="active"}'] == after['tokamac_replies{state="waiting"}'] == 0
    assert after['tokamac_model_memory_bytes{model="guide"}'] > 1e6
    assert guide.ask("/metrics", headers={"Host": "evil.example"})[0] == 403


def page(served: Served) -> dict[str, float]:
    """Return the samples of /metrics."""
    status, heads, raw = served.told("/metrics")
    assert (status, heads["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = [line.rpartition(" ") for line in raw.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}

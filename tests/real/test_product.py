"""The product with SmolLM2, as people meet it: a question, a chat, a server."""

import json
import subprocess
import sys
from pathlib import Path

import openai

from tests.app.serve.serving import serving
from tokamac.app.store.store import Store
from tokamac.engine import Engine, Message, Sampling

COMMAND = (sys.executable, "-m", "tokamac.app.cli")


def run(*arguments: str | Path, lines: str = "") -> str:
    done = subprocess.run([*COMMAND, *map(str, arguments)], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_question_is_answered(smollm2: Path) -> None:
    out = run("ask", "-m", smollm2, "--temp", "0", "--json", "What is the capital of France?")
    *_, end = map(json.loads, out.splitlines())
    assert (end["event"], end["reason"]) == ("finished", "stop")
    assert "Paris" in end["text"]
    assert end["metrics"]["decode_tps"] > 0


def test_a_chat_says_what_the_engine_says_and_is_kept(engine: Engine, smollm2: Path) -> None:
    first, second = "Name a city by the sea.", "Which country is it in?"
    out = run("chat", "--plain", "--temp", "0", "--max-tokens", "60", smollm2, lines=f"{first}\n{second}\n")
    with Store.open() as store:
        newest = store.latest()
        said = store.path(newest.id)
    assert [each.role for each in said] == ["user", "assistant"] * 2
    messages = [Message(each.role, each.text) for each in said[:-1]]
    assert said[-1].text == engine.ask(messages, Sampling(temperature=0, max_tokens=60)).text
    assert said[-1].text in out


def test_a_server_streams_an_answer_to_openais_client(smollm2: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    with (
        serving(str(smollm2), tmp_path / "log") as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (model,) = client.models.list()
        with client.chat.completions.create(
            model=model.id,
            messages=asked,
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens > 3

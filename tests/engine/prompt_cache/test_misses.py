"""Why a prompt was read again: what is said of a miss is what the ids say, with the guide and with tiny models."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.helpers import write_model
from tokamac.engine import Engine, Finished, KVSpec, Message, PromptCacheSpec, Sampling, ToolSpec
from tokamac.engine.events import CacheUse
from tokamac.engine.prompt_cache.memory import CacheStore, common_prefix
from tokamac.engine.prompt_cache.misses import MOST_DECODED, ReadPrompt, explain
from tokamac.engine.reply import Request

GREEDY = Sampling(temperature=0, max_tokens=4)
RULES = "\n".join(f"Rule {number}: answer question number {number} in a few plain words." for number in range(12))
CHANGES = tomllib.loads(Path(__file__).with_name("misses.toml").read_text())["change"]
TOOLS = tuple(ToolSpec(name, f"Does what is called {name}, and says how it went.") for name in ("read", "write", "run"))
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def spec(folder: Path, **more: Any) -> PromptCacheSpec:
    return PromptCacheSpec(folder=folder, **more)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine.load("guide", prompt_cache=spec(tmp_path_factory.mktemp("cache"))) as loaded:
        yield loaded


def asked(engine: Engine, *texts: str, **more: Any) -> tuple[Finished, CacheUse]:
    end = engine.ask(messages(*texts), GREEDY, **more)
    assert end.cache is not None
    return end, end.cache


def messages(*texts: str) -> list[Message]:
    return [Message(role, text) for role, text in zip(("system", "user", "assistant", "user"), texts, strict=False)]


def is_read_again(end: Finished, use: CacheUse) -> bool:
    """Whether all that was read but the changed words is said to be read again, at what it cost."""
    metrics = end.metrics
    assert use.again_s * metrics.prefill_tokens == pytest.approx(metrics.prefill_s * use.again_tokens)
    return 0 <= metrics.prefill_tokens - use.again_tokens < 40


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each["was"])
def test_a_change_of_the_system_prompt_is_found_and_named(guide: Engine, change: dict[str, str]) -> None:
    was, now = (f"{change['text'].format(change[which])}\n{RULES}" for which in ("was", "is"))
    asked(guide, was, "What is decode?")
    end, use = asked(guide, now, "What is decode?")
    assert (use.reason, use.part, use.churn) == ("changed", "system prompt", change.get("churn"))
    assert is_read_again(end, use)
    assert use.common_tokens == end.metrics.cached_tokens
    for text, words in ((was, use.held), (now, use.now)):
        rendered = guide.tokenizer.render(messages(text, "What is decode?"))
        assert "".join((use.before + words).split()) in "".join(rendered.split())
    assert asked(guide, now, "What is decode?")[1].again_tokens == 0  # held from here on


def test_what_is_new_is_not_called_read_again(guide: Engine) -> None:
    system = f"You explain things.\n{RULES}"
    asked(guide, system, "What is decode?")
    end, use = asked(guide, system, "Why is it slow?")  # a branch
    assert (use.reason, use.again_tokens, use.common_tokens) == ("new", 0, end.metrics.cached_tokens)
    assert use.held.strip().startswith("What is decode?")
    assert use.now.strip().startswith("Why is it slow?")
    use = asked(guide, "Nothing that was ever asked before")[1]
    assert (use.reason, use.held, use.now) == ("new", "", "")  # no part of another's prompt


def test_a_reply_that_comes_back_changed_is_named(guide: Engine) -> None:
    system, last = f"You explain the things of this world.\n{RULES}", "And what is it that is bound by the memory here?"
    reply = guide.ask(messages(system, "What is decode?"), Sampling(temperature=0, max_tokens=40)).text
    assert asked(guide, system, "What is decode?", reply, last)[1].again_tokens == 0
    use = asked(guide, system, "What is decode?", f"Well, {reply}", last)[1]
    assert (use.reason, use.part, use.churn) == ("changed", "message 3 (assistant)", "reply")


def test_a_change_far_into_a_long_conversation_is_named(guide: Engine) -> None:
    def read(word: str) -> tuple[list[Message], list[int]]:
        texts = [f"{word if number == 141 else 'Turn'} {number}. {RULES}" for number in range(160)]
        said = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]
        return said, guide.tokenizer.encode(guide.tokenizer.render(said))

    (_, was), (said, now) = read("Turn"), read("Next")
    common = common_prefix(was, now)
    assert common > MOST_DECODED
    metrics = replace(asked(guide, "Hi")[0].metrics, cached_tokens=common, prefill_tokens=len(now) - common)
    earlier = [ReadPrompt(np.array(was, np.int32), len(was), None)]
    request, store = Request(now, GREEDY, None, messages=said), CacheStore(lambda _: [])
    use = explain(request, metrics, earlier, store, guide.tokenizer)
    assert (use.reason, use.part, use.churn) == ("changed", "message 142 (assistant)", "reply")
    assert 0 < metrics.prefill_tokens - use.again_tokens < 8


def test_what_was_stored_before_a_restart_is_compared(tmp_path: Path) -> None:
    was, now = (f"Today is 2026-11-{day}.\n{RULES}\n{RULES}" for day in (28, 29))
    with Engine.load("guide", prompt_cache=spec(tmp_path)) as engine:
        assert asked(engine, was, "What is decode?")[1].reason == "first"
    with Engine.load("guide", prompt_cache=spec(tmp_path)) as engine:
        end, use = asked(engine, now, "What is decode?")
        assert (use.reason, use.part, use.churn) == ("changed", "system prompt", "date")
        assert 200 < use.again_tokens < end.metrics.prefill_tokens
    with Engine.load("guide", kv=KVSpec(8, 8), prompt_cache=spec(tmp_path)) as engine:
        assert asked(engine, now, "What is decode?")[1].reason == "settings"
    with Engine.load("guide", prompt_cache=None) as engine:
        assert asked(engine, now, "What is decode?")[1].reason == "off"


def test_what_was_evicted_is_said_to_be(tmp_path: Path) -> None:
    with Engine.load("guide", prompt_cache=spec(tmp_path, memory_bytes=0, disk=False)) as engine:
        questions = [f"Tell me about the number {number}.\n{RULES}" for number in range(3)]
        for question in questions:
            asked(engine, question, "Why?")
        end, use = asked(engine, questions[0], "Why?")
        assert use.reason == "evicted"
        assert is_read_again(end, use)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model of bytes that takes tools, and whose template leaves thinking out."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, template=TEMPLATE, thinking=True, max_position_embeddings=4096)
    with Engine.load(folder, prompt_cache=spec(folder, disk=False)) as loaded:
        yield loaded


def test_tools_in_another_order_and_other_tools_are_named(thinker: Engine) -> None:
    def use_of(*tools: ToolSpec) -> CacheUse:
        return asked(thinker, "Be brief.", "What is here?", tools=tools)[1]

    use_of(*TOOLS)
    for tools, churn in ((TOOLS[::-1], "tool order"), (TOOLS[1:], "tools")):
        use = use_of(*tools)
        assert (use.reason, use.part, use.churn) == ("changed", "tools", churn)
        assert use.again_tokens > 100


def test_thinking_that_a_template_takes_out_is_named(thinker: Engine) -> None:
    question = "What is it that is written in here, and why is it so?"
    thought = "<think>" + "This is what I think of it, at some length. " * 3 + "</think>"
    answer, last = "It is what it is, and that is the whole of it.", "Go on."
    tokens = thinker.tokenizer.encode(thinker.tokenizer.render(messages("Be brief.", question)) + thought + answer)
    list(thinker.warm(tokens))
    use = asked(thinker, "Be brief.", question, answer, last)[1]
    assert (use.reason, use.part, use.churn) == ("changed", "message 3 (assistant)", "thinking")
    assert use.held.startswith("<think>")

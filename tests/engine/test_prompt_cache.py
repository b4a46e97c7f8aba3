"""The prompt cache as a program meets it: prices that come true, warming ahead, re-reading after thinking, checking the disk."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.seeded import write_model
from tokamac.engine import (
    Branch,
    Chat,
    Edit,
    Engine,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PromptCacheSpec,
    Regenerate,
    Sampling,
    Send,
)
from tokamac.engine.prompt_cache.folder import Folder

SHORT = Sampling(temperature=0, max_tokens=6)
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture
def engine(tiny: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine.load(tiny, prompt_cache=PromptCacheSpec(folder=tmp_path / "cache")) as engine:
        yield engine


@pytest.fixture
def talk(engine: Engine) -> Chat:
    chat = engine.chat("Be brief.")
    for text in ("first question", "second question"):
        list(chat.send(text, SHORT))
    return chat


def finish(events: Iterator[Any]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


ACTIONS: dict[str, tuple[Any, Callable[[Chat], Iterator[Any]]]] = {
    "send": (Send("and a third"), lambda chat: chat.send("and a third", SHORT)),
    "regenerate": (Regenerate(), lambda chat: chat.regenerate(SHORT)),
    "edit": (Edit(2, "another second"), lambda chat: edited(chat, 2, "another second")),
    "edit the first": (Edit(0, "another first"), lambda chat: edited(chat, 0, "another first")),
    "branch": (Branch(2), lambda chat: chat.branch(2).regenerate(SHORT)),
}


def edited(chat: Chat, index: int, text: str) -> Iterator[Any]:
    chat.edit(index, text)
    return chat.regenerate(SHORT)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_price_is_what_the_action_then_costs(talk: Chat, name: str) -> None:
    action, act = ACTIONS[name]
    price = talk.price(action)
    metrics = finish(act(talk)).metrics
    assert (price.prompt_tokens, price.tokens) == (metrics.prompt_tokens, metrics.prefill_tokens)
    assert price.disk_bytes == 0


def test_regenerate_costs_one_token_and_an_edit_what_follows_it(talk: Chat) -> None:
    assert talk.price(Regenerate()).tokens == 1
    whole = talk.price(Send("and a third"))
    assert talk.price(Edit(2, "another second")).tokens < whole.prompt_tokens / 2


class Known:
    """A pace of a thousandth of a second a token."""

    def decode_s(self, work: object, context: int, batch: int = 1) -> float:
        return 0.001

    def prefill_s(self, work: object, tokens: int, cached: int, chunk: int) -> float:
        return 0.001 * tokens


def test_seconds_are_unknown_then_estimated_then_measured(tiny: Path) -> None:
    with Engine.load(tiny, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        chat, machine = engine.chat(), engine._runner.runtime.machine
        engine.between(lambda: setattr(machine, "pace", None))
        price = chat.price(Send(TEXT))
        assert (price.seconds, price.estimated) == (None, False)
        engine.between(lambda: setattr(machine, "pace", Known()))
        price = chat.price(Send(TEXT))
        assert price.estimated
        assert price.seconds == pytest.approx(0.001 * price.tokens)
        list(chat.send(TEXT, SHORT))
        price = chat.price(Send(TEXT))
        assert price.seconds is not None
        assert price.seconds > 0
        assert not price.estimated


def test_a_message_that_is_not_there_has_no_price(talk: Chat) -> None:
    with pytest.raises(OptionError, match="no message 9"):
        talk.price(Edit(9, "x"))


def test_switching_between_branches_computes_what_differs(talk: Chat) -> None:
    other = talk.branch(1)
    costs = [finish(chat.send(text, SHORT)).metrics.prefill_tokens for chat, text in ((talk, "a b c"), (other, "x"))]
    again = [finish(chat.regenerate(SHORT)).metrics.prefill_tokens for chat in (talk, other, talk)]
    assert again == [1, 1, 1]
    assert max(costs) < talk.price(Regenerate()).prompt_tokens


def test_what_is_written_ahead_is_computed_ahead(engine: Engine) -> None:
    chat = engine.chat("Be brief.")
    list(chat.send("hello", SHORT))
    cold = chat.price(Send(TEXT)).tokens
    chat.warm(TEXT[:-10])
    until(lambda: chat.price(Send(TEXT)).tokens < 20)
    assert cold > 200
    metrics = finish(chat.send(TEXT, SHORT)).metrics
    assert metrics.prefill_tokens < 20


def test_what_is_pinned_for_a_prompt_is_pinned_while_it_is_computed_ahead(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=128, keep="system")) as engine:
        chat = engine.chat("Be brief, and never forget who you are. " * 2)
        list(chat.send("hello", SHORT))
        cold = chat.price(Send(TEXT)).tokens
        chat.warm(TEXT[:-10])
        until(lambda: chat.price(Send(TEXT)).tokens < cold // 2)
        warm = finish(chat.send(TEXT, SHORT))
    with Engine.load(tiny, kv=KVSpec(window=128, keep="system"), prompt_cache=None) as engine:
        cold_chat = engine.chat(chat.system, chat.messages[:-2])
        assert finish(cold_chat.send(TEXT, SHORT)).text == warm.text


def test_warming_ahead_gives_way_at_once(engine: Engine) -> None:
    chat = engine.chat()
    long = TEXT * 2  # at 16 tokens a step, as nothing was measured yet
    chat.warm(long)
    metrics = finish(chat.send("hi", SHORT)).metrics
    assert metrics.generated_tokens == 6
    assert chat.price(Send(long)).tokens > 16
    with pytest.raises(OptionError):
        engine.warm_ahead([Message("assistant", "x")])


def test_warming_ahead_says_the_same_as_not_warming(engine: Engine, tiny: Path) -> None:
    chat = engine.chat()
    chat.warm(TEXT)
    until(lambda: chat.price(Send(TEXT)).tokens < 20)
    warm = finish(chat.send(TEXT, SHORT)).text
    with Engine.load(tiny, prompt_cache=None) as cold:
        assert finish(cold.chat().send(TEXT, SHORT)).text == warm


FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_after_thinking_the_visible_answer_is_read_again_in_idle_time(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "thinks", template=FORGETS, thinking=True)
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        said = [Message("user", "why?"), Message("assistant", "because it is so, " * 9, "hm, " * 40)]
        chat = engine.chat(messages=said)
        asked = finish(engine.generate(said[:1], Sampling(temperature=0, max_tokens=80)))
        cold = chat.price(Send("and then?")).tokens
        assert asked.metrics.generated_tokens == 80
        chat._reread()
        until(lambda: chat.price(Send("and then?")).tokens < 40)
        assert cold > 150


def test_a_reply_that_thought_leaves_the_next_turn_little_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "thinks", template=FORGETS, thinking=True)
    reread: list[Chat] = []
    monkeypatch.setattr(Chat, "_reread", lambda chat: reread.append(chat))
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        chat = engine.chat()
        finish(chat.send("why?", Sampling(temperature=0, max_tokens=20)))
        assert bool(chat.messages[-1].thinking) == bool(reread)
        assert chat.messages[-1].thinking  # its template opens it, and a seeded model never ends it


@pytest.mark.usefixtures("all_worth_storing")
def test_what_is_stored_can_be_checked(tiny: Path, tmp_path: Path) -> None:
    spec = PromptCacheSpec(folder=tmp_path / "cache")
    prompts = [[(5 * number + seed) % 260 for number in range(300 + 50 * seed)] for seed in (0, 1, 2)]
    with Engine.load(tiny, prompt_cache=spec) as engine:
        assert list(engine.check_cache()) == []
        for prompt in prompts:
            list(engine.generate(prompt, SHORT))
            until(lambda: engine._worker.call(engine._runner._store.idle) is None)
        checks = list(engine.check_cache())
        assert engine.cache_trouble() is None
    assert [check.tokens // 50 * 50 for check in checks] == [400, 350, 300]  # and the reply
    assert max(check.difference for check in checks) < 1e-4
    assert all(check.top_same for check in checks)
    assert len(Folder(tmp_path / "cache").models()) == 1


def test_a_cache_that_is_off_has_nothing_to_check(tiny: Path) -> None:
    with Engine.load(tiny, prompt_cache=None) as engine:
        assert list(engine.check_cache()) == []
        engine.warm_ahead([Message("user", "x")])
        assert engine.price([1, 2, 3]).tokens == 3


def test_where_nothing_can_be_cut_chats_still_share_their_system_prompt(tiny: Path) -> None:
    """With a window every cache is a ring: what can be gone back to is what was marked."""
    system = "You are a helpful assistant who answers in one short sentence. " * 2
    with Engine.load(tiny, kv=KVSpec(window=64), prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first = engine.chat(system)
        list(first.send("one", SHORT))
        list(first.send("two", SHORT))
        second = finish(engine.chat(system).send("else", SHORT)).metrics
        edit = first.price(Edit(2, "another"))
    assert second.cached_tokens > len(system)
    assert edit.tokens < 20

"""A full context: it rolls, the reply stops, the middle goes, or it is an error; and what is left out is said."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine import (
    ContextError,
    Engine,
    Event,
    Finished,
    KVSpec,
    Message,
    OptionError,
    Sampling,
    TextChunk,
    Truncated,
)
from tokamac.engine.loading import rolling
from tokamac.engine.options import OnFull
from tokamac.engine.text.prompt import MARK, Words, fit_ids, fit_messages, room_for_prompt

CONTEXT = 512  # the tiny model's
LONG = Sampling(temperature=0, max_tokens=CONTEXT + 100)


def load(tiny: Path, on_full: OnFull, **kv: int) -> Engine:
    engine = Engine.load(tiny, kv=KVSpec(on_full=on_full, **kv))  # type: ignore[arg-type]
    engine.tokenizer.eos_ids = frozenset()
    return engine


def ids(count: int) -> list[int]:
    return np.random.default_rng(5).integers(7, 262, count).tolist()


def finished(events: Sequence[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


def test_stop_ends_the_reply_where_the_context_ends(tiny: Path) -> None:
    with load(tiny, "stop") as engine:
        last = finished(list(engine.generate(ids(500), LONG)))
        assert (last.reason, last.metrics.generated_tokens) == ("length", 12)
        with pytest.raises(ContextError, match=r"600 tokens.*512"):
            list(engine.generate(ids(600), LONG))


def test_a_window_that_stops_bounds_the_context(tiny: Path) -> None:
    with load(tiny, "stop", window=64) as engine:
        assert (engine.spec.capacity, engine.spec.rolls) == (64, False)
        assert finished(list(engine.generate(ids(60), LONG))).metrics.generated_tokens == 4
        with pytest.raises(ContextError, match="KV window holds 64"):
            list(engine.generate(ids(64), LONG))


def test_roll_goes_on_past_the_context_and_takes_longer_prompts(tiny: Path) -> None:
    with load(tiny, "roll") as engine:
        assert (engine.spec.capacity, engine.spec.rolls) == (CONTEXT, True)
        last = finished(list(engine.generate(ids(600), LONG)))
        assert (last.reason, last.metrics.generated_tokens) == ("length", CONTEXT + 100)


def test_roll_equals_the_window_that_it_stands_for(tiny: Path) -> None:
    texts = []
    for kv in (KVSpec(on_full="roll"), KVSpec(window=CONTEXT)):
        with Engine.load(tiny, kv=kv) as engine:
            texts.append(finished(list(engine.generate(ids(700), Sampling(temperature=0, max_tokens=20)))).text)
    assert texts[0] == texts[1]


def test_a_window_longer_than_the_model_was_made_for_is_noted(tiny: Path) -> None:
    said = f"a KV window of {2 * CONTEXT:,} tokens is more than the {CONTEXT} that the model was made for"
    for window, noted in ((2 * CONTEXT, True), (CONTEXT, False)):
        with Engine.load(tiny, kv=KVSpec(window=window)) as engine:
            assert (said in engine.spec.notes) is noted


def test_rolling_needs_to_know_the_context() -> None:
    assert rolling(KVSpec(on_full="roll"), 99).window == 99
    assert rolling(KVSpec(on_full="roll", window=7), 99).window == 7
    assert rolling(KVSpec(), None).window is None
    with pytest.raises(OptionError, match="how long its context"):
        rolling(KVSpec(on_full="roll"), None)


def test_error_fails_after_the_text_and_only_where_the_context_cut_it_off(tiny: Path) -> None:
    with load(tiny, "error") as engine:
        events: list[Event] = []
        with pytest.raises(ContextError, match="512 tokens is full"):
            events.extend(engine.generate(ids(500), LONG))
        chat = engine.chat()
        got: list[Event] = []
        with pytest.raises(ContextError):
            got.extend(chat.send("x" * 480, LONG))
        assert isinstance(got[-1], Finished)
        assert chat.messages[-1] == Message("assistant", "".join(e.text for e in got if isinstance(e, TextChunk)))
        short = finished(list(engine.generate(ids(500), Sampling(temperature=0, max_tokens=5))))
        assert (short.reason, short.metrics.generated_tokens) == ("length", 5)


def test_the_middle_of_a_conversation_goes_and_that_is_said(tiny: Path) -> None:
    turns = [Message(role, f"{role} {n} " + "y" * 60) for n in range(6) for role in ("user", "assistant")]
    prompt = [Message("system", "be kind"), *turns, Message("user", "and now?")]  # type: ignore[arg-type]
    with load(tiny, "truncate-middle") as engine:
        events = list(engine.generate(prompt, Sampling(temperature=0, max_tokens=20)))
        said, last = events[0], finished(events)
        assert isinstance(said, Truncated)
        assert said.messages % 2 == 0
        whole = len(engine.tokenizer.encode(engine.tokenizer.render(prompt)))
        assert last.metrics.prompt_tokens == whole - said.tokens <= CONTEXT - 20
        again = finished(list(engine.generate(prompt, Sampling(temperature=0, max_tokens=20))))
        assert again.metrics.cached_tokens == last.metrics.prompt_tokens - 1  # cut in the same place
        short = [Message("user", "hi")]
        assert not any(isinstance(event, Truncated) for event in engine.generate(short, Sampling(max_tokens=3)))


def test_token_ids_lose_their_middle_too(tiny: Path) -> None:
    with load(tiny, "truncate-middle") as engine:
        events = list(engine.generate(ids(900), Sampling(temperature=0, max_tokens=12)))
        assert events[0] == Truncated(0, 900 - (CONTEXT - 12))
        assert finished(events).metrics.prompt_tokens == CONTEXT - 12


def words() -> Words:
    """A tokenizer of one character a token, and a template of two marks a message."""
    return Words(
        render=lambda messages: [ord(c) for m in messages for c in f"<{m.content}>"],
        encode=lambda text: [ord(c) for c in text],
        decode=lambda tokens: "".join(map(chr, tokens)),
    )


def render(messages: Sequence[Message], capacity: int, room: int) -> tuple[str, Truncated | None]:
    fitted, left_out = fit_messages(messages, words(), capacity, room)
    return "".join(map(chr, fitted)), left_out


def conversation(*contents: str) -> list[Message]:
    return [Message("system", contents[0])] + [
        Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(contents[1:])
    ]


def test_exchanges_after_the_first_go_oldest_first() -> None:
    messages = conversation("sys", "q1", "a1", "q2" * 9, "a2", "q3", "a3", "q4")
    # 42 tokens of text and marks; a quarter of 40 is 10, and the second exchange has 20
    text, left_out = render(messages, 40, 36)
    assert text == "<sys><q1><a1><q3><a3><q4>"
    assert left_out == Truncated(2, 24)


def test_the_first_exchange_goes_last_and_then_the_newest_message_loses_its_middle() -> None:
    messages = conversation("sys", "q1" * 30, "a1", "q2", "a2", "begin" + "." * 90 + "end")
    text, left_out = render(messages, 60, 40)
    assert text.startswith("<sys><begin")
    assert MARK in text
    assert text.endswith("end>")
    assert len(text) <= 40
    assert left_out is not None
    assert left_out.messages == 4


def test_what_can_not_be_cut_is_refused() -> None:
    with pytest.raises(ContextError, match="does not fit"):
        render(conversation("s" * 100, "hello there, you"), 60, 40)


@given(
    st.lists(st.text("ab ", min_size=1, max_size=30), min_size=2, max_size=12),
    st.integers(45, 120),
    st.one_of(st.none(), st.integers(1, 200)),
)
def test_whatever_fits_ends_as_it_began(contents: list[str], capacity: int, max_tokens: int | None) -> None:
    messages = conversation("s", *contents)[: len(contents) // 2 * 2]  # ends with a user's message
    room = room_for_prompt(capacity, max_tokens)
    assert capacity // 2 <= room < capacity
    text, left_out = render(messages, capacity, room)
    whole = "".join(f"<{m.content}>" for m in messages)
    assert len(text) <= room
    assert text.startswith("<s><")
    assert (left_out is None) == (text == whole)
    if left_out is not None:
        assert left_out.tokens == len(whole) - len(text)


@given(st.integers(1, 60), st.integers(1, 60))
def test_ids_keep_both_ends(count: int, room: int) -> None:
    kept, left_out = fit_ids(list(range(count)), room)
    assert len(kept) == min(count, room)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert (left_out is None) == (count <= room)
    assert room == 1 or kept[-1] == count - 1

"""Which messages a chat keeps: a reply belongs to the question it was asked for, and replaces nothing before it is there."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.deadline import DEADLINE_S, within
from tests.engine.seeded import write_model
from tokamac.engine import (
    Chat,
    ContextError,
    Continue,
    Edit,
    Engine,
    EngineClosedError,
    Finished,
    KVSpec,
    Message,
    OptionError,
    Regenerate,
    Sampling,
    Send,
    TextChunk,
)

GREEDY = Sampling(temperature=0, max_tokens=8)
OTHER = Sampling(temperature=3, seed=5, max_tokens=8)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        loaded.tokenizer.eos_ids = frozenset()
        yield loaded


@pytest.fixture
def talked(engine: Engine) -> Chat:
    """A chat of one question and its reply."""
    chat = engine.chat()
    list(chat.send("one", GREEDY))
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    return chat


def contents(chat: Chat) -> list[str]:
    return [message.content for message in chat.messages]


def test_an_edit_before_the_first_step_leaves_the_reply_out(engine: Engine) -> None:
    chat = engine.chat()
    events = chat.send("one", GREEDY)
    chat.edit(0, "two")
    assert isinstance(list(events)[-1], Finished)
    assert chat.messages == (Message("user", "two"),)


def test_an_edit_to_the_same_text_is_another_question_too(engine: Engine) -> None:
    chat = engine.chat()
    events = chat.send("one", GREEDY)
    chat.edit(0, "one")
    list(events)
    assert contents(chat) == ["one"]


def test_of_two_sends_the_later_one_is_answered(engine: Engine) -> None:
    chat = engine.chat()
    first, second = chat.send("one", GREEDY), chat.send("two", GREEDY)
    list(first)
    assert contents(chat) == ["two"]
    list(second)
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[0].content == "two"


def test_of_threads_that_send_on_one_chat_one_is_answered_and_the_others_are_told(engine: Engine) -> None:
    chat, at_once = engine.chat(), threading.Barrier(3)
    answered: list[str] = []
    refused: list[OptionError] = []

    def send(text: str) -> None:
        at_once.wait(DEADLINE_S)
        while text not in answered:
            try:
                events = chat.send(text, GREEDY)
            except OptionError as error:
                refused.append(error)
                time.sleep(0.001)
                continue
            assert isinstance(list(events)[-1], Finished)
            answered.append(text)

    threads = [threading.Thread(target=send, args=(text,), daemon=True) for text in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    # Nothing is lost: whoever was told tried again.
    assert sorted(answered) == ["one", "three", "two"]
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 3
    assert contents(chat)[::2] == answered
    assert all("another thread" in error.message and error.hint for error in refused)


CHANGES: dict[str, Callable[[Chat], object]] = {
    "send": lambda chat: chat.send("two"),
    "regenerate": lambda chat: chat.regenerate(),
    "continue": lambda chat: chat.continue_reply(),
    "edit": lambda chat: chat.edit(0, "two"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("ending", ["read", "close", "let go of", "never begun"])
def test_another_thread_may_change_a_chat_once_its_reply_has_ended(talked: Chat, ending: str, change: Any) -> None:
    events = talked.send("one more", GREEDY)
    if ending != "never begun":
        next(events)
    before = talked.messages
    with pytest.raises(OptionError, match="another thread"):
        within(lambda: change(talked))
    assert talked.messages == before
    assert within(lambda: talked.branch(0)).messages == before[:1]
    if ending == "read":
        list(events)
    elif ending == "close":
        events.close()
    else:
        del events
        gc.collect()
    if change is CHANGES["continue"] and talked.messages[-1].role == "user":
        talked.edit(1, "said")
    assert within(lambda: (change(talked), 1))[1] == 1


def test_of_two_new_replies_the_first_that_ends_is_kept(talked: Chat) -> None:
    first, second = talked.regenerate(OTHER), talked.regenerate(GREEDY)
    said = next(event for event in first if isinstance(event, Finished)).text
    list(first)
    list(second)
    assert contents(talked) == ["one", said]


def test_a_reply_stays_while_no_other_was_said(talked: Chat) -> None:
    before = talked.messages
    talked.regenerate(OTHER)  # never begun
    assert talked.messages == before
    events = talked.regenerate(OTHER)
    next(events)  # progress, no text
    events.close()
    assert talked.messages == before


def test_a_new_reply_that_fails_leaves_the_old_one(talked: Chat) -> None:
    before = talked.messages
    talked.system = "s" * 600  # no context holds it
    with pytest.raises(ContextError):
        list(talked.regenerate(OTHER))
    assert talked.messages == before


def test_a_new_reply_that_says_nothing_leaves_the_old_one(talked: Chat) -> None:
    before = talked.messages
    first = before[1].content[0]
    *_, last = talked.regenerate(Sampling(temperature=0, max_tokens=8, stop=(first,)))
    assert isinstance(last, Finished)
    assert (last.reason, last.text) == ("stop", "")
    assert talked.messages == before


def test_what_was_said_of_a_new_reply_replaces_the_old_one(talked: Chat) -> None:
    said = ""
    events = talked.regenerate(OTHER)
    for event in events:
        if isinstance(event, TextChunk):
            said = event.text
            assert contents(talked)[1] != said  # the old one is there until the new one has ended
            break
    events.close()
    assert contents(talked) == ["one", said]


@pytest.mark.parametrize("text", ["\ud800", "x" * 600])
def test_a_message_that_can_not_be_sent_is_not_kept(talked: Chat, text: str) -> None:
    before = talked.messages
    with pytest.raises((OptionError, ContextError)):
        list(talked.send(text, GREEDY))
    assert talked.messages == before
    assert talked.price(Regenerate()).prompt_tokens > 0


def test_a_message_to_a_closed_engine_is_not_kept(tiny: Path) -> None:
    engine = Engine.load(tiny, prompt_cache=None)
    chat = engine.chat(messages=[Message("user", "never answered")])
    engine.close()
    with pytest.raises(EngineClosedError):
        list(chat.send("one"))
    assert contents(chat) == ["never answered"]


def test_a_message_that_fails_after_an_edit_takes_nothing_back(engine: Engine) -> None:
    chat = engine.chat()
    events = chat.send("x" * 600, GREEDY)
    chat.edit(0, "short")
    with pytest.raises(ContextError):
        list(events)
    assert contents(chat) == ["short"]


def test_a_reply_that_the_context_cut_off_is_kept_though_that_is_an_error(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=64, on_full="error")) as engine:
        engine.tokenizer.eos_ids = frozenset()
        chat = engine.chat()
        with pytest.raises(ContextError, match="cut off"):
            list(chat.send("one", Sampling(temperature=0)))
        assert [message.role for message in chat.messages] == ["user", "assistant"]


def test_going_on_that_is_never_begun_changes_nothing(engine: Engine) -> None:
    chat = engine.chat(messages=[Message("user", "u"), Message("assistant", "a\ufffd")])
    chat.continue_reply(GREEDY)
    assert contents(chat) == ["u", "a\ufffd"]
    list(chat.continue_reply(GREEDY))
    assert contents(chat)[1].startswith("a")
    assert not contents(chat)[1].startswith("a\ufffd\ufffd")
    assert len(contents(chat)) == 2


def test_thinking_is_kept_with_its_reply(tmp_path: Path) -> None:
    opens = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant><think>"
    folder = write_model(tmp_path / "thinks", template=opens, thinking=True)
    with Engine.load(folder, prompt_cache=None) as engine:
        chat = engine.chat()
        list(chat.send("one", GREEDY))
        old = chat.messages[-1]
        assert old.thinking
        list(chat.regenerate(OTHER))
        assert chat.messages[-1].thinking
        assert chat.messages[-1] != old
        assert len(chat.messages) == 2


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_text_is_refused_everywhere(talked: Chat, text: str) -> None:
    before = talked.messages
    for refused in (
        lambda: talked.send(text),
        lambda: talked.edit(0, text),
        lambda: talked.price(Send(text)),
        lambda: talked.price(Edit(0, text)),
    ):
        with pytest.raises(OptionError, match="empty"):
            refused()
    assert talked.messages == before
    talked.warm("")  # what is still to be written may be empty


@pytest.mark.parametrize("text", [None, b"x", 7])
def test_what_is_no_text_is_refused_everywhere(talked: Chat, engine: Engine, text: object) -> None:
    before = talked.messages
    for refused in (
        lambda: talked.send(text),  # type: ignore[arg-type]
        lambda: talked.edit(0, text),  # type: ignore[arg-type]
        lambda: talked.warm(text),  # type: ignore[arg-type]
        lambda: talked.price(Send(text)),  # type: ignore[arg-type]
        lambda: engine.chat(system=[text]),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionError, match="not a text"):
            refused()
    assert talked.messages == before


@pytest.mark.parametrize("action", [None, "send", 0])
def test_what_is_no_action_has_no_price(talked: Chat, action: object) -> None:
    with pytest.raises(OptionError, match="is no action"):
        talked.price(action)  # type: ignore[arg-type]


def test_a_price_asks_what_the_action_would(engine: Engine) -> None:
    with pytest.raises(OptionError, match="only a reply"):
        engine.chat(messages=[Message("user", "u")]).price(Continue())


@pytest.mark.parametrize("index", [2, -1, 0.0, None])
def test_there_is_no_such_message(talked: Chat, index: object) -> None:
    with pytest.raises(OptionError, match="there is no message"):
        talked.edit(index, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, "abc", [{"role": "user", "content": "x"}], ["x"]])
def test_a_conversation_is_messages(engine: Engine, given: object) -> None:
    with pytest.raises(OptionError):
        engine.chat(messages=given)  # type: ignore[arg-type]


def test_sampling_is_checked_before_anything_changes(talked: Chat) -> None:
    before = talked.messages
    for refused in (talked.send, lambda s: talked.send("x", s), talked.regenerate, talked.continue_reply):
        with pytest.raises(OptionError):
            refused({"temperature": 0})
    assert talked.messages == before


def test_a_chat_says_what_it_is(talked: Chat) -> None:
    assert repr(talked).startswith("<Chat of 2 messages with <Engine '")

"""Chats: which messages they keep, two of them in turn, and replies that are continued."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import DEADLINE_S, finish, within, write_model, write_tokenizer
from tests.engine.inside import runtime_of, store_of
from tests.families import crossed
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
    TemplateError,
    TextChunk,
)
from tokamac.engine.events import PartialReply, unfinished
from tokamac.engine.options import PromptCacheSpec
from tokamac.engine.perf import memory
from tokamac.engine.prompt_cache import cache
from tokamac.engine.text.prompt import render_continued as render
from tokamac.engine.text.stream import ReplyText
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer

# Which messages a chat keeps: a reply belongs to the question it was asked for, and replaces nothing before it is
# there.

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


@pytest.mark.parametrize(("name", "ending"), crossed(CHANGES, ["read", "close", "let go of", "never begun"], "read"))
def test_another_thread_may_change_a_chat_once_its_reply_has_ended(talked: Chat, name: str, ending: str) -> None:
    change = CHANGES[name]
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
    if name == "continue" and talked.messages[-1].role == "user":
        talked.edit(1, "said")
    assert within(lambda: (change(talked), 1))[1] == 1


def test_of_two_new_replies_the_first_that_ends_is_kept(talked: Chat) -> None:
    first, second = talked.regenerate(OTHER), talked.regenerate(GREEDY)
    said = next(event for event in first if isinstance(event, Finished)).text
    list(first)
    list(second)
    assert contents(talked) == ["one", said]


def test_a_new_reply_that_fails_leaves_the_old_one(talked: Chat) -> None:
    before = talked.messages
    talked.system = "s" * 600  # no context holds it
    with pytest.raises(ContextError):
        list(talked.regenerate(OTHER))
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


# Two long conversations in turn: both stay computed where memory allows, and the older goes first where it does
# not.

TOKENS = 1000
NEW = 20  # tokens that each turn adds, and as many that it replies with


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers of 4 heads: 16 kB a token, so that a conversation takes more than its share of memory."""
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("two"), max_position_embeddings=4096, **shape)


@pytest.fixture
def _small_share(settled_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt cache's share holds one of the conversations, and not two."""
    monkeypatch.setattr(cache, "LEAST_MEMORY", 24 << 20)
    monkeypatch.setattr(cache, "MEMORY_SHARE", 1 << 20)


class LongChat:
    """A conversation of token ids that goes on."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self.ids = [5 + (i * i + seed * 31) % 250 for i in range(TOKENS)]

    def turn(self) -> int:
        """Go on, and return how many tokens were computed for it."""
        self.ids += [5 + (i * 7 + self._seed) % 250 for i in range(NEW)]
        *_, end = self._engine.generate(self.ids, Sampling(temperature=0, max_tokens=4))
        return end.metrics.prefill_tokens


@pytest.mark.usefixtures("_small_share")
def test_neither_of_two_is_computed_anew_at_a_switch(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        one, other = LongChat(engine, 1), LongChat(engine, 2)
        assert (one.turn(), other.turn()) == (TOKENS + NEW, TOKENS + NEW)
        held = engine.between(lambda: store_of(engine).nbytes)
        assert held > cache.LEAST_MEMORY
        assert [chat.turn() for _ in range(3) for chat in (one, other)] == [NEW] * 6


@pytest.mark.usefixtures("_small_share")
def test_of_three_the_two_that_were_used_last_stay(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first, second, third = (LongChat(engine, seed) for seed in (1, 2, 3))
        for chat in (first, second, third):
            chat.turn()
        assert (second.turn(), third.turn()) == (NEW, NEW)
        assert first.turn() > TOKENS


@pytest.mark.usefixtures("_small_share")
def test_where_memory_has_room_for_one_nothing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        one, other = LongChat(engine, 1), LongChat(engine, 2)
        one.turn()
        active = engine.between(mx.get_active_memory)
        monkeypatch.setattr(memory, "available", lambda: active + (4 << 20))
        assert other.turn() == TOKENS + NEW
        assert one.turn() > TOKENS
        assert one.turn() == NEW


@pytest.mark.usefixtures("_small_share")
def test_a_prompt_has_its_room_and_the_older_conversation_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LEAST_MEMORY", 1 << 30)  # all three would fit the share
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first, second, third = (LongChat(engine, seed) for seed in (1, 2, 3))
        first.turn()
        second.turn()
        third.ids *= 2
        runtime = runtime_of(engine)
        live = engine.between(lambda: store_of(engine).nbytes)
        peak = cache.predict_peak(runtime.shape, held=0, new=2 * TOKENS + NEW, chunk=512, reply=8).total
        others = engine.between(mx.get_active_memory) - runtime.shape.weights - live
        monkeypatch.setattr(memory, "array_budget", lambda: others + peak + live // 2 + (2 << 20))
        assert third.turn() == 2 * TOKENS + NEW
        monkeypatch.setattr(memory, "array_budget", lambda: 1 << 40)
        assert second.turn() == NEW
        assert first.turn() > TOKENS


@pytest.mark.usefixtures("_small_share")
def test_a_size_that_the_user_set_is_kept_to(folder: Path) -> None:
    with Engine.load(folder, prompt_cache=PromptCacheSpec(memory_bytes=24 << 20, disk=False)) as engine:
        one, other = LongChat(engine, 1), LongChat(engine, 2)
        one.turn()
        other.turn()
        assert one.turn() > TOKENS


# A reply that was cut goes on where it ended: the text, the tokens in the cache, thinking, and what can't be
# continued.

QUESTION = "Why is decode memory-bound?"
WHOLE = Sampling(temperature=0, max_tokens=60)
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPENS_THINKING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant><think>"


@pytest.fixture(scope="module")
def guide() -> Iterator[Engine]:
    with Engine.load("guide") as engine:
        yield engine


@pytest.fixture(scope="module")
def uncut(guide: Engine) -> str:
    """The greedy reply, all of it."""
    chat = guide.chat()
    return finish(chat.send(QUESTION, WHOLE)).text


def tokenizer(folder: Path, template: str, *, thinking: bool) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, template=template, thinking=thinking)
    return load_tokenizer(folder, {}, "tiny")


@pytest.mark.parametrize("cut", [1, 2, 7, 20, 29])
def test_a_cut_reply_goes_on_as_if_it_had_not_been_cut(guide: Engine, uncut: str, cut: int) -> None:
    chat = guide.chat()
    begun = finish(chat.send(QUESTION, Sampling(temperature=0, max_tokens=cut)))
    assert begun.reason == "length"
    events = list(chat.continue_reply(Sampling(temperature=0, max_tokens=60 - cut)))
    whole = finish(iter(events))
    assert whole.text == uncut
    new = "".join(event.text for event in events if isinstance(event, TextChunk))
    assert begun.text + new == uncut
    assert chat.messages == (Message("user", QUESTION), Message("assistant", uncut))
    assert whole.metrics.generated_tokens <= 60 - cut


def test_going_on_costs_a_token_or_two_and_its_price_says_so(guide: Engine) -> None:
    chat = guide.chat("Be brief.")
    cut = finish(chat.send("What is a KV cache?", Sampling(temperature=0, max_tokens=16)))
    price = chat.price(Continue())
    went_on = finish(chat.continue_reply(Sampling(temperature=0, max_tokens=4))).metrics
    assert (price.prompt_tokens, price.tokens) == (went_on.prompt_tokens, went_on.prefill_tokens)
    assert went_on.prompt_tokens == cut.metrics.prompt_tokens + 16
    assert went_on.prefill_tokens <= 2


def test_what_is_cancelled_at_once_keeps_what_was_said(guide: Engine) -> None:
    chat = guide.chat()
    begun = finish(chat.send(QUESTION, Sampling(temperature=0, max_tokens=8)))
    events = chat.continue_reply(WHOLE)
    next(events)
    events.close()
    assert chat.messages[-1] == Message("assistant", begun.text)


def test_only_a_reply_that_says_something_can_be_continued(guide: Engine) -> None:
    for messages in ([], [Message("user", "x")], [Message("user", "x"), Message("assistant", "\ufffd")]):
        with pytest.raises(OptionError):
            guide.chat(messages=messages).continue_reply()
    with pytest.raises(OptionError, match="only a reply"):
        list(guide.generate([5, 6, 7], continues=True))


def test_half_a_character_at_the_cut_is_made_anew() -> None:
    assert unfinished([Message("user", "u"), Message("assistant", "a \ufffd\ufffd")]).content == "a "
    assert unfinished([Message("assistant", "", "b\ufffd")]).thinking == "b"
    assert unfinished([Message("assistant", "a", "b\ufffd")]).thinking == "b\ufffd"  # it was not cut there


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="ab \n", min_size=1, max_size=12))
def test_nothing_of_what_was_said_is_trimmed(tmp_path_factory: pytest.TempPathFactory, said: str) -> None:
    one = tokenizer(tmp_path_factory.mktemp("template"), THINKS, thinking=False)
    begun = Message("assistant", said)
    assert render(one, [Message("user", "u")], begun) == f"<user>u<end><assistant>{said}"
    two = tokenizer(tmp_path_factory.mktemp("template"), THINKS, thinking=True)
    assert render(two, [Message("user", "u")], begun).endswith(f"<assistant>{said}")
    answer = said.lstrip("\n")  # as an answer after thinking begins
    if answer.strip():
        thought = render(two, [Message("user", "u")], Message("assistant", answer, "hm\n"))
        assert thought == f"<user>u<end><assistant><think>\nhm\n</think>\n\n{answer}"


def test_thinking_that_was_cut_goes_on_as_thinking(tmp_path: Path) -> None:
    thinks = tokenizer(tmp_path, THINKS, thinking=True)
    begun = Message("assistant", "", "let me see ")
    text = render(thinks, [Message("user", "u")], begun)
    assert text == "<user>u<end><assistant><think>\nlet me see "
    reply = ReplyText(thinks, in_thinking=True, partial=PartialReply(begun, tuple(thinks.encode(text))))
    chunks = [c for token in thinks.encode("again</think>\n\nyes") for c in reply.add(token)]
    assert "".join(c.text for c in chunks if c.kind == "thinking") == "again"
    assert (reply.thinking, reply.answer) == ("let me see again", "yes")


def test_a_template_that_drops_thinking_is_helped_with_the_marks(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    thinks = tokenizer(tmp_path, plain, thinking=True)
    before = [Message("user", "u")]
    assert render(thinks, before, Message("assistant", "yes", "hm")).endswith("<assistant><think>hm</think>yes")
    assert render(thinks, before, Message("assistant", "", "hm")).endswith("<assistant><think>hm")


def test_a_turn_that_opens_with_thinking_is_left_for_an_answer_without(tmp_path: Path) -> None:
    opens = tokenizer(tmp_path, OPENS_THINKING, thinking=True)
    before = [Message("user", "u")]
    assert render(opens, before, Message("assistant", "yes")).endswith("<assistant><think></think>\n\nyes")
    assert render(opens, before, Message("assistant", "yes", "hm")).endswith("<assistant><think>hm</think>yes")


def test_a_model_that_does_not_think_goes_on_with_an_answer_but_not_with_thinking(tmp_path: Path) -> None:
    marks_nothing = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    plain = tokenizer(tmp_path, marks_nothing, thinking=False)
    assert render(plain, [Message("user", "u")], Message("assistant", "yes", "hm")).endswith("<assistant>yes")
    with pytest.raises(TemplateError, match="was thinking"):
        render(plain, [Message("user", "u")], Message("assistant", "", "hm"))


def test_blank_lines_that_go_on_an_answer_are_shown(tmp_path: Path) -> None:
    thinks = tokenizer(tmp_path, THINKS, thinking=True)
    begun = PartialReply(Message("assistant", "one"), tuple(thinks.encode("one")))
    reply = ReplyText(thinks, partial=begun)
    assert [c.text for token in thinks.encode("\n\ntwo") for c in reply.add(token)] == ["\n", "\n", "t", "w", "o"]
    assert reply.answer == "one\n\ntwo"


def test_what_does_not_fit_is_left_out_before_the_reply_that_goes_on(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "short", max_position_embeddings=128)
    asked = [Message("user", "first"), Message("assistant", "x" * 60), Message("user", "second")]
    with Engine.load(folder, kv=KVSpec(on_full="truncate-middle"), prompt_cache=None) as engine:
        end = finish(
            engine.generate(
                [*asked, Message("assistant", "y" * 50)], Sampling(temperature=0, max_tokens=4), continues=True
            )
        )
    assert end.text.startswith("y" * 50)
    assert end.metrics.prompt_tokens + end.metrics.generated_tokens <= 128

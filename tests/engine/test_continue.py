"""A reply that was cut goes on where it ended: the text, the tokens in the cache, thinking, and what can't be continued."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.seeded import write_model, write_tokenizer
from tokamac.engine import Continue, Engine, Finished, KVSpec, Message, OptionError, Sampling, TemplateError, TextChunk
from tokamac.engine.text.continuation import PartialReply, render, unfinished
from tokamac.engine.text.stream import ReplyText
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer

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


def finish(events: Iterator[object]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


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
    plain = tokenizer(tmp_path, THINKS, thinking=False)
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

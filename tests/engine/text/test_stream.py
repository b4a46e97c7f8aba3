"""What the reader sees: whole characters, no stop text, thinking apart; and a reply's tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.helpers import TEMPLATE, write_tokenizer
from tokamac.engine import (
    Engine,
    Event,
    Finished,
    Message,
    ModelDamagedError,
    OptionError,
    Sampling,
    TemplateError,
    TextChunk,
    TokenLogprob,
)
from tokamac.engine.text.stream import ReplyText, first_of
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer

CONFIG = {"eos_token_id": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, thinking=True)
    return load_tokenizer(folder, CONFIG, "tiny")


def shown(reply: ReplyText, ids: list[int]) -> list[tuple[str, str]]:
    chunks = [chunk for token in ids for chunk in reply.add(token)]
    chunks += reply.finish()
    return [(chunk.kind, chunk.text) for chunk in chunks]


def joined(chunks: list[tuple[str, str]], kind: str) -> str:
    return "".join(text for k, text in chunks if k == kind)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_text_arrives_in_whole_characters_and_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace("<", "").replace("\n", " "))
    expected = tokenizer.decode(ids)
    pieces = [piece for _, piece in shown(ReplyText(tokenizer), ids)]
    assert "".join(pieces) == expected
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in expected


def test_bytes_that_never_become_a_character_are_shown_as_replacements_and_block_nothing(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("é")[0]
    ids = [first_byte] * 6 + tokenizer.encode("after")
    text = joined(shown(ReplyText(tokenizer), ids), "answer")
    assert text.endswith("after")
    assert text.startswith("\ufffd")


@given(st.text(alphabet="abS", max_size=12), st.text(alphabet="abTO", max_size=12))
def test_a_stop_text_and_what_follows_is_never_shown(tokenizer: Tokenizer, before: str, after: str) -> None:
    reply = ReplyText(tokenizer, ("STOP",))
    text = joined(shown(reply, tokenizer.encode(before + "STOP" + after)), "answer")
    assert text == before
    assert reply.stopped


@given(st.text(alphabet="ST", max_size=12))
def test_what_only_begins_like_a_stop_text_is_shown_in_the_end(tokenizer: Tokenizer, text: str) -> None:
    reply = ReplyText(tokenizer, ("STOP",))
    assert joined(shown(reply, tokenizer.encode(text)), "answer") == text
    assert not reply.stopped


def test_the_stop_text_that_comes_first_ends_the_reply(tokenizer: Tokenizer) -> None:
    reply = ReplyText(tokenizer, ("END", "EN"))
    assert joined(shown(reply, tokenizer.encode("a EN END")), "answer") == "a "


def test_the_longer_of_two_markers_at_one_place_wins() -> None:
    assert first_of("xab", ("a", "ab")) == (1, "ab")
    assert first_of("x", ("a",)) is None


def test_thinking_is_told_apart_from_the_answer(tokenizer: Tokenizer) -> None:
    reply = ReplyText(tokenizer)
    chunks = shown(reply, tokenizer.encode("<think>\nhm, é\n</think>\n\nthe answer"))
    assert joined(chunks, "thinking") == "hm, é\n" == reply.thinking
    assert joined(chunks, "answer") == "the answer" == reply.answer


def test_a_reply_may_begin_inside_thinking_that_the_template_opened(tokenizer: Tokenizer) -> None:
    assert tokenizer.opens_thinking("<assistant><think>\n")
    assert not tokenizer.opens_thinking("<assistant><think>\n\n</think>\n\n")
    chunks = shown(ReplyText(tokenizer, in_thinking=True), tokenizer.encode("hm</think>yes"))
    assert (joined(chunks, "thinking"), joined(chunks, "answer")) == ("hm", "yes")


def test_thinking_that_never_ends_stays_thinking_and_stop_texts_do_not_apply_to_it(tokenizer: Tokenizer) -> None:
    reply = ReplyText(tokenizer, ("STOP",))
    chunks = shown(reply, tokenizer.encode("<think>a STOP b"))
    assert joined(chunks, "thinking") == "a STOP b"
    assert not reply.stopped


def test_a_later_mark_is_text_about_thinking(tokenizer: Tokenizer) -> None:
    chunks = shown(ReplyText(tokenizer), tokenizer.encode("write <think> to think"))
    assert joined(chunks, "answer") == "write <think> to think"


@pytest.mark.parametrize("padding", [" ", "\n ", "  \n"])
def test_white_space_before_the_opening_mark_is_no_answer(tokenizer: Tokenizer, padding: str) -> None:
    reply = ReplyText(tokenizer)
    chunks = shown(reply, tokenizer.encode(f"{padding}<think>hm</think>yes"))
    assert (joined(chunks, "thinking"), joined(chunks, "answer")) == ("hm", "yes")
    assert (reply.thinking, reply.answer) == ("hm", "yes")


def test_white_space_that_no_thinking_follows_is_the_answers(tokenizer: Tokenizer) -> None:
    assert joined(shown(ReplyText(tokenizer), tokenizer.encode("  code")), "answer") == "  code"
    assert joined(shown(ReplyText(tokenizer), tokenizer.encode("  ")), "answer") == "  "


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>")
    write_tokenizer(folder, marks=marks)
    return load_tokenizer(folder, CONFIG, "harmony")


@pytest.mark.parametrize(
    ("reply", "thinking", "answer"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes", "hm", "yes"),
        ("<|channel|>final<|message|>yes", "", "yes"),
        ("<|channel|>commentary<|message|>I look first.", "", "I look first."),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Then.",
            "hm",
            "First.\n\nThen.",
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c<|return|>",
            "ab",
            "c",
        ),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assis", "hm", ""),
        ("plain", "", "plain"),
    ],
)
def test_harmonys_channels_are_never_shown(harmony: Tokenizer, reply: str, thinking: str, answer: str) -> None:
    text = ReplyText(harmony)
    chunks = shown(text, harmony.encode(reply))
    assert (joined(chunks, "thinking"), joined(chunks, "answer")) == (thinking, answer)
    assert (text.thinking, text.answer) == (thinking, answer)


@pytest.mark.parametrize(("stop", "answer"), [("<pad>", "a b"), ("b<pad>", "a "), ("b", "a ")])
def test_a_stop_text_may_be_or_end_with_a_hidden_mark(tokenizer: Tokenizer, stop: str, answer: str) -> None:
    reply = ReplyText(tokenizer, (stop,))
    assert joined(shown(reply, tokenizer.encode("a b<pad>c")), "answer") == answer
    assert reply.stopped
    other = ReplyText(tokenizer, (stop,))
    assert joined(shown(other, tokenizer.encode("a<end>c")), "answer") == "ac"
    assert not other.stopped


@pytest.mark.parametrize("folder_says", [0, [0]])
def test_a_token_whose_id_is_0_may_end_a_reply(tmp_path: Path, folder_says: object) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": folder_says}))
    assert load_tokenizer(tmp_path, {"eos_token_id": 3}, "tiny").eos_ids == {0, 1, 3}  # the tokenizer's own is 1


def test_the_template_names_the_marks_of_thinking_and_of_the_end(tmp_path: Path) -> None:
    thought = "{% if m.reasoning_content %}<thought>{{ m.reasoning_content }}</thought>{% endif %}"
    write_tokenizer(
        tmp_path,
        template=f"{{% for m in messages %}}{thought}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}",
        marks=("<|im_end|>",),
    )
    model = load_tokenizer(tmp_path, CONFIG, "tiny")
    assert model.thinking == ("<thought>", "</thought>")
    assert model.eos_ids == {1, *model.encode("<|im_end|>")}
    assert model.end_texts == ()


def test_the_template_names_an_end_of_several_tokens(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<|im_end|><next>\n{% endfor %}"
    write_tokenizer(tmp_path, template=turns)
    model = load_tokenizer(tmp_path, CONFIG, "tiny")
    assert (model.eos_ids, model.end_texts) == ({1}, ("<|im_end|>",))
    reply = ReplyText(model)
    assert joined(shown(reply, model.encode("Hello.<|im_end|><next>\n<user>")), "answer") == "Hello."
    assert (reply.stopped, reply.stopped_by) == (True, None)


def folder_with(tmp_path: Path, template: str | None) -> Tokenizer:
    write_tokenizer(tmp_path, template=template)
    return load_tokenizer(tmp_path, CONFIG, "tiny")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ nothing.at.all() }}", "{% if %}"]
)
def test_a_template_that_fails_is_one_clear_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(TemplateError, match="tiny failed"):
        folder_with(tmp_path, template).render([Message("user", "hi")])


def test_a_template_that_computes_powers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="powers"):
        folder_with(tmp_path, "{{ (messages | length + 2) ** 25000000 % 7 }}").render([Message("user", "hi")])


def test_a_template_that_renders_control_characters_into_its_error_is_made_safe(tmp_path: Path) -> None:
    with pytest.raises(TemplateError) as caught:
        folder_with(tmp_path, "{{ raise_exception('\x1b]0;no\x07') }}").render([Message("user", "hi")])
    assert str(caught.value).isprintable()


def test_a_stray_byte_does_not_take_the_next_character_with_it(tokenizer: Tokenizer) -> None:
    stray = tokenizer.encode("é")[1]
    text = joined(shown(ReplyText(tokenizer), [stray, *tokenizer.encode("🎉")]), "answer")
    assert text == "\ufffd🎉"


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="Unicode"):
        tokenizer.encode("a\udcff")


def test_a_model_without_a_template_can_not_chat(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        folder_with(tmp_path, None).render([Message("user", "hi")])


def test_a_template_that_refuses_the_system_role_gets_it_in_the_users_turn(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    rendered = folder_with(tmp_path, refusing).render([Message("system", "be brief"), Message("user", "hi")])
    assert rendered == "<user>be brief\n\nhi<end><assistant>"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, True),
        ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{{ raise_exception('never') }}", False),
        ("{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
         "{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}"
         "{% endfor %}", False),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
         "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}", False),
    ],
    ids=["written", "refused", "left out", "broken", "in place of the first", "all at the beginning"],
)  # fmt: skip
def test_whether_a_template_takes_a_later_system_message_is_tried(tmp_path: Path, template: str, takes: bool) -> None:
    assert folder_with(tmp_path, template).takes_later_system() is takes


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDamagedError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path, CONFIG, "tiny")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ModelDamagedError, match="can't be read"):
        load_tokenizer(tmp_path, CONFIG, "tiny")


# What a reply says of its tokens: their ids, their log-probabilities, and what ended it.

PROMPT = np.random.default_rng(3).integers(7, 262, 30).tolist()


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


def replied(engine: Engine, sampling: Sampling) -> tuple[list[int], list[TokenLogprob], Finished]:
    """The tokens of all events in order, and the last event."""
    ids: list[int] = []
    scores: list[TokenLogprob] = []
    event: Event | None = None
    for event in engine.generate(PROMPT, sampling):
        if isinstance(event, TextChunk | Finished):
            ids += event.ids
            scores += event.logprobs
    assert isinstance(event, Finished)
    return ids, scores, event


def test_events_hold_every_token_in_order(engine: Engine) -> None:
    ids, scores, end = replied(engine, Sampling(seed=4, temperature=1.5, max_tokens=50))
    assert len(ids) == end.metrics.generated_tokens == 50
    assert engine.tokenizer.decode(ids) == end.text
    assert scores == []


@pytest.mark.parametrize("text", ["aé", "中b🎉c", "é\ufffd"])
def test_a_chunk_comes_of_the_tokens_that_made_its_characters(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, {"eos_token_id": 1}, "tiny")
    reply = ReplyText(tokenizer)
    chunks = [chunk for token in tokenizer.encode(text) for chunk in reply.add(token)]
    chunks += reply.finish()
    assert [tokenizer.decode(chunk.ids) for chunk in chunks] == [chunk.text for chunk in chunks]
    assert reply.take_tokens() == ((), ())


def test_log_probabilities_are_those_that_the_engine_gives_a_text(engine: Engine) -> None:
    asked = Sampling(seed=4, temperature=1.5, top_k=30, presence_penalty=1, max_tokens=25, logprobs=3)
    ids, scores, _ = replied(engine, asked)
    assert [score.id for score in scores] == ids
    rows = np.asarray(engine.logprobs([*PROMPT, *ids]))[len(PROMPT) - 1 : -1]
    assert [score.logprob for score in scores] == pytest.approx(
        [row[token] for row, token in zip(rows, ids, strict=True)], abs=1e-4
    )
    for score, row in zip(scores, rows, strict=True):
        assert [each.logprob for each in score.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
        assert all(each.text == engine.tokenizer.token_text(each.id) for each in (score, *score.top))


def test_a_stop_token_ends_the_reply_and_is_not_shown(engine: Engine) -> None:
    greedy, _, _ = replied(engine, Sampling(temperature=0, max_tokens=40))
    stop = greedy[12]
    first = greedy.index(stop)
    ids, _, end = replied(engine, Sampling(temperature=0, max_tokens=40, stop_token_ids=(stop,)))
    assert ids == greedy[: first + 1]
    assert (end.reason, end.stopped_by, end.ids[-1]) == ("stop", stop, stop)
    assert end.text == engine.tokenizer.decode(greedy[:first])
    later, _, end = replied(
        engine, Sampling(temperature=0, max_tokens=40, stop_token_ids=(stop,), min_tokens=first + 5)
    )
    assert len(later) >= first + 6 or end.reason == "length"
    assert stop not in later[: first + 5]


def test_the_stop_text_that_was_met_is_named(engine: Engine) -> None:
    _, _, whole = replied(engine, Sampling(temperature=0, max_tokens=40))
    stop = whole.text[10:12]
    ids, _, end = replied(engine, Sampling(temperature=0, max_tokens=40, stop=("never there", stop)))
    assert (end.reason, end.stopped_by) == ("stop", stop)
    assert whole.text.startswith(end.text)
    assert len(ids) == end.metrics.generated_tokens
    assert (whole.reason, whole.stopped_by) == ("length", None)


def test_the_least_number_of_tokens_holds_stop_texts_off(engine: Engine) -> None:
    _, _, whole = replied(engine, Sampling(temperature=0, max_tokens=40))
    stop = whole.text[3:5]
    ids, _, end = replied(engine, Sampling(temperature=0, max_tokens=40, min_tokens=20, stop=(stop,)))
    assert len(ids) > 20
    assert whole.text.startswith(end.text)
    assert stop in end.text


def test_the_models_own_end_is_named(engine: Engine) -> None:
    (end_id,) = engine.tokenizer.eos_ids
    ids, _, end = replied(engine, Sampling(temperature=0, max_tokens=40, logit_bias={end_id: 100}))
    assert (ids, end.reason, end.stopped_by, end.text) == ([end_id], "stop", end_id, "")
    ids, _, _ = replied(engine, Sampling(temperature=0, max_tokens=8, min_tokens=8, logit_bias={end_id: 100}))
    assert len(ids) == 8
    assert end_id not in ids


@pytest.mark.parametrize("asked", [Sampling(stop_token_ids=(272,)), Sampling(logit_bias={100_000: 1})])
def test_a_token_that_there_is_not_is_refused(engine: Engine, asked: Sampling) -> None:
    with pytest.raises(OptionError, match="not in the vocabulary of 272"):
        engine.ask("Hello", asked)


def test_dry_breakers_come_of_the_models_tokens(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    found = tokenizer.breakers(("\n", "ab"))
    newline, a, b = (tokenizer.encode(text)[0] for text in ("\n", "a", "b"))
    assert {newline, *tokenizer.eos_ids} <= found.single
    assert found.sequences == ((frozenset({a}), (b,)),)


def test_messages_and_every_option_at_once(engine: Engine) -> None:
    everything = Sampling(
        temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, repetition_penalty=1.1, seed=3, max_tokens=30, stop=("zz",),
        stop_token_ids=(2,), min_tokens=5, logit_bias={9: -5}, presence_penalty=0.4, frequency_penalty=0.2,
        xtc_probability=0.5, xtc_threshold=0.05, dry_multiplier=0.8, logprobs=2,
        order=("top_k", "temperature", "penalties", "dry", "top_p", "min_p", "xtc"),
    )  # fmt: skip
    first, second = (list(engine.generate([Message("user", "Hello")], everything))[-1] for _ in range(2))
    assert first.text == second.text

"""What a reply says of its tokens: their ids, their log-probabilities, and what ended it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.seeded import write_tokenizer
from tokamac.engine import Engine, Event, Finished, Message, OptionError, Sampling, TextChunk, TokenLogprob
from tokamac.engine.text.stream import ReplyText, TokenSources
from tokamac.engine.text.tokenizer import load_tokenizer

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
    ids, scores, end = replied(engine, Sampling(seed=4, temperature=1.5, max_tokens=60))
    assert len(ids) == end.metrics.generated_tokens == 60
    assert engine.tokenizer.decode(ids) == end.text
    assert scores == []


@pytest.mark.parametrize("text", ["aé", "中b🎉c", "é\ufffd"])
def test_a_chunk_comes_of_the_tokens_that_made_its_characters(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, {"eos_token_id": 1}, "tiny")
    reply, came_from = ReplyText(tokenizer), TokenSources(tokenizer)
    chunks = []
    for token in tokenizer.encode(text):
        came_from.add(token)
        chunks += came_from.mark(reply.add(token))
    chunks += came_from.mark(reply.finish())
    assert [tokenizer.decode(chunk.ids) for chunk in chunks] == [chunk.text for chunk in chunks]
    assert came_from.take() == ((), ())


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


def test_they_change_no_token(engine: Engine) -> None:
    plain, _, _ = replied(engine, Sampling(seed=5, temperature=1.2, max_tokens=40))
    scored, scores, _ = replied(engine, Sampling(seed=5, temperature=1.2, max_tokens=40, logprobs=0))
    assert scored == plain
    assert len(scores) == 40
    assert all(score.top == () for score in scores)


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


def test_dry_keeps_a_model_from_repeating_itself(engine: Engine) -> None:
    asked = Sampling(temperature=0, max_tokens=120)
    looped, _, _ = replied(engine, asked)
    dry, _, _ = replied(engine, Sampling(temperature=0, max_tokens=120, dry_multiplier=5.0, dry_sequence_breakers=()))
    assert longest_repeat(looped) > 3
    assert longest_repeat(dry) <= 3  # two tokens may come again, and a third with a penalty of 5


def longest_repeat(ids: list[int]) -> int:
    """The longest sequence of tokens that occurs twice."""
    sizes = range(1, len(ids))
    return max(
        (n for n in sizes if len({tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)}) < len(ids) - n + 1),
        default=0,
    )


def test_messages_and_every_option_at_once(engine: Engine) -> None:
    everything = Sampling(
        temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, repetition_penalty=1.1, seed=3, max_tokens=30, stop=("zz",),
        stop_token_ids=(2,), min_tokens=5, logit_bias={9: -5}, presence_penalty=0.4, frequency_penalty=0.2,
        xtc_probability=0.5, xtc_threshold=0.05, dry_multiplier=0.8, logprobs=2,
        order=("top_k", "temperature", "penalties", "dry", "top_p", "min_p", "xtc"),
    )  # fmt: skip
    first, second = (list(engine.generate([Message("user", "Hello")], everything))[-1] for _ in range(2))
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.text == second.text

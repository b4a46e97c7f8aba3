"""Near misses of the guide: which questions are named beside a refusal, and that the guide never reads them."""

import pytest

from tests.guide.dataset import read_corpus
from tokamac.app.commands import ask
from tokamac.app.guide import OFFER, REFUSAL, near_questions, offer, stems, with_offers, without_offers
from tokamac.engine.events import Event, Finished, Message, TextChunk
from tokamac.engine.metrics import Metrics

DECLINED = f"{REFUSAL} Tokamac."


def finished(text: str, reason: str = "stop") -> Finished:
    return Finished(reason, text, Metrics(*[None] * 17))  # type: ignore[arg-type]


def test_a_word_is_known_whatever_its_ending() -> None:
    assert stems("Converting models?") == stems("convert the model")
    assert stems("what is it") == ()


def test_a_question_of_the_field_has_near_questions() -> None:
    first, second = near_questions("copying code blocks with the keyboard")
    assert "code" in first + second
    assert first != second


@pytest.mark.parametrize(
    "foreign", ["what is the weather tomorrow", "who won the world cup", "", "???", "Wie geht es dir?"]
)
def test_a_foreign_question_has_none(foreign: str) -> None:
    assert near_questions(foreign) == ()


def test_a_refusal_names_them_and_an_answer_does_not() -> None:
    assert offer("copying code blocks with the keyboard", DECLINED).startswith(OFFER)
    assert offer("copying code blocks with the keyboard", "Press y.") == ""
    assert offer("who won the world cup", DECLINED) == ""


def test_what_is_named_comes_before_the_end_and_is_part_of_it() -> None:
    asked = [Message("user", "copying code blocks with the keyboard")]
    events: list[Event] = [TextChunk(DECLINED), finished(DECLINED)]
    text, more, end = with_offers(iter(events), asked)
    assert isinstance(more, TextChunk)
    assert (text, end.text) == (events[0], DECLINED + more.text)


def test_a_reply_that_was_stopped_stays_as_it_is() -> None:
    events: list[Event] = [finished(DECLINED, "cancelled")]
    assert [*with_offers(iter(events), [Message("user", "copying code blocks with the keyboard")])] == events


def test_the_guide_reads_its_reply_without_them() -> None:
    said = DECLINED + offer("copying code blocks with the keyboard", DECLINED)
    turns = [Message("user", f"a{OFFER}b"), Message("assistant", said), Message("assistant", f"An answer.{OFFER}kept")]
    assert [each.content for each in without_offers(turns)] == [turns[0].content, DECLINED, turns[2].content]


def test_the_corpus_declines_so_that_the_app_knows_it() -> None:
    assert all(entry.turns[0].answer.startswith(REFUSAL) for entry in read_corpus() if entry.out_of_scope)


def test_ask_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    end = finished(DECLINED)
    events: list[Event] = [TextChunk(DECLINED), end]
    said = ask.write_reply(iter(events), ask.TextWriter(verbose=False), near_to="copying code blocks with the keyboard")
    assert said is end  # what is looked at again are the model's own words
    assert OFFER.strip() in capsys.readouterr().out

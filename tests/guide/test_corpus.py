"""The guide's corpus: well formed, large enough, free of clashes, honestly split; and the tokenizer that ships with the model."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from tests.guide.dataset import (
    Conversations,
    CorpusEntry,
    CorpusError,
    CorpusTurn,
    drop_words,
    normalised,
    read_corpus,
    read_newcomers,
    wordings,
)
from tests.guide.near_questions import INDEX, titled
from tokamac.app.guide import REFUSAL, stems

MODEL = Path(__file__).parents[2] / "assets" / "guide" / "model"
DIALOGUE = [
    {"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is prefill?"},
    {"role": "assistant", "content": "Prefill is the first phase of a reply."},
    {"role": "user", "content": "  and `make chat` ... really\n\n? Grüße 🙂"}, {"role": "assistant", "content": ""},
    {"role": "user", "content": "<|end|> ok"}, {"role": "assistant", "content": "Ctrl+O opens the list."},
]  # fmt: skip


@pytest.fixture(scope="module")
def entries() -> list[CorpusEntry]:
    return read_corpus()


def single(entries: list[CorpusEntry]) -> list[CorpusEntry]:
    return [entry for entry in entries if len(entry.turns) == 1 and not entry.out_of_scope]


def test_there_are_enough_questions_with_enough_phrasings(entries: list[CorpusEntry]) -> None:
    rich = [entry for entry in single(entries) if len(entry.turns[0].phrasings) >= 8]
    assert len(rich) >= 250
    assert len({entry.turns[0].answer for entry in rich}) == len(rich)


def test_every_turn_has_a_phrasing_to_learn_and_one_to_score(entries: list[CorpusEntry]) -> None:
    assert all(turn.trained and turn.held_out for entry in entries for turn in entry.turns)


def test_a_fifth_is_held_out_and_never_trained(entries: list[CorpusEntry]) -> None:
    turns = [turn for entry in entries for turn in entry.turns]
    held, all_ = sum(len(turn.held_out) for turn in turns), sum(len(turn.phrasings) for turn in turns)
    assert 0.17 <= held / all_ <= 0.23  # about a fifth
    for turn in turns:
        trained = {normalised(text) for text in turn.trained}
        assert not trained & {normalised(text) for text in turn.held_out}
        assert sorted((*turn.trained, *turn.held_out)) == sorted((*turn.phrasings, *turn.patterns))


def test_no_phrasing_asks_for_two_answers(entries: list[CorpusEntry]) -> None:
    asked = Counter(phrasing for entry in entries for phrasing in {normalised(p) for p in entry.turns[0].phrasings})
    assert [phrasing for phrasing, times in asked.items() if times > 1] == []


def test_out_of_scope_questions_share_one_answer_that_names_the_way_on(entries: list[CorpusEntry]) -> None:
    answers = {entry.turns[0].answer for entry in entries if entry.out_of_scope}
    assert len(answers) == 1
    answer = answers.pop()
    assert answer.startswith(REFUSAL)  # by which the app knows that it was declined
    assert "Ctrl+O" in answer
    assert "tokamac chat" in answer
    assert "F1" in answer


def test_there_are_dialogues_and_each_later_question_has_its_own_answer(entries: list[CorpusEntry]) -> None:
    dialogues = [entry for entry in entries if len(entry.turns) > 1]
    assert len(dialogues) >= 50
    for entry in dialogues:
        assert len({turn.answer for turn in entry.turns}) == len(entry.turns)


def test_text_is_ascii_and_answers_are_short(entries: list[CorpusEntry]) -> None:
    for entry in entries:
        for turn in entry.turns:
            assert "".join((*turn.phrasings, turn.answer)).isascii(), entry.id
            assert len(turn.answer.split()) <= 60, entry.id


def test_training_never_draws_a_held_out_phrasing(entries: list[CorpusEntry]) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    conversations = Conversations(entries, tokenizer, seed=1)
    held_out = {normalised(text) for entry in entries for turn in entry.turns for text in turn.held_out}
    drawn = {normalised(question) for question, _ in conversations._all_exchanges()}
    drawn |= {normalised(turn[0]) for dialogue in conversations._all_dialogues() for turn in dialogue}
    assert len(drawn) > 5000
    assert not drawn & held_out


def test_questions_for_an_answer_that_is_missed_are_drawn_oftener(entries: list[CorpusEntry]) -> None:
    few = [*single(entries)[:8], next(entry for entry in entries if entry.out_of_scope)]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    conversations = Conversations(few, tokenizer, seed=1)
    even = Counter(answer for _, answer in conversations._all_exchanges())
    for number, entry in enumerate(few[:-1]):
        conversations.learned(conversations.number(entry.turns[0].answer), 4.0 if number == 0 else 0.5)
    drawn = Counter(answer for _, answer in conversations._all_exchanges())
    missed, known = few[0].turns[0].answer, few[1].turns[0].answer
    assert drawn[missed] > 2 * even[missed]
    assert 0 < drawn[known] < even[known]
    assert drawn[few[-1].turns[0].answer] > 0


def alike(question: str, other: str) -> bool:
    """Whether a question is another's copy, or nearly: of its telling words over three quarters are the same."""
    first, second = set(stems(question)), set(stems(other))
    nearly = len(first) >= 4 and len(first & second) > 0.75 * len(first | second)
    return nearly or normalised(question) == normalised(other)


def test_no_question_of_a_newcomer_stands_in_the_corpus(entries: list[CorpusEntry]) -> None:
    asked = {question: set(stems(question)) for question in (entry.turns[0].phrasings[0] for entry in read_newcomers())}
    assert len(asked) == 50
    copies = set()
    for turn in (turn for entry in entries for turn in entry.turns):
        for text in (*turn.phrasings, *turn.patterns):
            words = set(stems(text.replace("|", " ")))  # of a pattern: those of all its wordings
            near = [question for question, own in asked.items() if len(words & own) >= 0.75 * len(own)]
            if near:
                drawn = wordings(text) if text in turn.patterns else [text]
                copies |= {(question, text) for wording in drawn for question in near if alike(question, wording)}
    assert copies == set()


def test_a_near_copy_would_be_noticed() -> None:
    assert alike("what is a KV cache", "What is a KV cache?")
    assert alike("the colours hurt my eyes, can I change them", "colours hurt my eyes, change them please")
    assert not alike("the colours hurt my eyes, can I change them", "can I change the colours of the chat")


def test_a_name_of_two_words_is_dropped_whole_or_not_at_all() -> None:
    rng = random.Random(3)
    drawn = {drop_words("What is a Hugging Face id?", rng) for _ in range(300)}
    assert {"What is a id?", "What is a Hugging Face id?", "What is a Hugging Face"} <= drawn
    assert all(("Hugging" in each) == ("Face" in each) for each in drawn)


def test_patterns_yield_all_their_wordings() -> None:
    assert sorted(wordings("(stop|halt) the (reply|)")) == ["halt the", "halt the reply", "stop the", "stop the reply"]


def test_the_index_names_questions_of_the_corpus_as_it_is(entries: list[CorpusEntry]) -> None:
    found = json.loads(INDEX.read_text(encoding="utf-8"))
    answered = {titled(text) for entry in entries if not entry.out_of_scope for text in entry.turns[0].phrasings}
    assert set(found["questions"]) <= answered
    assert len(found["questions"]) >= 0.75 * len([entry for entry in single(entries) if entry.file != "smalltalk.txt"])
    assert {int(number) for numbers in found["words"].values() for number in numbers} <= set(
        range(len(found["questions"]))
    )


def test_facts_are_alternatives_found_in_any_case() -> None:
    turn = CorpusTurn(("why",), "Memory bus.", (("bandwidth", "memory bus"), ("weights",)))
    assert turn.is_right("The MEMORY BUS and the Weights.")
    assert not turn.is_right("The memory bus.")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("? a question before any entry\n", "x.txt:1"), ("[a]\n? q\n= an answer\nnonsense\n", "x.txt:4"),
        ("[a]\n= an answer without a question\n", "x.txt:2"), ("[a]\n? q\n+ fact\n", "x.txt:3"),
        ("[a]\n? q\n= one\n~ late\n", "x.txt:4"), ("[a]\n? q\n= one\n= two\n", "x.txt:4"),
        ("[a]\n? q\n= answer\n+ missing\n", "[a]"), ("[a]\n? q\n", "[a]"),
        ("[a]\n? q\n= a\n+ a\n[a]\n? q\n= a\n+ a\n", "[a]"),
    ],
)  # fmt: skip
def test_a_slip_is_an_error_that_names_its_place(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=re.escape(where)):
        read_corpus(tmp_path)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def rendered(tokenizer: Tokenizer, messages: list[dict[str, str]], reply: bool) -> list[int]:
    template = jinja2.Template((MODEL / "chat_template.jinja").read_text(encoding="utf-8"))
    text = template.render(messages=messages, add_generation_prompt=reply)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("start", [0, 1], ids=["with a system prompt", "without"])
def test_a_conversation_is_a_token_prefix_of_its_continuation(tokenizer: Tokenizer, start: int) -> None:
    messages = DIALOGUE[start:]
    for count in range(1, len(messages)):
        shorter, longer = (rendered(tokenizer, messages[:n], reply=False) for n in (count, count + 1))
        assert longer[: len(shorter)] == shorter
        if messages[count]["role"] == "assistant":
            asked = rendered(tokenizer, messages[:count], reply=True)
            assert longer[: len(asked)] == asked


def test_a_reply_read_back_is_the_same_tokens(tokenizer: Tokenizer, entries: list[CorpusEntry]) -> None:
    for entry in entries[::7]:
        answer = entry.turns[-1].answer
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == answer
        assert tokenizer.encode(tokenizer.decode(ids[:9]), add_special_tokens=False).ids[:8] == ids[:8]


def test_the_end_mark_ends_replies() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == tokenizer.token_to_id("<|end|>")


def test_what_ships_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 12_000_000

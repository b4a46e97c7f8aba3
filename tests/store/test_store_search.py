"""Full-text search: what is found, where it is marked, and that nothing typed can break it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokamac.app.store.search import MAX_CHARS, SNIPPET_CHARS, joined, parse, unmarked, window
from tokamac.app.store.store import Store

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
TEXTS = (
    "The café's window keeps 4,096 tokens.",
    "def decode(tokens): return [t -> u for t in tokens]  # C++ 😀",
    "注意力机制很重要。トークン",
    'NEAR(a b) "quoted" text* OR col:x ^start -minus {curly}',
)


@pytest.fixture
def texts(store: Store) -> Store:
    chat = store.new_chat().id
    for text in TEXTS:
        store.add_message(chat, None, "user", text)
    return store


def found(store: Store, typed: str) -> list[int]:
    return [TEXTS.index(store.message(hit.message).text) for hit in store.search(typed)]


@pytest.mark.parametrize(
    ("typed", "indices"),
    [
        ("tokens", [1, 0]),
        ("TOKENS cafe", [0]),
        ("tok", [1, 0]),
        ("tok ", []),
        ("win keeps", []),
        ("keeps win", [0]),
        ("4,096", [0]),
        ("->", [1]),
        ("😀", [1]),
        ("decode 😀", [1]),
        ("window 😀", []),
        ("力机", [2]),
        ("トーク", [2]),
        ("%", []),
        ("_", []),
        ("near(a", [3]),
        ('"quoted"', [3]),
        ("text*", [3]),
        ("col:x", [3]),
        ("a OR zzz", []),
        ("quoted NOT text", []),
        ("{curly}", [3]),
        ("", []),
        (" ", []),
        ("zzz", []),
    ],
)
def test_all_words_must_be_there_and_the_last_may_be_a_beginning(texts: Store, typed: str, indices: list[int]) -> None:
    assert found(texts, typed) == indices


def test_matches_are_marked_by_their_place_in_the_snippet(texts: Store) -> None:
    (hit,) = texts.search("café keep")
    assert hit.snippet == TEXTS[0]
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["café", "keeps"]
    assert (hit.start, hit.length, hit.title) == (0, len(TEXTS[0]), TEXTS[0])
    (hit,) = texts.search("力机 意")
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["意", "力机"]


def test_a_snippet_of_a_long_text_surrounds_the_first_match(store: Store) -> None:
    chat = store.new_chat().id
    text = "left " * 500 + "needle here needle" + " right" * 500
    store.add_message(chat, None, "assistant", text)
    (hit,) = store.search("needle")
    assert text[hit.start : hit.start + len(hit.snippet)] == hit.snippet
    assert len(hit.snippet) <= SNIPPET_CHARS
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["needle", "needle"]
    assert 0 < hit.start < hit.length - len(hit.snippet)


def test_text_that_looks_like_marks_stays_text(store: Store) -> None:
    chat = store.new_chat().id
    text = "<0123456789abcdef>word</0123456789abcdef> \x02word\x03 <b>word</b>"
    store.add_message(chat, None, "user", text)
    (hit,) = store.search("word")
    assert hit.snippet == text
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["word"] * 3


def test_a_reply_is_found_once_it_is_finished(file: Path) -> None:
    with Store.open(file) as store:
        reply = store.begin_reply(store.new_chat().id, None).id
        store.checkpoint(reply, "wombat")
        assert store.search("wombat") == []
        store.finish_reply(reply, "wombats")
        assert [hit.message for hit in store.search("wombat")] == [reply]
        left = store.begin_reply(store.new_chat().id, None).id
        store.checkpoint(left, "numbat")
    with Store.open(file) as store:
        assert [hit.message for hit in store.search("numbat")] == [left]


def test_the_newest_come_first_and_no_more_than_asked_for(store: Store) -> None:
    chat = store.new_chat().id
    ids = [store.add_message(chat, None, "user", f"same {number}").id for number in range(5)]
    assert [hit.message for hit in store.search("same", limit=3)] == ids[:1:-1]
    assert store.search("same", limit=0) == []


HOSTILE = st.text(st.sampled_from("\"'*()^:-+{}[]<>%_\\ \x00\ud800;aAé漢😀 ORNEAT\n\t")) | st.text()


def test_nothing_that_is_typed_breaks_a_search(texts: Store) -> None:
    @settings(UNHURRIED, max_examples=300)
    @given(HOSTILE)
    @example('"')
    @example('""" OR *')
    @example("a" * 100_000)
    @example("a " * 100_000)
    @example("(" * 5000)
    @example("-> " * 5000)
    @example("%" * MAX_CHARS)
    @example("\x00")
    @example("NEAR(")
    def check(typed: str) -> None:
        for hit in texts.search(typed):
            message = texts.message(hit.message)
            assert message.text[hit.start : hit.start + len(hit.snippet)] == hit.snippet
            assert hit.marks == tuple(sorted(hit.marks))
            assert all(0 <= begin < end <= len(hit.snippet) for begin, end in hit.marks)

    check()


@settings(UNHURRIED, max_examples=30)
@given(st.lists(st.text("abc dé漢😀-<>/\n", max_size=30)), st.text("abcdé漢-", min_size=1, max_size=3))
def test_a_word_that_was_sent_is_found_where_it_stands(texts: list[str], word: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s" / "chats.db") as store:
        chat = store.new_chat().id
        ids = [store.add_message(chat, None, "user", f"{text} {word} end").id for text in texts]
        hits = store.search(word, limit=1000)
        if parse(word).match or parse(word).parts:
            assert [hit.message for hit in hits] == ids[::-1]
        assert all(hit.marks for hit in hits)


def test_marks_are_taken_out_joined_and_kept_in_sight() -> None:
    assert unmarked("a<b>c</b>d<b>e</b>", "<b>", "</b>") == ("acde", [(1, 2), (3, 4)])
    assert joined([(4, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 3), (3, 4), (4, 6)]
    assert window("short", (0, 2)) == (0, 5)
    long = "x" * 1000
    assert window(long, (500, 510)) == (460, 460 + SNIPPET_CHARS)
    assert window(long, (0, 900)) == (0, SNIPPET_CHARS)


def test_a_system_message_of_an_import_is_found_like_the_others(store: Store) -> None:
    chat = store.new_chat().id
    asked = store.add_message(chat, None, "user", "What does a marmot eat? 😀")
    system = store.add_message(chat, asked.id, "system", "Be a marmot. 😀")
    assert [(hit.message, hit.role) for hit in store.search("marmot")] == [(system.id, "system"), (asked.id, "user")]
    assert [hit.message for hit in store.search("😀")] == [system.id, asked.id]
    assert store.searchable() == 2

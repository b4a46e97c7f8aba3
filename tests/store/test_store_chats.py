"""Chats: ids, titles, lists, drafts, settings, deleting."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.app.store.messages import ID_CHARS
from tokamac.app.store.store import Store
from tokamac.app.store.values import TITLE_CHARS, StoreError, title_of


def chat_about(store: Store, words: str) -> str:
    chat = store.new_chat(model="guide").id
    store.add_message(chat, None, "user", words)
    return chat


def test_an_id_is_eight_letters_and_digits_and_is_found_by_its_beginning(store: Store) -> None:
    name = chat_about(store, "one")
    assert len(name) == 8
    assert set(name) <= set(ID_CHARS)
    assert store.chat(name).id == name
    assert store.chat(f" {name[:4].upper()} ").id == name


@pytest.mark.parametrize("name", ["", " ", "%", "a_", "zzzzzzzzz", "é", "a b", "--help", "'; DROP TABLE chats"])
def test_what_can_be_no_id_is_said_to_be_none(store: Store, name: str) -> None:
    chat_about(store, "one")
    with pytest.raises(StoreError, match="is no id"):
        store.chat(name)


def test_a_beginning_of_several_ids_names_them_and_one_of_none_says_so(store: Store) -> None:
    first: dict[str, str] = {}
    for number in itertools.count():
        name = chat_about(store, f"chat {number}")
        if other := first.get(name[0]):
            break
        first[name[0]] = name
    with pytest.raises(StoreError, match="Several") as caught:
        store.chat(name[0])
    assert {name, other} <= set(caught.value.message.replace(",", "").split())
    free = next(char for char in ID_CHARS if char not in first)
    with pytest.raises(StoreError, match="No chat"):
        store.chat(free)


def test_the_first_words_sent_are_the_title_and_later_ones_are_not(store: Store) -> None:
    chat = chat_about(store, "## Why is *decode* slow?\nmore")
    store.add_message(chat, store.chat(chat).head, "user", "Something else")
    assert store.chat(chat).title == "Why is *decode* slow?"
    assert store.chat(chat).title_origin == "words"


def test_a_models_title_replaces_words_and_never_the_users(store: Store) -> None:
    chat = chat_about(store, "hello")
    assert store.rename(chat, "Greetings\n between us", "model").title == "Greetings between us"
    assert store.rename(chat, "Mine").title_origin == "user"
    assert store.rename(chat, "Better", "model").title == "Mine"
    assert store.rename(chat, "Mine too").title == "Mine too"
    with pytest.raises(StoreError, match="empty"):
        store.rename(chat, " \n")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", ""),
        (" \n\t\n", ""),
        ("hello", "hello"),
        ("\n\n- [ ] todo\nx", "[ ] todo"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("a " * 50, "a " * 29 + "a…"),
        ("x" * 100, "x" * (TITLE_CHARS - 1) + "…"),
        ("---\nreal", "real"),
    ],
)
def test_a_title_is_the_first_line_that_says_something(text: str, title: str) -> None:
    assert title_of(text) == title


@given(st.text())
def test_a_title_is_one_short_line(text: str) -> None:
    title = title_of(text)
    assert len(title) <= TITLE_CHARS
    assert title == " ".join(title.split())


def test_chats_are_listed_by_last_use_and_without_empty_ones(file: Path) -> None:
    with Store.open(file, clock=itertools.count(1.0).__next__) as store:
        a, b, empty = chat_about(store, "a"), chat_about(store, "b"), store.new_chat().id
        assert [chat.id for chat in store.chats()] == [b, a]
        store.add_message(a, store.chat(a).head, "user", "again")
        store.set_draft(empty, "not sent")
        assert [chat.id for chat in store.chats()] == [a, empty, b]
        assert [chat.id for chat in store.chats(limit=1, offset=1)] == [empty]
        latest = store.latest()
        assert latest is not None
        assert latest.id == a


def test_a_store_without_chats_has_no_latest(store: Store) -> None:
    assert store.latest() is None
    assert store.chats() == []
    assert store.history() == []


def test_the_list_is_filtered_by_words_of_the_title_whatever_case_and_accents(store: Store) -> None:
    cafe = chat_about(store, "Le Café de Flore")
    chat_about(store, "100% _tea_")
    assert [chat.id for chat in store.chats("flore CAFE")] == [cafe]
    assert [chat.title for chat in store.chats("0%")] == ["100% _tea_"]
    assert store.chats("cafe tea") == []
    assert store.chats("\x00\ud800") == []


def test_settings_change_by_key_so_two_windows_lose_nothing_of_each_other(file: Path) -> None:
    with Store.open(file) as one, Store.open(file) as two:
        chat = one.new_chat(settings={"temperature": 0.5}).id
        two.set_settings(chat, {"system": "Be brief."})
        one.set_settings(chat, {"kv": {"key_bits": 8}, "temperature": None})
        assert two.chat(chat).settings == {"system": "Be brief.", "kv": {"key_bits": 8}}
        with pytest.raises(StoreError, match="can't be stored"):
            one.set_settings(chat, {"temperature": float("nan")})
        assert one.set_model(chat, "other").model == "other"


def test_a_deleted_chat_is_out_of_sight_until_it_is_brought_back(store: Store) -> None:
    chat = chat_about(store, "quokka")
    store.delete(chat)
    assert store.chats() == []
    assert store.search("quokka") == []
    assert store.history() == []
    assert [one.id for one in store.chats(deleted=True)] == [chat]
    assert store.undelete(chat).deleted_at is None
    assert len(store.search("quokka")) == 1


def test_the_chat_deleted_last_is_the_first_to_be_brought_back(file: Path) -> None:
    moments = itertools.count()
    with Store.open(file, clock=lambda: float(next(moments))) as store:
        assert store.last_deleted() is None
        first, second, third = (chat_about(store, words) for words in ("one", "two", "three"))
        for chat in (second, third, first, store.new_chat().id):  # of the last one there is nothing to bring back
            store.delete(chat)
        brought = []
        while (last := store.last_deleted()) is not None:
            brought.append(store.undelete(last.id).id)
        assert brought == [first, third, second]


def test_purging_removes_what_was_deleted_long_enough_ago_and_its_bytes(file: Path) -> None:
    now = 1000.0
    with Store.open(file, clock=lambda: now) as store:
        old, young, kept = (chat_about(store, f"secretword{name}") for name in ("old", "young", "kept"))
        store.delete(old)
        now += 100
        store.delete(young)
        assert store.purge(older_than_s=50) == 1
        with pytest.raises(StoreError, match="No chat"):
            store.chat(old)
        assert store.undelete(young).id == young
        assert store.chat(kept).title == "secretwordkept"
        assert store.purge(0) == 0
        store.check()
    data = file.read_bytes()
    assert b"secretwordold" not in data
    assert b"secretwordkept" in data


def test_a_chat_that_another_window_went_on_with_is_not_purged_yet(file: Path) -> None:
    now = 1000.0
    with Store.open(file, clock=lambda: now) as store:
        chat = chat_about(store, "a")
        store.delete(chat)
        now += 100
        store.add_message(chat, None, "user", "still here")
        assert store.chat(chat).deleted_at is None
        assert [one.id for one in store.chats()] == [chat]
        assert store.purge(50) == 0
        assert store.chat(chat).head is not None


def test_a_reply_that_is_begun_brings_a_deleted_chat_back_but_a_draft_does_not(store: Store) -> None:
    chat = chat_about(store, "a")
    store.delete(chat)
    store.set_draft(chat, "half a thought")
    assert store.chats() == []
    store.begin_reply(chat, None)
    assert [one.id for one in store.chats()] == [chat]
    assert store.known("aaaaaaaa") is None
    assert store.known(chat) == store.chat(chat)


def test_a_chat_in_which_a_reply_is_written_is_not_purged(store: Store) -> None:
    chat = chat_about(store, "a")
    reply = store.begin_reply(chat, None)
    store.delete(chat)
    assert store.purge(0) == 0
    store.finish_reply(reply.id, "done")
    assert store.purge(-1) == 1


def test_changing_a_chat_that_is_not_there_is_an_error(store: Store) -> None:
    for change in (store.delete, store.undelete, store.tree, store.archive, store.path):
        with pytest.raises(StoreError, match="no chat"):
            change("aaaaaaaa")
    with pytest.raises(StoreError):
        store.set_draft("aaaaaaaa", "x")
    with pytest.raises(StoreError):
        store.add_message("aaaaaaaa", None, "user", "x")


def test_the_history_is_what_was_sent_newest_first_and_each_once(store: Store) -> None:
    one = chat_about(store, "a")
    two = chat_about(store, "b")
    store.add_message(one, None, "user", "a")
    store.add_message(one, None, "assistant", "not a prompt")
    store.add_message(one, None, "user", "")
    assert store.history() == ["a", "b"]
    assert store.history(limit=1) == ["a"]
    assert store.history(chat=two) == ["b"]

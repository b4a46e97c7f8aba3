"""``tokamac chats search``, and what is said where a chat or a file is not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokamac.app.store.store import Store


@pytest.fixture(autouse=True)
def _own_chats(data: Path) -> None:
    """The chats are the test's own."""


def said(prompt: str, reply: str, title: str = "") -> str:
    with Store.open() as store:
        chat = store.new_chat(model="org/m")
        asked = store.add_message(chat.id, None, "user", prompt)
        store.finish_reply(store.begin_reply(chat.id, asked.id, model="org/m").id, reply)
        if title:
            store.rename(chat.id, title)
        return chat.id


def found(tokamac: Run, *words: str) -> dict[str, Any]:
    done = tokamac("chats", "search", *words, "--json")
    assert (done.status, done.err) == (0, "")
    result: dict[str, Any] = json.loads(done.out)
    return result


def test_messages_and_titles_that_hold_all_the_words_are_found(tokamac: Run) -> None:
    memory = said("Why is it slow?", "Memory is slow,\nand bandwidth \x1b[31mis the limit.", "Speed")
    said("And apples?", "Memory of apples.")
    titled = said("Hm?", "Yes.", "Bandwidth of memory")
    read = found(tokamac, "memory", "bandwidth")
    (message,) = read["messages"]
    assert [chat["id"] for chat in read["chats"]] == [titled]
    assert (message["chat"], message["title"], message["role"]) == (memory, "Speed", "assistant")
    assert [message["text"][begin:end].lower() for begin, end in message["marks"]] == ["memory", "bandwidth"]
    head, title, line, _, number = tokamac("chats", "search", "memory bandwidth").out.splitlines()
    assert head.split() == ["id", "when", "where", "text"]
    assert title.startswith(titled)
    assert title.endswith("title      Bandwidth of memory")
    assert line.startswith(memory)
    assert "assistant  Memory is slow, and bandwidth \ufffdis the limit." in line
    assert number.startswith("2 places;")


def test_where_a_message_is_cut_is_shown(tokamac: Run) -> None:
    said("Why?", f"{'before ' * 100}needle{' after' * 100}")
    line = tokamac("chats", "search", "needle").out.splitlines()[1]
    text = line.split("assistant  ")[1]
    assert (text[0], text[-1]) == ("…", "…")
    assert "needle" in text


def test_nothing_found_is_no_failure(tokamac: Run) -> None:
    said("Why?", "Because.")
    assert found(tokamac, "nothing") == {"chats": [], "messages": []}
    assert tokamac("chats", "search", "nothing").out == "nothing was found\n"


@pytest.mark.parametrize("words", [(), ("",), (" ", " ")])
def test_a_search_needs_words(tokamac: Run, words: tuple[str, ...]) -> None:
    done = tokamac("chats", "search", *words)
    assert (done.status, done.out) == (2, "")
    assert "search needs WORDS" in done.err


@pytest.mark.parametrize(
    ("action", "lists"),
    [
        ("show", "tokamac chats"),
        ("export", "tokamac chats"),
        ("delete", "tokamac chats"),
        ("restore", "tokamac chats list --deleted"),
    ],
)
def test_an_id_of_no_chat_says_which_command_shows_them(tokamac: Run, action: str, lists: str) -> None:
    done = tokamac("chats", action, "zzz")
    assert done.status == 1
    assert done.err == f"tokamac: No chat has an id that begins with zzz. `{lists}` shows the ids.\n"
    assert tokamac(*lists.split()[1:]).status == 0


def test_a_file_that_is_not_there_says_what_to_check(tokamac: Run, tmp_path: Path) -> None:
    done = tokamac("chats", "import", tmp_path / "nope")
    said = f"tokamac: {tmp_path}/nope can't be read: No such file or directory. Check the path and its permissions.\n"
    assert (done.status, done.err) == (1, said)

"""``tokamac chat --plain``: what is a command and what a prompt, and how texts name what is done."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.plain_chat import Terminal, last_path, piped
from tokamac.app.chat.actions import parse
from tokamac.app.plain.repl import NoKeys

pytestmark = pytest.mark.usefixtures("data")


@pytest.mark.parametrize(
    "text",
    ["explain this", "/", "/ new", "/usr/bin", "/7", " /new", "/new\nmore", "/explain this:\nx = 1", "/no\nsuch"],
)
def test_what_is_no_command_is_a_prompt(text: str) -> None:
    assert parse(text, multiline=True) is None


@pytest.mark.parametrize(
    ("text", "word", "argument", "action"),
    [
        ("/new \n", "/new", "", "new_chat"),
        ("/Open  k3v7q2ab ", "/Open", "k3v7q2ab", "open"),
        ("/edit one\ntwo\n", "/edit", "one\ntwo", "edit"),
        ("/nosuch thing", "/nosuch", "thing", None),
    ],
)
def test_a_command_is_taken_apart(text: str, word: str, argument: str, action: str | None) -> None:
    found = parse(text, multiline=True)
    assert found is not None
    assert (found.word, found.argument, found.action and found.action.id) == (word, argument, action)


def test_several_lines_follow_only_the_commands_that_take_them() -> None:
    assert parse("/edit one\ntwo") is None


def test_a_block_that_begins_like_a_command_is_a_prompt(data: Path) -> None:
    _, out, err = piped(
        '"""\n/explain this:\nx = 1\n"""\n/system Be\\\nbrief.\n/system\n"""\n/edit one\ntwo\n"""\n', "fast"
    )
    assert err.splitlines() == [
        "The system prompt applies to this chat from the next message on. /system none removes it."
    ]
    assert "Be\nbrief.\n" in out
    assert [message.text for message in last_path(data) if message.role == "user"] == ["one\ntwo"]
    piped("/older\nmore\n", "fast", "--continue")
    assert [m.text for m in last_path(data) if m.role == "user"] == ["/explain this:\nx = 1", "more"]


def test_the_help_says_what_must_follow_and_what_may() -> None:
    _, out, _ = piped("/help\n", "fast")
    lines = out.splitlines()
    for begin in ("/guide QUESTION: ", "/model [NAME]: ", "/detach [NAME]: ", "/open NUMBER|ID: ", "/edit [TEXT]: "):
        assert sum(line.startswith(begin) for line in lines) == 1


def test_where_there_are_no_keys_none_is_named() -> None:
    named = NoKeys()
    keys = [named.key(each) for each in ("choose_model", "settings", "explain", "stop")]
    assert keys == ["/model", "/settings", "/explain", "Ctrl-C"]
    _, out, _ = piped("/gauges KV\n", "fast")
    assert "(settings (/settings))" in out
    assert "Ctrl+" not in out


def test_a_model_whose_loading_is_stopped_is_chosen_by_a_command(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("slow-load", "--plain", TERM="dumb", NO_COLOR="1")
    chat.until("you> ")
    chat.type("/unload\n")
    chat.until("Loading was stopped. /model chooses a model; sending a prompt loads this one.")
    chat.until("you> ")
    chat.type("/unload\n")
    chat.until("No model is loaded.")
    assert chat.leave() == 0

"""``tokamac chat --plain``: Tab completes commands, and a misspelt one is told the nearest."""

from collections.abc import Callable

import pytest

from tests.cli.plain_chat import Terminal, piped
from tokamac.app.plain.commands import completed

pytestmark = pytest.mark.usefixtures("data")


def test_a_command_is_completed_where_a_line_begins_and_a_setting_after_its_command() -> None:
    assert completed("", "/ti") == ["/title "]
    assert completed("", "/NEW") == ["/new", "/newer"]
    assert "/quit" in completed("", "/")
    assert completed("", "/pan") == []  # it needs the full screen
    assert completed("/settings ", "top") == ["top_p ", "top_k "]
    assert completed("/settings top_p ", "t") == []
    for before, begun in (("", "ti"), ("what is ", "/ti"), (" ", "/ti"), ("/title ", "/ti")):
        assert completed(before, begun) == []


def test_tab_completes_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")
    chat.until("you> ")
    chat.type("/sett\ttemp\t0.5\n")
    chat.until("This applies to every chat")
    chat.until("you> ")
    chat.type("/settings\n")
    chat.until("temperature: 0.5")
    assert chat.leave() == 0


def test_a_misspelt_command_is_told_the_nearest() -> None:
    _, _, err = piped("/titel Keys\n/nosuch\n", "fast")
    assert err.splitlines() == [
        "There is no command /titel; did you mean /title? /help lists them. To send this as a prompt, put a space before it.",
        "There is no command /nosuch. /help lists them. To send this as a prompt, put a space before it.",
    ]

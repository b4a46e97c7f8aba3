"""``tokamac chat --plain`` on a terminal of lines."""

import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.plain_chat import OBEYED, PATIENCE_S, Terminal, last_path, spawn
from tokamac.app.plain.console import Console, is_libedit

pytestmark = pytest.mark.usefixtures("data")


def test_on_a_terminal_text_has_a_speaker_and_nothing_moves_the_cursor(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain", TERM="dumb", NO_COLOR="1")
    chat.until("you> ")
    chat.type("hi\n")
    chat.until("fast: Decode reads")
    chat.until("· /explain)")
    assert chat.leave() == 0
    assert not OBEYED.search(chat.shown.decode().replace("\r\n", "\n"))
    assert re.search(r"tokamac chat --chat \w{8}", chat.shown.decode())


def test_a_hostile_reply_brings_no_sequence_of_its_own_to_a_terminal(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("hostile", "--plain", TERM="dumb", NO_COLOR="1")
    chat.type("hi\n/quit\n")
    assert chat.left() == 0
    assert "[bold]not markup[/]" in chat.shown.decode()
    assert not OBEYED.search(chat.shown.decode().replace("\r\n", "\n"))


def test_ctrl_c_stops_the_reply_and_twice_at_the_prompt_leaves(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("steady", "--plain")
    chat.until("you> ")
    chat.type("hi\n")
    chat.until("steady: Deco")
    chat.type("\x03")
    chat.until("(stopped")
    chat.until("you> ")
    chat.type("\x03")
    chat.until("Press Ctrl-C again to quit")
    chat.until("you> ")
    chat.type("\x03")
    assert chat.left() == 130
    assert [m.state for m in last_path(data)] == ["complete", "stopped"]


def test_a_line_between_two_ctrl_c_stays(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")
    for text in ("\x03", "/stop\n", "\x03"):
        chat.until("you> ")
        chat.type(text)
    chat.until("Press Ctrl-C again to quit")
    assert chat.leave() == 0


def test_the_last_prompt_is_edited_on_the_line(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", "/edit\n", " and a half\n", "\x04"):
        chat.until("you> ")
        chat.type(text)
    assert chat.left() == 0
    assert [m.text for m in last_path(data) if m.role == "user"] == ["one and a half"]


def test_an_unknown_chat_is_refused_before_a_screen_opens(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--chat", "zzzzzzzz")
    assert chat.left() == 1
    assert b"\x1b" not in chat.shown
    assert chat.shown.count(b"\n") == 1


def test_piped_into_a_terminal_it_is_plain(terminal: Callable[..., Terminal]) -> None:
    leader, follower = pty.openpty()
    process = spawn("fast", stdout=follower, stderr=follower, env={**os.environ, "TERM": "dumb"})
    os.close(follower)
    assert process.stdin is not None
    process.stdin.write("hi\n")
    process.stdin.close()
    shown = b""
    try:
        while more := os.read(leader, 4096):
            shown += more
    except OSError:
        pass
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    assert b"fast: Decode reads" in shown
    assert b"\x1b" not in shown


@pytest.mark.parametrize(("program", "asked"), [("Apple_Terminal", False), ("ghostty", True)])
def test_terminal_app_is_asked_nothing_whose_end_it_would_print(
    terminal: Callable[..., Terminal], program: str, asked: bool
) -> None:
    chat = terminal("fast", TERM_PROGRAM=program)
    chat.until("new chat")  # the first frame: what is asked was asked by now
    chat.type("\x11")
    assert chat.left() == 0
    assert (b"$p" in chat.shown) is asked


@pytest.mark.parametrize(
    ("doc", "printed"), [("Importing this module enables libedit readline.", True), ("GNU", False)]
)
def test_where_libedit_may_leave_the_line_empty_the_draft_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], doc: str, printed: bool
) -> None:
    stub = SimpleNamespace(__doc__=doc, set_startup_hook=lambda _=None: None, insert_text=lambda _: None)
    monkeypatch.setitem(sys.modules, "readline", stub)
    monkeypatch.setattr("builtins.input", lambda prompt: f"after {prompt}")
    console = Console()
    console._edits = console.shown = True
    assert console.read("you> ", "one\nand a half") == "after you> "
    assert ("one\nand a half\n" in capsys.readouterr().out) is printed
    assert console.read("you> ") == "after you> "
    assert capsys.readouterr().out == ""
    stub.backend = "readline" if printed else "editline"  # as newer Pythons say it
    assert is_libedit() is not printed

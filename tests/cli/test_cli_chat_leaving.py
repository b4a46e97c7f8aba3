"""``tokamac chat --plain``: what is written and not sent when another chat is begun or opened."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.plain_chat import Terminal, last_path, piped
from tokamac.app.chat.recording import LEFT
from tokamac.app.store.store import Store

pytestmark = pytest.mark.usefixtures("data")

KILL_LINE = "\x15"


def drafts(data: Path) -> dict[str, str]:
    """The drafts of all chats, by title."""
    with Store.open(data) as store:
        return {chat.title: chat.draft for chat in store.chats()}


def test_what_is_attached_stays_with_the_chat_that_is_left_and_it_is_said(data: Path, notes: Path) -> None:
    status, _, err = piped(f"about keys\n/attach {notes}\n/new\nabout pears\n", "fast")
    assert (status, err.count(LEFT)) == (0, 1)
    assert [(m.text, m.attachments) for m in last_path(data) if m.role == "user"] == [("about pears", ())]
    assert {title: "keys and values" in draft for title, draft in drafts(data).items()} == {
        "about keys": True,
        "about pears": False,
    }


def test_it_comes_back_with_its_chat(data: Path, notes: Path) -> None:
    piped("about keys\n/new\nabout pears\n", "fast")
    _, _, err = piped(f"/chats\n/open 2\n/attach {notes}\n/open 1\n/open 2\nand these?\n", "fast")
    assert err.count(LEFT) == 1
    (*_, prompt) = (m for m in last_path(data) if m.role == "user")
    assert [each.name for each in prompt.attachments] == [str(notes)]
    assert set(drafts(data).values()) == {""}


def test_it_is_not_lost_where_the_same_chat_is_opened_again(data: Path, notes: Path) -> None:
    _, _, err = piped(f"about keys\n/attach {notes}\n/chats\n/open 1\nand these?\n", "fast")
    assert LEFT not in err
    (*_, prompt) = (m for m in last_path(data) if m.role == "user")
    assert [each.name for each in prompt.attachments] == [str(notes)]


def test_where_nothing_is_kept_it_goes_along(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "blocked"))
    _, _, err = piped(f"/attach {notes}\n/new\n/detach {notes}\n", "fast")
    assert LEFT not in err
    assert f"Removed from the next prompt: {notes}." in err


def test_a_new_chat_ends_an_edit(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", "/edit\n", f"{KILL_LINE}/new\n", "two\n", "\x04"):
        chat.until("you> ")
        chat.type(text)
    assert chat.left() == 0
    assert [m.text for m in last_path(data) if m.role == "user"] == ["two"]

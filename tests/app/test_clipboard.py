"""Copying where no tool of the system's takes the text: the terminal is asked, tmux passes it on, and a file holds it for sure."""

import base64
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.tui import clipboard

Start = Callable[..., Any]
TEXT = "naïve\ttabs\r\nand lines 🙂"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the terminal is sent, beside rows."""
    monkeypatch.setattr(clipboard, "_tool", lambda: None)
    monkeypatch.delenv("TMUX", raising=False)
    return []


async def copied(c: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(c.app._driver, "write", sent.append)
    return clipboard.copy_text(c.app, TEXT, folder)


def asked_for(sequence: str) -> str:
    found = re.fullmatch(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", sequence)
    assert found
    return base64.b64decode(found[1]).decode()


async def test_the_terminal_and_a_private_file_get_the_text_exactly(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat("fast") as c:
        said = await copied(c, written, monkeypatch, tmp_path / "home")
    file = tmp_path / "home" / clipboard.FILE
    assert f"Copied {len(TEXT)} characters through the terminal (OSC 52)" in said
    assert str(file) in said
    assert [asked_for(sequence) for sequence in written if "]52" in sequence] == [TEXT]
    assert file.read_bytes().decode() == TEXT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_in_tmux_the_outer_terminal_is_asked_as_well(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    async with chat("fast") as c:
        await copied(c, written, monkeypatch, tmp_path)
    plain, wrapped = [sequence for sequence in written if "]52" in sequence]
    assert asked_for(plain) == TEXT
    inner = re.fullmatch(r"\x1bPtmux;(.*)\x1b\\", wrapped, re.DOTALL)
    assert inner
    assert asked_for(inner[1].replace("\x1b\x1b", "\x1b")) == TEXT


async def test_a_link_in_the_files_place_is_not_followed_and_a_folder_there_is_said(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (tmp_path / clipboard.FILE).symlink_to(precious)
    async with chat("fast") as c:
        await copied(c, written, monkeypatch, tmp_path)
        assert precious.read_text() == "mine"
        assert (tmp_path / clipboard.FILE).read_bytes().decode() == TEXT
        (tmp_path / clipboard.FILE).unlink()
        (tmp_path / clipboard.FILE).mkdir()
        said = await copied(c, written, monkeypatch, tmp_path)
    assert "could not be written" in said

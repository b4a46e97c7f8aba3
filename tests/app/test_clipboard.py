"""Copying where no tool of the system's takes the text: the terminal is asked, tmux passes it on, and a file holds it for sure."""

import base64
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.chat import external_programs

Start = Callable[..., Any]
TEXT = "naïve\ttabs\r\nand lines 🙂"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the terminal is sent, beside rows."""
    monkeypatch.setattr(external_programs, "_tool", lambda: None)
    monkeypatch.delenv("TMUX", raising=False)
    return []


async def copied(c: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(c.app._driver, "write", sent.append)
    return external_programs.copy_text(TEXT, folder, c.app.copy_to_clipboard)


def asked_for(sequence: str) -> str:
    found = re.fullmatch(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", sequence)
    assert found
    return base64.b64decode(found[1]).decode()


async def test_the_terminal_and_a_private_file_get_the_text_exactly(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat("fast") as c:
        said = await copied(c, written, monkeypatch, tmp_path / "home")
    file = tmp_path / "home" / external_programs.FILE
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
    (tmp_path / external_programs.FILE).symlink_to(precious)
    async with chat("fast") as c:
        await copied(c, written, monkeypatch, tmp_path)
        assert precious.read_text() == "mine"
        assert (tmp_path / external_programs.FILE).read_bytes().decode() == TEXT
        (tmp_path / external_programs.FILE).unlink()
        (tmp_path / external_programs.FILE).mkdir()
        said = await copied(c, written, monkeypatch, tmp_path)
    assert "can't be written" in said


def test_pbcopy_is_told_that_it_gets_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "pbcopy"
    tool.write_text(f'#!/bin/sh\nprintf \'%s,%s\' "$LC_ALL" "$LC_CTYPE" > {tmp_path}/locale\ncat > {tmp_path}/copied\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LC_ALL", "C")
    for name in ("WAYLAND_DISPLAY", "SSH_CONNECTION", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    assert external_programs.copy_by_tool(TEXT) == "pbcopy"
    assert (tmp_path / "locale").read_text() == ",UTF-8"
    assert (tmp_path / "copied").read_bytes().decode() == TEXT

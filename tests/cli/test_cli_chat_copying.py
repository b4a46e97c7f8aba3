"""``tokamac chat --plain``: copying by a tool of the system's, or into a private file; the terminal is asked for nothing."""

import os
import stat
from pathlib import Path

import pytest

from tests.cli.plain_chat import OBEYED, piped
from tokamac.app.plain.copying import copied
from tokamac.app.tui.clipboard import FILE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings are, on whatever system; and nothing copies."""
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TEST_SETTINGS", str(tmp_path / "home" / "settings.toml"))
    monkeypatch.setenv("SSH_CONNECTION", "1")
    return tmp_path / "home"


def test_without_a_tool_what_is_copied_is_in_a_private_file(home: Path) -> None:
    _, out, err = piped("hi\n/copy\n", "hostile")
    file = home / FILE
    assert str(file) in err
    assert file.read_text().startswith("before ")
    assert not OBEYED.search(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "\x1b" not in out + err  # the terminal is asked for nothing
    _, _, err = piped("hi\n/code\n", "fast")
    assert file.read_text() == "ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step\n"
    assert "the text, 51 characters, is in" in err


def test_of_several_code_blocks_it_is_said_which_is_copied(home: Path) -> None:
    _, _, err = piped("hi\n/again\nho\n/code\n/code\n/code\n", "fast")
    assert [line.partition(".")[0] for line in err.splitlines()] == [
        f"Code block {which} of 2" for which in ("2", "1", "2")
    ]


def test_a_tool_of_the_system_gets_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("pbcopy", "wl-copy"):
        (tools / name).write_text(f"#!/bin/sh\ncat > {tmp_path}/taken\n")
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert copied("naïve", tmp_path / "home").startswith("Copied 5 characters (")
    assert (tmp_path / "taken").read_text() == "naïve"
    assert not (tmp_path / "home").exists()


def test_a_link_in_the_files_place_is_not_followed_and_a_folder_there_is_said(tmp_path: Path, home: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    home.mkdir()
    (home / FILE).symlink_to(precious)
    assert copied("x", home).endswith(f"the text, 1 character, is in {home / FILE}.")
    assert (precious.read_text(), (home / FILE).read_text()) == ("mine", "x")
    (home / FILE).unlink()
    (home / FILE).mkdir()
    assert "can't be written" in copied("x", home)

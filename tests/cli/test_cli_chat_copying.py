"""``tokamac chat --plain``: copying by a tool of the system's, or into a private file; the terminal is asked for nothing."""

import stat
from pathlib import Path

import pytest

from tests.cli.plain_chat import OBEYED, piped
from tokamac.app.chat import external_programs
from tokamac.app.chat.external_programs import FILE, copy_text

pytestmark = pytest.mark.usefixtures("data")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing copies: the machine is reached over SSH."""
    monkeypatch.setenv("SSH_CONNECTION", "1")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system's tools are, none as yet."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return tools


def tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


@pytest.mark.usefixtures("far")
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
    assert "Not copied (over SSH, " in err
    assert f"). The text, 51 characters, is in {file}." in err


@pytest.mark.usefixtures("far", "home")
def test_of_several_code_blocks_it_is_said_which_is_copy_text() -> None:
    _, _, err = piped("hi\n/again\nho\n/code\n/code\n/code\n", "fast")
    assert [line.partition(".")[0] for line in err.splitlines()] == [
        f"Code block {which} of 2" for which in ("2", "1", "2")
    ]


def test_a_tool_of_the_system_gets_the_text(tmp_path: Path, tools: Path) -> None:
    for name in ("pbcopy", "wl-copy"):
        tool(tools / name, f"/bin/cat > {tmp_path}/taken")
    assert copy_text("naïve", tmp_path / "home").startswith("Copied 5 characters (")
    assert (tmp_path / "taken").read_text() == "naïve"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "this system has no pbcopy, and no wl-copy under Wayland"),
        ("/bin/cat > /dev/null; exit 3", "wl-copy failed with exit status 3"),
        ("exec /bin/sleep 60", "wl-copy did not finish within 0.1 s"),
    ],
)
def test_where_no_tool_takes_the_text_it_is_said_why(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(external_programs, "PATIENCE_S", 0.1 if "sleep" in script else external_programs.PATIENCE_S)
    if script:
        tool(tools / "wl-copy", script)
    file = tmp_path / external_programs.FILE
    assert copy_text("naïve", tmp_path) == f"Not copied ({why}). The text, 5 characters, is in {file}."
    assert file.read_text() == "naïve"


@pytest.mark.usefixtures("far")
def test_a_link_in_the_files_place_is_not_followed_and_a_folder_there_is_said(tmp_path: Path, home: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    home.mkdir()
    (home / FILE).symlink_to(precious)
    assert copy_text("x", home).endswith(f"The text, 1 character, is in {home / FILE}.")
    assert (precious.read_text(), (home / FILE).read_text()) == ("mine", "x")
    (home / FILE).unlink()
    (home / FILE).mkdir()
    assert "can't be written" in copy_text("x", home)

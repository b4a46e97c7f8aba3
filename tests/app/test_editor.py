"""The user's own editor: what it saved is the prompt, and is never lost where it fails."""

import re
import tempfile
from pathlib import Path

import pytest

from tokamac.app.chat.external_programs import EditorError, edit_text, editor_command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file that is edited lies."""
    made = tmp_path / "edited"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def shell(script: str) -> list[str]:
    """An editor that does this with the file ``$1``."""
    return ["sh", "-c", script, "editor"]


def test_what_was_saved_is_returned_without_control_characters_and_the_file_is_gone(folder: Path) -> None:
    assert edit_text(shell("printf ' and \\033[31mmore\\n\\n' >> $1"), "first") == "first and �more"
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("end", "how"), [("exit 3", "ended with status 3"), ("kill -9 $$", "was killed by SIGKILL")])
def test_what_an_editor_saved_before_it_failed_is_kept(folder: Path, end: str, how: str) -> None:
    with pytest.raises(EditorError, match=how) as failed:
        edit_text(shell(f"printf 'all of it' > $1; {end}"), "first")
    (kept,) = folder.iterdir()
    assert str(failed.value) == f"sh {how}; the prompt is unchanged. What it saved is in {kept}."
    assert kept.read_text() == "all of it"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_an_editor_that_fails_and_saved_nothing_leaves_nothing(folder: Path) -> None:
    with pytest.raises(EditorError, match=r"^sh ended with status 1; the prompt is as it was\.$"):
        edit_text(shell("exit 1"), "first")
    with pytest.raises(EditorError, match="could not be used"):
        edit_text([str(folder / "no-such-editor")], "first")
    assert not list(folder.iterdir())


def test_what_is_no_text_is_kept_and_named(folder: Path) -> None:
    with pytest.raises(EditorError, match="is not UTF-8") as failed:
        edit_text(shell("printf '\\377\\376' > $1"), "first")
    (kept,) = folder.iterdir()
    assert str(kept) in str(failed.value)
    assert kept.read_bytes() == b"\xff\xfe"


def test_an_editor_that_removes_the_file_is_told_of(folder: Path) -> None:
    with pytest.raises(EditorError, match=re.escape("sh could not be used")):
        edit_text(shell("rm $1"), "first")
    assert not list(folder.iterdir())


def test_which_editor() -> None:
    assert editor_command({"VISUAL": "code --wait", "EDITOR": "vi"}) == ["code", "--wait"]
    assert editor_command({"VISUAL": "", "EDITOR": "vi"}) == ["vi"]
    with pytest.raises(EditorError, match="is not a valid command"):
        editor_command({"EDITOR": "vi '"})


@pytest.mark.parametrize(
    ("here", "found"), [(("nano", "vi"), ["nano"]), (("vi",), ["vi"]), ((), None)], ids=["both", "one", "none"]
)
def test_where_none_is_set_one_that_is_here_is_taken(
    tmp_path: Path, here: tuple[str, ...], found: list[str] | None
) -> None:
    for name in here:
        (tmp_path / name).touch(mode=0o755)
    if found is None:
        with pytest.raises(EditorError, match="set EDITOR"):
            editor_command({"PATH": str(tmp_path)})
    else:
        assert editor_command({"PATH": str(tmp_path), "EDITOR": ""}) == found


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("code", ["code", "--wait"]),
        ("code --wait -n", ["code", "--wait", "-n"]),
        ("/usr/local/bin/subl -w", ["/usr/local/bin/subl", "-w"]),
        ("'/Applications/Zed.app/Contents/MacOS/zed' -n", ["/Applications/Zed.app/Contents/MacOS/zed", "--wait", "-n"]),
        ("mvim", ["mvim", "--nofork"]),
        ("open -a TextEdit", ["open", "-W", "-a", "TextEdit"]),
        ("nvim -f", ["nvim", "-f"]),
    ],
)
def test_an_editor_with_a_window_is_told_to_wait(given: str, command: list[str]) -> None:
    assert editor_command({"EDITOR": given}) == command

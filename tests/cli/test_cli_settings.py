"""What of the settings can't be used is said by every command that reads them, on stderr, once."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.plain_chat import OBEYED, piped
from tokamac.app import settings
from tokamac.app.options import default_model

DAMAGED = "theme = [\x1b]0;x\x07"


@pytest.fixture
def path() -> Path:
    found = settings.default_path()
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def test_a_command_that_takes_the_model_picked_last_says_it_on_a_line_each(
    tokamac: Run, path: Path, tiny: Path
) -> None:
    path.write_text(f'model = "{tiny}"\nfuture = 1\nunload_after_min = "\\u001b[2J\\n"\n')
    done = tokamac("ask", "Hello", "--max-tokens", "2")
    assert done.status == 0
    first, second = done.err.splitlines()
    assert first == "warning: settings.toml: unknown key 'future'; it is kept and not used."
    assert second.startswith("warning: settings.toml: unload_after_min is ")
    assert not OBEYED.search(done.err)


def test_a_damaged_file_is_not_moved_aside_in_silence(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(DAMAGED)
    assert default_model() == "guide"
    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert "it is now settings.damaged.toml" in said
    assert said.count("\n") == 1
    assert not OBEYED.search(said)
    assert default_model() == "guide"
    assert capsys.readouterr().err == ""


def test_nor_by_a_chat_with_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "settings.toml"
    file.write_text(DAMAGED)
    status, _, err = piped("", "fast", "--temp", "0.5", env={**os.environ, "TEST_SETTINGS": str(file)})
    assert status == 0
    assert err.count("it is now settings.damaged.toml") == err.count("\n") == 1
    assert not OBEYED.search(err)


@pytest.mark.parametrize(("flags", "status", "why"), [
    (("--temp", "99"), 2, "--temp"), (("--temp", "0.5", "--chat", "nosuch"), 1, "nosuch"),
])  # fmt: skip
def test_nor_where_no_chat_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], status: int, why: str
) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "settings.toml"
    file.write_text(DAMAGED)
    ended, _, err = piped("", "fast", *flags, env={**os.environ, "TEST_SETTINGS": str(file)})
    assert ended == status
    assert err.count("it is now settings.damaged.toml") == 1
    assert why in err


def test_a_plain_chat_says_what_a_setting_is_now_or_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TEST_SETTINGS", str(tmp_path / "settings.toml"))
    written = (
        "unload_after_min 7",
        "unload_after_min 7",
        f"unload_after_min {'1' * 5000}",
        "key_bits 8",
        "key_bits 8",
        "window",
    )
    status, _, err = piped("".join(f"/settings {each}\n" for each in written), "fast")
    assert status == 0
    assert err.splitlines() == [
        "unload_after_min is 7 now.",
        "It is 7 already.",
        f"Unload after: '{'1' * 59} is not valid (minutes; 0 never, auto 30 if large).",
        "The model is reloading with it.",
        "It is 8 already.",
        "It is not set already.",
    ]
    assert "unload_after_min = 7" in (tmp_path / "settings.toml").read_text()

"""Folders that macOS keeps private (Desktop, Documents, Downloads, other disks): where it refuses one, what opens it is said."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app import cli
from tokamac.app.chat.attachments import read_file
from tokamac.app.commands import ask, bench_report, kv_quality
from tokamac.app.store import export, values
from tokamac.engine.errors import ALLOW, TokamacError
from tokamac.engine.model.config import read_config
from tokamac.quant import calibration
from tokamac.quant.resume import writing_to

SETTINGS = "System Settings > Privacy & Security > Files and Folders"


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: object, **__: object) -> Any:
        raise PermissionError(number, os.strerror(number))

    return refused


@pytest.fixture
def desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing may be opened, on a Mac."""
    folder = tmp_path / "Desktop"
    folder.mkdir()
    (folder / "notes.md").write_text("notes")
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "stdin", None)
    for holder, name in ((os, "open"), (Path, "open")):
        monkeypatch.setattr(holder, name, refuse(errno.EPERM))
    monkeypatch.setattr(sys, "platform", "darwin")
    return folder


def convert(folder: Path) -> None:
    with writing_to(folder / "mine-4bit"):
        os.open(folder / "mine-4bit", os.O_WRONLY)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: read_file("notes.md", folder),
        lambda folder: ask.compose("what?", [str(folder / "notes.md")]),
        lambda folder: kv_quality._read(str(folder / "notes.md")),
        lambda folder: calibration.text(folder / "notes.md"),
        lambda folder: export.read(folder / "notes.md", now=0.0),
        lambda folder: export.write(folder / "new.md", "text"),
        lambda folder: bench_report.write(folder / "plot.svg", None),  # type: ignore[arg-type]  # not drawn: it can't be written
        read_config,
        convert,
    ],
)
def test_what_opens_a_private_folder_is_said_on_a_mac_alone(
    desktop: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    with pytest.raises(TokamacError) as found:
        use(desktop)
    assert SETTINGS in found.value.hint
    assert "Operation not permitted" in found.value.message

    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(TokamacError) as found:
        use(desktop)
    assert SETTINGS not in found.value.hint


def test_rights_of_a_file_are_not_taken_for_privacy(desktop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    with pytest.raises(TokamacError) as found:
        read_file("notes.md", desktop)
    assert found.value.hint == "Check its permissions."


def test_the_store_and_what_nobody_expected_say_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    problem = PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(tmp_path))
    assert values.refused(tmp_path, problem).hint == f"{ALLOW}."
    assert cli._failed(problem, json_wanted=False) == 1
    assert capsys.readouterr().err == f"tokamac: {tmp_path}: Operation not permitted. {ALLOW}.\n"

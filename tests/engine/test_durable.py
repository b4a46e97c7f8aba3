"""What is on the disk before a name leads to it, as macOS needs to be told; recorded, as only a loss of power would tell."""

import fcntl
import os
import sqlite3
from pathlib import Path

import pytest

from tests.quant.quant_models import make_source
from tokamac.app import settings
from tokamac.app.store.database import Database
from tokamac.engine import files
from tokamac.engine.hub import download
from tokamac.engine.hub.cache import Repo
from tokamac.engine.prompt_cache.folder import Folder
from tokamac.quant import convert

FULL_SYNC = 51
"""F_FULLFSYNC, of macOS' <sys/fcntl.h>."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is forced to the disk, and what takes whose place, in order, as a Mac would be asked."""
    happened: list[tuple[str, str]] = []
    rename, replace, real = Path.rename, Path.replace, fcntl.fcntl

    def asked(handle: int, command: int, argument: int = 0) -> int:
        if command != FULL_SYNC:
            return real(handle, command, argument)
        happened.append(("full", ""))
        return 0

    def moved(how):
        def move(path: Path, target: Path) -> Path:
            happened.append(("rename", Path(target).name))
            return how(path, target)

        return move

    monkeypatch.setattr(files, "FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(fcntl, "fcntl", asked)
    monkeypatch.setattr(Path, "rename", moved(rename))
    monkeypatch.setattr(Path, "replace", moved(replace))
    return happened


def kinds(happened: list[tuple[str, str]]) -> list[str]:
    return [kind for kind, _ in happened]


def test_settings_are_on_the_disk_before_they_take_their_place(tmp_path: Path, order: list[tuple[str, str]]) -> None:
    settings.save(tmp_path / "settings.toml", settings.Settings())
    assert kinds(order) == ["full", "rename"]
    assert order[-1] == ("rename", "settings.toml")


def test_a_segment_of_the_prompt_cache_too(tmp_path: Path, order: list[tuple[str, str]]) -> None:
    Folder(tmp_path).write("model", "label", "parent", "name", b"data")
    assert kinds(order)[-2:] == ["full", "rename"]


def test_a_download_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[tuple[str, str]]
) -> None:
    class Arrived:
        """A transfer whose bytes are all there: the network's part is in tests/hub."""

        intact = True

        def __init__(self, *_: object) -> None: ...

        def run(self) -> None: ...

    monkeypatch.setattr(download, "_Transfer", Arrived)
    monkeypatch.setattr(download.RemoteFile, "partial", lambda *_: tmp_path / "blob.incomplete")
    monkeypatch.setattr(download.RemoteFile, "blob", lambda *_: tmp_path / "blob")
    file = download.RemoteFile("model.safetensors", 0, "etag", large=True)
    download._fetch_blob(Repo("org/name", "main"), "commit", file, meter=None)
    assert order == [("full", ""), ("rename", "blob")]


def test_a_conversion_is_forced_once_before_it_appears(tmp_path: Path, order: list[tuple[str, str]]) -> None:
    convert(make_source(tmp_path, "llama"), tmp_path / "out", method="round", verify=False)
    assert kinds(order).count("full") == 1
    assert [each for each in order if each != ("rename", "conversions.json")][-2:] == [("full", ""), ("rename", "out")]
    assert order[-1] == ("rename", "out")  # what notes it for a crash comes before


def test_a_file_system_that_does_not_know_it_is_synced_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def unknown(*_: object) -> int:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(files, "FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(fcntl, "fcntl", unknown)
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "file").open("wb") as file:
        files.to_disk(file.fileno())
        assert synced == [file.fileno()]


def test_the_chats_are_committed_past_the_drives_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **b: opened.append(connect(*a, **b)) or opened[-1])
    database = Database(tmp_path / "chats.sqlite3")
    assert opened[0].execute("PRAGMA fullfsync").fetchone()[0] == 1
    assert opened[0].execute("PRAGMA checkpoint_fullfsync").fetchone()[0] == 1
    database.close()

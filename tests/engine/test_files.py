"""Files: special or huge ones are refused by every reader; what is written is durable before its name exists."""

import contextlib
import fcntl
import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import within
from tests.quant.models import make_source
from tests.tiny import make_tiny
from tokamac.app import settings
from tokamac.app.chat.attachments import AttachError, read_file
from tokamac.app.commands import prompts
from tokamac.app.commands.bench import kv_quality
from tokamac.app.models import local
from tokamac.app.models.local import Folders
from tokamac.app.store import export
from tokamac.app.store.database import Database
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError
from tokamac.engine import ModelDamagedError, OptionError, files
from tokamac.engine.files import check_regular, exists, expanded, is_dir, open_regular, read_bytes, read_text
from tokamac.engine.hub import download
from tokamac.engine.hub.cache import Repo, is_whole, whole_snapshot
from tokamac.engine.model.config import read_config
from tokamac.engine.model.safetensors import find_shards
from tokamac.engine.perf import hardware
from tokamac.engine.prompt_cache import folder
from tokamac.engine.prompt_cache.folder import Folder, SegmentEntry, child_name, root_name
from tokamac.engine.text.tokenizer import generation_config, load_tokenizer
from tokamac.quant import convert, streaming
from tokamac.quant.report import front_matter, read_recorded
from tokamac.quant.resume import checksum, read_journal

# A path that can be none is one where nothing is.


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "~nobody\0", "~" + "a" * 300])
def test_a_home_that_nobody_has_stays_as_it_was_written(name: str) -> None:
    assert expanded(name) == Path(name)
    assert not exists(expanded(name))
    assert not is_dir(expanded(name))
    with pytest.raises(OptionError, match="no home folder"):
        expanded(name, strict=True)


def test_the_users_own_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/x", strict=True) == expanded(Path("~/x")) == tmp_path / "x"
    assert is_dir(expanded("~"))


@pytest.mark.parametrize("check", [exists, is_dir])
def test_where_a_name_is_too_long_nothing_is(tmp_path: Path, check: Callable[[Path], bool]) -> None:
    assert check(tmp_path)
    assert not check(tmp_path / ("a" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_in_a_folder_that_may_not_be_read_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "closed" / "model").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    try:
        assert not exists(tmp_path / "closed" / "model")
        assert not is_dir(tmp_path / "closed" / "model")
    finally:
        (tmp_path / "closed").chmod(0o700)


# What is a FIFO, a device, a socket or far too large in place of a file is refused at once, by every reader.

MODEL = "0" * 32
HUGE = 1 << 40


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)  # of no blocks


Make = Callable[[Path], None]
SPECIAL: list[Make] = [fifo, device, listening]
ALL: list[Make] = [*SPECIAL, huge]


@pytest.fixture(params=ALL, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture(params=SPECIAL, ids=lambda make: make.__name__)
def special(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model")
    return tmp_path / "model"


def replaced(path: Path, make: Make) -> Path:
    path.unlink(missing_ok=True)
    make(path)
    return path


def test_a_generous_bound_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert read_bytes(tmp_path / "file", 1 << 62) == b"x" * 1000


def test_a_regular_file_is_read_whole_and_as_text(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one\r\ntwo\n")
    assert read_bytes(file, 9) == b"one\r\ntwo\n"
    assert read_text(file) == "one\ntwo\n"
    (tmp_path / "link").symlink_to(file)
    assert read_bytes(tmp_path / "link", 9) == b"one\r\ntwo\n"
    with pytest.raises(OSError, match="it has 9 B or more, and may have 8 B"):
        read_bytes(file, 8)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    check_regular([file, tmp_path, tmp_path / "none"], 9)
    with pytest.raises(OSError, match="it has 9 B or more, and may have 8 B"):
        check_regular([file], 8)


def test_no_more_memory_is_taken_than_a_file_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    assert read_bytes(tmp_path / "a", 1 << 50) == b"x" * 1000
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty", 1 << 50) == b""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_file_whose_size_is_not_told_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLICE_BYTES", 100)
    assert b"VmRSS" in read_bytes("/proc/self/status", 1 << 20)
    with pytest.raises(OSError, match="it has 11 B or more, and may have 10 B"):
        read_bytes("/proc/self/status", 10)


def test_what_is_none_is_refused_and_named(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"FIFO|device|socket|it has 1.10 TB or more, and may have 1.00 kB") as caught:
        within(lambda: read_bytes(tmp_path / "a", 1000))
    assert caught.value.filename == str(tmp_path / "a")


def test_what_comes_after_the_look_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    looked = os.stat(tmp_path / "file")  # noqa: PTH116
    monkeypatch.setattr(os, "stat", lambda *_, **__: looked)
    with pytest.raises(OSError, match=r"FIFO"):
        within(lambda: open_regular(tmp_path / "fifo"))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("generation_config.json", generation_config),
        ("model.safetensors.index.json", find_shards),
        ("tokenizer_config.json", lambda folder: load_tokenizer(folder, {}, "it")),
        ("tokenizer.json", lambda folder: load_tokenizer(folder, {}, "it")),
        ("chat_template.jinja", lambda folder: load_tokenizer(folder, {}, "it")),
        ("special_tokens_map.json", lambda folder: load_tokenizer(folder, {}, "it")),
    ],
)
def test_a_models_small_file(model: Path, make: Make, name: str, read: Callable[[Path], Any]) -> None:
    replaced(model / name, make)
    with pytest.raises(ModelDamagedError, match=r"FIFO|device|socket|MB|is missing") as caught:
        within(lambda: read(model))
    assert name in caught.value.message
    assert caught.value.hint


def test_a_models_weights(model: Path, special: Make) -> None:
    replaced(model / "model.safetensors", special)
    with pytest.raises(ModelDamagedError, match=r"FIFO|device|socket"):
        within(lambda: find_shards(model))
    assert not within(lambda: is_whole(model))
    with pytest.raises(OSError, match=r"FIFO|device|socket"):
        within(lambda: folder.digest([model / "model.safetensors"], model))
    with pytest.raises(OSError, match=r"FIFO|device|socket"):
        within(lambda: checksum(model / "model.safetensors"))


def test_the_hubs_cache(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = Repo("org/name")
    repo.reference.parent.mkdir(parents=True)
    make(repo.reference)
    assert within(lambda: whole_snapshot(repo)) is None
    assert "org/name" not in within(lambda: local.names_on_disk(tmp_path))


def test_the_prompt_caches_files(tmp_path: Path, make: Make) -> None:
    folder = Folder(tmp_path / "prompts")
    name = child_name(root_name(MODEL, None), [1])
    whole = folder.write(MODEL, "a model", root_name(MODEL, None), name, b"x" * 100)
    for each in (whole.path, whole.path.parent / "model.txt", whole.path.parent / ".new-x", folder._ledger()):
        replaced(each, make)
    folder._budgets = type(folder._budgets)(total=1 << 20)
    assert within(lambda: folder.read(SegmentEntry(whole.parent, whole.name, whole.file, 100, 0.0))) is None
    assert within(folder.written_today) == 0
    within(folder.tidy)
    assert [usage.label for usage in within(folder.models)] == [""]


def test_what_is_kept_of_the_machine(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "kept.json")
    assert within(lambda: hardware.load(tmp_path / "kept.json")) == {}


def test_the_apps_own_files(tmp_path: Path, make: Make, special: Make) -> None:
    make(tmp_path / "settings.toml")
    loaded = within(lambda: settings.load(tmp_path / "settings.toml"))
    assert loaded.settings == settings.Settings()
    assert any("can't be read" in text for text in loaded.warnings)
    make(tmp_path / "folders.json")
    assert within(Folders(tmp_path / "folders.json").all) == ()
    (tmp_path / "chats").mkdir()
    special(tmp_path / "chats" / "chats.db")
    with pytest.raises(StoreError, match=r"FIFO|device|socket"):
        within(lambda: Store.open(tmp_path / "chats" / "chats.db"))


def test_files_that_the_user_names(tmp_path: Path, make: Make, no_stdin: None) -> None:
    path = tmp_path / "notes.txt"
    make(path)
    with pytest.raises(prompts.InputError):
        within(lambda: prompts.compose("what is it?", [str(path)]))
    with pytest.raises(prompts.InputError):
        within(lambda: kv_quality._read(str(path)))
    with pytest.raises(AttachError):
        within(lambda: read_file(str(path), tmp_path))
    with pytest.raises(StoreError):
        within(lambda: export.read(path, now=0.0))
    with pytest.raises(OptionError):
        within(lambda: streaming.calibration_text(path))


def test_a_conversions_files(tmp_path: Path, make: Make) -> None:
    for name in ("conversion.json", "README.md", "journal"):
        make(tmp_path / name)
    assert isinstance(within(lambda: read_recorded(tmp_path)), str)
    assert within(lambda: front_matter(tmp_path / "README.md")) == {}
    with contextlib.suppress(OSError):
        assert within(lambda: read_journal(tmp_path / "journal")).key is None


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_what_a_shell_hands_over_as_a_file_is_read(no_stdin: None) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a diff")
    os.close(writing)
    try:
        assert "a diff" in within(lambda: prompts.compose("Review it", [f"/dev/fd/{reading}"]))
    finally:
        os.close(reading)


# What is on the disk before a name leads to it, as macOS needs to be told; recorded, as only a loss of power would
# tell.

FULL_SYNC = 51  # F_FULLFSYNC, of macOS' <sys/fcntl.h>


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


def test_it_is_written_before_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[tuple[str, str]]
) -> None:
    class Arrived:
        """A transfer whose bytes are all there: the network's part is in tests/engine/hub."""

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
    noted = [("full", ""), ("rename", "conversions.json")]  # for a crash: once more, and before
    at = order.index(noted[1]) - 1
    assert order[at : at + 2] == noted
    del order[at : at + 2]
    assert kinds(order).count("full") == 1
    assert order[-2:] == [("full", ""), ("rename", "out")]


def test_a_file_system_without_it_is_synced_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("nbytes", "said"), [(16 << 30, "16 GB"), (512 << 30, "512 GB"), (16_777_216_000, "16.8 GB")])
def test_memory_is_called_what_it_is_sold_as(nbytes: int, said: str) -> None:
    assert files.memory_size(nbytes) == said

"""Stored segments: whole or not there, within their budgets; and a computed prompt as a portable file."""

import contextlib
import datetime
import fcntl
import json
import os
import random
import signal
import stat
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.helpers import write_model, write_peft
from tests.engine.prompt_cache.segment_writer import MODEL, writers
from tests.tiny import make_tiny
from tokamac.engine import Engine, KVSpec, Message, PromptCacheSpec, Sampling
from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.lab.exchange import Exchanged
from tokamac.engine.prompt_cache import folder as folder_module
from tokamac.engine.prompt_cache.folder import (
    MAGIC,
    TAIL_BYTES,
    Budgets,
    Folder,
    FullError,
    SegmentEntry,
    child_name,
    identity,
    least_used_first,
    read_portable,
    root_name,
)

ROOT = root_name(MODEL, None)


def store(folder: Folder, number: int, size: int = 1000, parent: str = ROOT) -> SegmentEntry:
    return folder.write(MODEL, "a model", parent, child_name(parent, [number]), bytes([number % 256]) * size)


def test_what_was_written_is_read_and_only_the_user_may(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cache")
    entry = store(folder, 7)
    assert folder.read(entry) == b"\7" * 1000
    assert [each.path for each in folder.entries(MODEL)] == [entry.path]
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.root, entry.path.parent)} == {0o700}
    (usage,) = folder.models()
    assert (usage.label, usage.files, usage.bytes) == ("a model", 1, 1000)


def test_any_flipped_byte_and_any_missing_one_is_a_miss_and_the_file_goes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for at in range(300):
        entry = store(folder, at % 7, 300)
        data = bytearray(entry.path.read_bytes())
        data[at] ^= 1 << at % 8
        entry.path.write_bytes(data)
        assert folder.read(entry) is None
        assert not entry.path.exists()
    entry = store(folder, 1)
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    assert folder.read(entry) is None


def test_the_total_is_kept_by_dropping_what_was_not_used_for_longest(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Budgets(total=3500))
    entries = [store(folder, number) for number in range(3)]
    for age, entry in enumerate(entries):
        os.utime(entry.path, (1000 + age, 1000 + age))
    assert folder.read(entries[0]) is not None  # which makes it the last used
    store(folder, 9)
    assert {entry.name for entry in folder.entries(MODEL)} == {child_name(ROOT, [number]) for number in (0, 2, 9)}
    with pytest.raises(FullError):
        store(folder, 3, 4000)


def test_what_others_continue_is_dropped_after_them() -> None:
    def entry(name: str, parent: str, used: float) -> SegmentEntry:
        return SegmentEntry(parent, name, name, 1, used)

    entries = [entry("a", "", 1), entry("b", "a", 2), entry("c", "b", 9), entry("d", "", 5)]
    assert [each.name for each in least_used_first(entries)] == ["d", "c", "b", "a"]


def test_the_daily_budget_counts_all_processes_and_begins_anew(tmp_path: Path) -> None:
    day = datetime.date(2026, 3, 1)
    folders = [Folder(tmp_path, Budgets(daily=2500), today=lambda: day) for _ in range(2)]
    for number, folder in enumerate(folders):
        store(folder, number)
    with pytest.raises(FullError, match="daily"):
        store(folders[0], 5)
    assert folders[1].written_today() == 2000
    day = datetime.date(2026, 3, 2)
    store(folders[0], 5)
    folders[0].tidy()
    assert [path.name for path in tmp_path.glob("written-*")] == ["written-2026-03-02"]


def test_making_room_makes_some_more_so_that_the_next_write_need_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Budgets(total=100_000))
    for number in range(99):
        store(folder, number)
    store(folder, 99, 3000)
    assert sum(entry.size for entry in folder.entries(MODEL)) <= 98_000


@pytest.fixture
def all_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half written may be tidied away at once."""
    monkeypatch.setattr(folder_module, "LEAST_AGE_S", 0.0)


@pytest.mark.usefixtures("all_old")
def test_what_a_living_writer_writes_is_left_alone_whatever_its_number(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    store(folder, 1)
    for name in (".new-999999-of-another-container", ".new-left"):
        (tmp_path / MODEL / name).write_bytes(b"half")
    with (tmp_path / MODEL / ".new-999999-of-another-container").open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        folder.tidy()
        assert [path.name for path in (tmp_path / MODEL).glob(".new-*")] == [".new-999999-of-another-container"]


def test_clearing_removes_all_models(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    store(folder, 1)
    folder.write("cd" * 16, "another", ROOT, child_name(ROOT, [1]), b"x" * 50)
    (tmp_path / "not ours").mkdir()
    assert folder.clear() == 1050
    assert folder.models() == []
    assert (tmp_path / "not ours").is_dir()
    assert Folder(tmp_path / "nowhere").clear() == 0


@pytest.mark.usefixtures("all_old")
def test_killed_at_any_moment_nothing_half_done_counts_as_whole(tmp_path: Path) -> None:
    chance = random.Random(5)
    folder = Folder(tmp_path / "cache")
    seen = 0
    with writers(folder.root) as each:
        for _ in range(200):
            writer, least = each.begin(), chance.randrange(3)
            while sum(1 for _ in folder.entries(MODEL)) < least:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
            assert each.ended() == signal.SIGKILL
            for entry in folder.entries(MODEL):
                data = folder.read(entry)
                assert data == data[:1] * len(data)
                assert len(data) >= 20000
                seen += 1
            folder.tidy()
            assert not list((folder.root / MODEL).glob(".new-*"))
            with contextlib.suppress(FileNotFoundError):
                folder.clear()
    assert seen > 100


def test_two_processes_share_the_folder(tmp_path: Path) -> None:
    with writers(tmp_path) as one, writers(tmp_path) as other:
        begun = [(each, each.begin()) for each in (one, other)]
        folder = Folder(tmp_path)
        while sum(1 for _ in folder.entries(MODEL)) < 50:
            time.sleep(0.05)
            folder.tidy()
        for each, writer in begun:
            os.kill(writer, signal.SIGKILL)
            assert each.ended() == signal.SIGKILL  # neither had failed
    entries = list(folder.entries(MODEL))
    assert len(entries) >= 50
    assert all(folder.read(entry) is not None for entry in entries)


def fingerprint(folder: Path, kv: KVSpec, weights: str, **more: object) -> str:
    return identity(folder, kv, weights, **more).fingerprint


def test_names_tell_apart_what_differs(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    base = fingerprint(model, KVSpec(), "weights")
    assert base == fingerprint(model, KVSpec(on_full="error"), "weights")  # which changes no key and no value
    others = {
        fingerprint(model, KVSpec(8, 8), "weights"),
        fingerprint(model, KVSpec(window=64), "weights"),
        fingerprint(model, KVSpec(), "weights", dtype="float16"),
        fingerprint(model, KVSpec(), "other weights"),
        fingerprint(make_tiny(tmp_path / "other context", context=256), KVSpec(), "weights"),
    }
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("assistant", "helper"), encoding="utf-8")
    others.add(fingerprint(model, KVSpec(), "weights"))
    assert len(others | {base}) == 7


def test_another_version_of_this_package_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, version = make_tiny(tmp_path / "model"), metadata.version
    here = fingerprint(model, KVSpec(), "weights")
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == "tokamac" else version(name))
    assert fingerprint(model, KVSpec(), "weights") != here


def test_names_are_of_all_that_comes_before() -> None:
    base = MODEL
    assert len({root_name(base, keep) for keep in (None, 0, 4)}) == 3
    assert child_name(child_name(ROOT, [1]), [2]) != child_name(ROOT, [1, 2])


def test_a_library_that_writes_prompts_to_the_disk_says_so_first() -> None:
    for documented in (Engine.load, PromptCacheSpec):
        first = (documented.__doc__ or "").strip().splitlines()[0]
        assert "on disk" in first
    assert "user's cache folder" in (Engine.load.__doc__ or "")


# A computed prompt as a file: what is computed from it is what a cold run computes, for its own model and nobody
# else's.

TEXT = "The river had risen in the night, and nobody slept. " * 8
IDS = [3 + i * 7 % 250 for i in range(330)]
GREEDY = Sampling(temperature=0, max_tokens=12)
PLAIN, RING = KVSpec(), KVSpec(window=64, keep=4)


def engine(folder: Path, root: Path | None, kv: KVSpec = PLAIN, **more: object) -> Engine:
    cache = None if root is None else PromptCacheSpec(folder=root)
    return Engine.load(folder, kv=kv, prompt_cache=cache, **more)  # type: ignore[arg-type]


def export(folder: Path, file: Path, kv: KVSpec = PLAIN, **more: object) -> Exchanged:
    with engine(folder, file.parent / "exporting", kv, **more) as one:
        *_, found = one.export_prompt(IDS, file)
    assert isinstance(found, Exchanged)
    return found


def stored(root: Path) -> list[Path]:
    return sorted(
        path for path in root.rglob("*") if path.is_file() and path.parent != root and path.name != "model.txt"
    )


@pytest.mark.usefixtures("all_worth_storing")
@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(8, 4, group_size=32), RING], ids=["plain", "packed", "ring"])
def test_after_an_import_warm_is_as_cold(tiny: Path, tmp_path: Path, kv: KVSpec) -> None:
    found = export(tiny, tmp_path / "prompt.kv", kv)
    assert (found.tokens, found.nbytes) == (len(IDS) - 1, (tmp_path / "prompt.kv").stat().st_size)
    with engine(tiny, None, kv) as cold:
        *_, expected = cold.generate(IDS, GREEDY)
    with engine(tiny, tmp_path / "importing", kv) as one:
        taken = one.import_prompt(tmp_path / "prompt.kv")
        assert taken.new_bytes > 0
        *_, warm = one.generate(IDS, GREEDY)
        assert one.import_prompt(tmp_path / "prompt.kv").new_bytes == 0
    with engine(tiny, tmp_path / "importing", kv) as one:  # the reply was stored at the end, its beginning within it
        assert one.import_prompt(tmp_path / "prompt.kv").new_bytes == 0
    assert warm.metrics.cached_tokens == len(IDS) - 1
    assert warm.text == expected.text


@pytest.mark.usefixtures("all_worth_storing")
def test_what_is_certain_of_messages_is_exported_however_they_go_on(tiny: Path, tmp_path: Path) -> None:
    said = [Message("system", TEXT), Message("user", "About this: ")]
    with engine(tiny, tmp_path / "one") as one:
        *_, found = one.export_prompt(said, tmp_path / "prompt.kv", goes_on=True)
    with engine(tiny, tmp_path / "other") as other:
        other.import_prompt(tmp_path / "prompt.kv")
        *_, end = other.generate([said[0], Message("user", "About this: who slept?")], GREEDY)
    assert end.metrics.cached_tokens == found.tokens > len(TEXT)


@pytest.mark.usefixtures("all_worth_storing")
def test_it_belongs_to_its_model_adapter_and_settings(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.kv"
    export(tiny, file)
    other = write_model(tmp_path / "other", seed=7)
    renamed = write_model(tmp_path / "renamed", rms_norm_eps=1e-6)
    adapter = write_peft(tmp_path / "adapter", tiny)
    cases = (
        (other, {}, "other weights"),
        (renamed, {}, "another config"),
        (tiny, {"adapter": adapter}, "adapter"),
        (tiny, {"kv": KVSpec(8, 8, group_size=32)}, "other KV settings"),
    )
    for folder, more, said in cases:
        with engine(folder, tmp_path / "importing", **more) as one, pytest.raises(TokamacError, match=said):  # type: ignore[arg-type]
            one.import_prompt(file)
    assert stored(tmp_path / "importing") == []


@pytest.mark.usefixtures("all_worth_storing")
def test_any_byte_that_is_not_as_written_is_refused_and_nothing_is_stored(tiny: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "prompt.kv", tmp_path / "copy.kv"
    export(tiny, file)
    whole = file.read_bytes()
    with engine(tiny, tmp_path / "importing") as one:
        for at in (0, len(MAGIC) + 100, len(whole) // 2, len(whole) - 500, len(whole) - TAIL_BYTES, len(whole) - 1):
            copy.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(TokamacError, match=r"damaged|not a computed prompt"):
                one.import_prompt(copy)
        for data in (b"", MAGIC, whole[:-1], whole + b"x", whole[: len(whole) // 2], b"\x80\x04." * 50):
            copy.write_bytes(data)
            with pytest.raises(TokamacError, match=r"damaged|not a computed prompt"):
                one.import_prompt(copy)
        with pytest.raises(TokamacError, match="no file"):
            one.import_prompt(tmp_path / "nothing")
    assert stored(tmp_path / "importing") == []


@pytest.mark.usefixtures("all_worth_storing")
def test_a_file_with_right_checksums_and_wrong_contents_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Whoever makes a file can make its checksums, too."""
    export(tiny, tmp_path / "prompt.kv")
    parts, made = taken_apart(tmp_path / "prompt.kv")
    shorter = write_model(tmp_path / "narrow", head_dim=16)
    export(shorter, tmp_path / "narrow.kv")
    narrow = (tmp_path / "narrow.kv").read_bytes()[len(MAGIC) :][: read_portable(tmp_path / "narrow.kv").segments[0][2]]

    def slots(change: Callable[[np.ndarray], np.ndarray]) -> Path:
        return made([rewritten(part, change) for part in parts])

    with engine(tiny, tmp_path / "importing") as one:
        for bad in (
            lambda: made([parts[1], parts[0]]),
            lambda: made([narrow, parts[1]]),
            lambda: made([b"\0" * 64, parts[1]]),
            lambda: made(parts, tokens=5),
            lambda: made(parts, keep=3),
            lambda: made(parts, kv={"key_bits": 7}),
            lambda: made(parts, identity=[]),
            lambda: slots(lambda array: array[..., :10, :]),
            lambda: slots(lambda array: array[..., :0, :]),
            lambda: slots(lambda array: array.reshape(-1)),
            lambda: slots(lambda array: array.reshape(-1)[0]),
            lambda: slots(lambda _: None),
        ):
            with pytest.raises(TokamacError, match="damaged"):
                one.import_prompt(bad())
        assert stored(tmp_path / "importing") == []
        assert one.import_prompt(made(parts)).new_bytes > 0


@pytest.mark.usefixtures("all_worth_storing")
def test_states_that_are_not_of_all_tokens_are_refused(tiny: Path, tmp_path: Path) -> None:
    export(tiny, tmp_path / "prompt.kv", RING)
    (part,), made = taken_apart(tmp_path / "prompt.kv")

    def counted(numbers: list[dict[str, int]]) -> list[dict[str, int]]:
        return [{**each, "offset": each["offset"] - 5} for each in numbers]

    with engine(tiny, tmp_path / "importing", RING) as one:
        for change in (counted, lambda _: None, lambda numbers: numbers[:1]):
            with pytest.raises(TokamacError, match="damaged"):
                one.import_prompt(made([rewritten(part, lambda array: array, change)]))
        assert stored(tmp_path / "importing") == []
        assert one.import_prompt(made([rewritten(part, lambda array: array)])).new_bytes > 0


def taken_apart(file: Path) -> tuple[list[bytes], Callable[..., Path]]:
    """Return the segments of a computed prompt, and what writes others in their place, with right checksums."""
    import xxhash

    of, whole, at = read_portable(file), file.read_bytes(), len(MAGIC)
    parts = []
    for *_, size, _ in of.segments:
        parts.append(whole[at : at + size])
        at += size
    footer = json.loads(whole[at:-TAIL_BYTES])

    def made(parts: list[bytes], **changes: object) -> Path:
        listed = [
            [parent, name, len(data), xxhash.xxh3_128_hexdigest(data)]
            for (parent, name, *_), data in zip(footer["segments"], parts, strict=False)
        ]
        text = json.dumps({**footer, "segments": listed, **changes}).encode()
        length = len(text).to_bytes(8, "little")
        path = file.with_name("made.kv")
        path.write_bytes(MAGIC + b"".join(parts) + text + length + xxhash.xxh3_128_digest(MAGIC + text + length))
        return path

    return parts, made


def rewritten(
    part: bytes, change: Callable[[np.ndarray], Any], numbers: Callable[[list[Any]], Any] = lambda numbers: numbers
) -> bytes:
    """Return a segment with other arrays, where ``change`` returns any, and other numbers in its states."""
    from safetensors.numpy import load, save

    about = json.loads(part[8 : 8 + int.from_bytes(part[:8], "little")])["__metadata__"]
    about["numbers"] = json.dumps(numbers(json.loads(about["numbers"])))
    arrays = {name: array if name == "t" else change(array) for name, array in load(part).items()}
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    return save(kept, metadata=about)


@pytest.mark.usefixtures("all_worth_storing")
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=str)
def test_an_import_that_does_not_end_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    file = tmp_path / "prompt.kv"
    export(tiny, file)
    write, calls = Folder.write, []

    def failing(self: Folder, *arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise failure
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "write", failing)
    with engine(tiny, tmp_path / "importing") as one:
        with pytest.raises((KeyboardInterrupt, TokamacError)):
            one.import_prompt(file)
        assert len(calls) == 2
        assert stored(tmp_path / "importing") == []


@pytest.mark.usefixtures("all_worth_storing")
def test_an_export_is_whole_and_overwrites_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken.kv"
    taken.write_text("mine")
    with engine(tiny, tmp_path / "cache") as one:
        with pytest.raises(OptionError, match="already exists"):
            list(one.export_prompt(IDS, taken))
        assert taken.read_text() == "mine"
        with pytest.raises(OptionError, match="in a moment"):
            list(one.export_prompt(IDS[:10], tmp_path / "short.kv"))
        with pytest.raises(OptionError, match="can't be written"):
            list(one.export_prompt(IDS, tmp_path / "nowhere" / "prompt.kv"))
        steps = one.export_prompt(IDS, tmp_path / "stopped.kv")
        next(steps)
        steps.close()
        one.between(lambda: None)  # once it has heard of it
        stopped = tmp_path / "stopped.kv"
        if stopped.exists():  # the engine may be ahead of who reads: then it is whole
            assert one.import_prompt(stopped).tokens == len(IDS) - 1
            stopped.unlink()
    with engine(tiny, None) as off, pytest.raises(OptionError, match="off"):
        list(off.export_prompt(IDS, tmp_path / "off.kv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "taken.kv"]

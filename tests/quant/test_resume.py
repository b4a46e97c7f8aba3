"""Unfinished conversions: resumed behind the last tensor, whatever a disk, another process or a changed mind did."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quant.dying import interpreter
from tests.quant.models import make_source, names_in
from tests.quant.test_failures import rewrite
from tokamac.engine.errors import ConversionError
from tokamac.engine.files import exchange
from tokamac.quant import resume
from tokamac.quant.conversion import FINISHED, convert
from tokamac.quant.options import Options
from tokamac.quant.report import WeightError
from tokamac.quant.resume import (
    AFRESH,
    MODEL,
    OLD,
    SPARE_BYTES,
    Journal,
    TensorEntry,
    check_space,
    check_target,
    checksum,
    claimed,
    conversion_key,
    intact,
    open_work_dir,
    partial_folder,
    read_journal,
)

# A conversion that was cut off goes on behind the last tensor, and ends byte for byte as if it never had been.


def points_of(few, many):
    """How many points are tried in each run, and by ``make test-all``."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.exhaustive)])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def converting():
    with interpreter() as started:
        yield started


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("a model"), "tied", shards=2, max_position_embeddings=64)


@pytest.fixture(scope="module")
def uninterrupted(converting, source, tmp_path_factory):
    """What a run from beginning to end writes, and at how many points it touches the disk."""
    out = tmp_path_factory.mktemp("reference") / "out"
    outcome = converting.convert(source, out)
    assert outcome.error == ""
    assert len(list(out.glob("*.safetensors"))) > 3
    return contents(out), outcome.points


def tensors(source):
    return {name for shard in source.glob("*.safetensors") for name in mx.load(str(shard))}


def old_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "old.txt").write_text("old")
    return contents(folder)


def chosen(points, count):
    """Return so many of them, evenly from the first to the last."""
    return [1 + number * (points - 1) // (count - 1) for number in range(count)]


@points_of(14, 50)
def test_killed_anywhere_the_same_command_ends_with_the_same_bytes(converting, source, uninterrupted, tmp_path, count):
    expected, points = uninterrupted
    resumed = []
    for point in chosen(points, count):
        out = tmp_path / str(point) / "out"
        killed = converting.convert(source, out, dies_at=point)
        assert killed.signal == signal.SIGKILL, point
        assert not out.exists() or contents(out) == expected, point
        again = converting.convert(source, out)
        # Killed after the last rename, the model is there, and only rubbish is left to remove.
        assert again.error == "" or ("already exists" in again.error and contents(out) == expected), (point, again)
        assert contents(out) == expected, point
        assert names_in(out.parent) == {"out"}, point
        resumed.append(again.resumed)
    assert resumed[0] == 0
    assert max(resumed) == len(tensors(source))


@points_of(3, 10)
@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_while_replacing_there_is_old_or_new(converting, source, uninterrupted, tmp_path, *, exchanges, count):
    if exchanges and not _can_exchange(tmp_path):
        pytest.skip("this file system can't exchange names")
    expected, _ = uninterrupted
    old = old_model(tmp_path / "out")
    points = converting.convert(source, tmp_path / "out", overwrite=True, exchanges=exchanges).points
    shutil.rmtree(tmp_path / "out")
    swapping = range(points - 24, points + 1)  # the last calls: the small files, the swap, the removal
    states = set()
    for point in sorted({*chosen(points, count), *swapping}):
        out = tmp_path / str(point) / "out"
        out.parent.mkdir()
        old_model(out)
        died = converting.convert(source, out, overwrite=True, exchanges=exchanges, dies_at=point)
        assert died.signal == signal.SIGKILL
        assert out.exists() or not exchanges, point  # at no moment is there nothing
        aside = partial_folder(out) / OLD
        found = contents(out) if out.exists() else contents(aside)
        assert found in (old, expected), point
        states.add("old" if found == old and out.exists() else "new" if out.exists() else "aside")
        again = converting.convert(source, out, overwrite=True)
        assert again.error == "", (point, again)
        assert contents(out) == expected, point
        assert names_in(out.parent) == {"out"}, point
    assert states == ({"old", "new"} if exchanges else {"old", "aside", "new"})


def _can_exchange(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
    try:
        return exchange(folder / "a", folder / "b")
    finally:
        (folder / "a").rmdir()
        (folder / "b").rmdir()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_command_after_a_crash_after_the_last_rename_is_done(converting, source, tmp_path, overwrite):
    how = {"whole": True, "method": "round", "bits": 8, "verify": False}
    points = converting.convert(source, tmp_path / "first" / "out", **how).points
    late = 0
    for point in range(points - 12, points + 1):
        out = tmp_path / f"{point}" / "out"
        out.parent.mkdir()
        if overwrite:
            old_model(out)
        converting.convert(source, out, overwrite=overwrite, dies_at=point, **how)
        done = (out / "conversion.json").exists()
        changed = out.stat().st_ino if done else None
        again = converting.convert(source, out, overwrite=overwrite, **how)
        assert again.error == "", point
        assert contents(out) == contents(tmp_path / "first" / "out"), point
        assert names_in(out.parent) == {"out"}, point
        if done and again.seen == ():
            late += 1
            assert out.stat().st_ino == changed
    assert late > 1


def test_a_finished_conversion_is_not_done_twice_and_no_other_is_taken_for_it(tmp_path):
    source = make_source(tmp_path, "tied")
    out, how = tmp_path / "out", {"method": "round", "bits": 8, "verify": False}
    first, again = convert(source, out, **how), convert(source, out, **how)
    assert again.notes == (FINISHED,)
    assert (again.path, again.weight_bytes, again.source_bytes) == (first.path, first.weight_bytes, first.source_bytes)
    assert again.bits_per_weight == pytest.approx(first.bits_per_weight, rel=1e-3)
    with pytest.raises(ConversionError, match="already exists"):
        convert(source, out, **{**how, "bits": 4})
    assert FINISHED not in convert(source, out, overwrite=True, **how).notes  # asked for, it is done again
    shard = next(source.glob("*.safetensors"))
    os.utime(shard, ns=(0, 0))  # another source: only its time tells
    with pytest.raises(ConversionError, match="already exists"):
        convert(source, out, **how)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_old_model_left_aside_is_put_back_by_the_next_look(converting, source, uninterrupted, tmp_path, overwrite):
    out = tmp_path / "out"
    old = old_model(out)
    converting.convert(source, out, overwrite=True, dies_at=100)
    out.rename(partial_folder(out) / OLD)  # as between the two renames
    again = converting.convert(source, out, overwrite=overwrite)
    assert contents(out) == (uninterrupted[0] if overwrite else old)
    assert ("already exists" in again.error) != overwrite


@points_of(7, 20)
def test_ctrl_c_anywhere_leaves_what_the_next_run_goes_on_with(converting, source, uninterrupted, tmp_path, count):
    expected, points = uninterrupted
    for point in chosen(points, count):
        out = tmp_path / str(point) / "out"
        stopped = converting.convert(source, out, dies_at=point, by=signal.SIGINT)
        assert (stopped.signal, stopped.error) == (0, "interrupted"), point
        if not out.exists():
            assert ("run the same command again" in stopped.hint) == partial_folder(out).exists(), point
            again = converting.convert(source, out)
            assert again.error == "", point
            assert again.resumed in (len(stopped.seen), len(stopped.seen) + 1), point
        else:
            assert stopped.hint == "", point
        assert contents(out) == expected, point


def test_ctrl_c_before_anything_is_done_leaves_nothing(converting, source, tmp_path):
    stopped = converting.convert(source, tmp_path / "out", dies_at=5, by=signal.SIGINT)
    assert (stopped.error, stopped.hint) == ("interrupted", "")
    assert names_in(tmp_path) == set()


def test_progress_begins_where_the_earlier_run_ended(converting, source, uninterrupted, tmp_path):
    out, total = tmp_path / "out", len(tensors(source))
    first = converting.convert(source, out, dies_at=80, by=signal.SIGINT)
    assert first.seen == tuple(range(1, len(first.seen) + 1))
    again = converting.convert(source, out)
    assert again.seen == tuple(range(again.resumed, total + 1))
    assert again.resumed > 3


def test_a_result_of_an_earlier_stage_is_read_and_not_measured_again(converting, source, uninterrupted, tmp_path):
    out = tmp_path / "out"
    converting.convert(source, out, dies_at=80, measured="the first run's")
    converting.convert(source, out, measured="the second run's")
    assert (out / "README.md").read_text().startswith("the first run's ")


def test_a_finished_conversion_leaves_only_the_model(converting, source, uninterrupted, tmp_path):
    converting.convert(source, tmp_path / "out")
    assert names_in(tmp_path) == {"out"}
    assert not {"journal", "kept", MODEL} & names_in(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "times"), [({"method": "round"}, 4), ({"calibration": "shipped"}, 2), ({"method": "gptq"}, 2)], ids=str
)
def test_the_whole_command_is_killed_and_ends_with_the_same_bytes(converting, source, tmp_path, options, times):
    whole = converting.convert(source, tmp_path / "whole", whole=True, **options)
    assert whole.error == ""
    for point in chosen(whole.points - 20, times):
        out = tmp_path / str(point)
        assert converting.convert(source, out, whole=True, dies_at=point, **options).signal == signal.SIGKILL
        again = converting.convert(source, out, whole=True, **options)
        assert again.error == "", point
        assert contents(out) == contents(tmp_path / "whole"), point


# What a disk, another process or a changed mind can do to an unfinished conversion.

HALF_WAY = 100


@pytest.fixture
def own_source(tmp_path):
    return make_source(tmp_path, "tied")


@pytest.fixture(scope="module")
def whole(converting, tmp_path_factory):
    """What a conversion of the source writes that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    converting.convert(make_source(folder, "tied"), folder / "out")
    return contents(folder / "out")


@pytest.fixture
def begun(converting, own_source, tmp_path, whole):
    """A conversion to ``out`` that was killed half way, and what it would have written."""
    assert converting.convert(own_source, tmp_path / "out", dies_at=HALF_WAY).signal == signal.SIGKILL
    return whole


def shards(out):
    return sorted((partial_folder(out) / MODEL).glob("*.safetensors"))


# What the disk does


@pytest.mark.parametrize("where", [(0, 0), (0, -1), (1, 0), (1, 4_000), (1, -1)], ids=str)
def test_a_byte_that_changed_is_found_and_written_again(converting, own_source, begun, tmp_path, where):
    shard = shards(tmp_path / "out")[where[0]]
    content = bytearray(shard.read_bytes())
    content[where[1]] ^= 1
    before = len(read_journal(partial_folder(tmp_path / "out") / "journal").records)
    shard.write_bytes(content)
    again = converting.convert(own_source, tmp_path / "out")
    assert again.resumed < before
    assert contents(tmp_path / "out") == begun


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "folder", "link"])
def test_a_shard_that_is_not_what_was_written_is_written_again(converting, own_source, begun, tmp_path, damage):
    shard = shards(tmp_path / "out")[1]
    content = shard.read_bytes()
    shard.unlink()
    if damage == "folder":
        shard.mkdir()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        shard.symlink_to(tmp_path / "elsewhere")
    elif damage != "gone":
        shard.write_bytes(content[:-1] if damage == "cut" else content + b"torn")
    assert converting.convert(own_source, tmp_path / "out").error == ""
    assert contents(tmp_path / "out") == begun
    assert damage != "link" or (tmp_path / "elsewhere").read_bytes() == content


def test_foreign_files_in_the_partial_folder_do_not_get_into_the_model(converting, own_source, begun, tmp_path):
    root = partial_folder(tmp_path / "out")
    for folder in (root, root / MODEL, root / "kept"):
        (folder / "mine.txt").write_text("mine")
        (folder / "things").mkdir()
        (folder / "things" / "mine.txt").write_text("mine")
    assert converting.convert(own_source, tmp_path / "out").error == ""
    assert contents(tmp_path / "out") == begun
    assert ".out.partial" not in names_in(tmp_path)


def test_a_damaged_result_of_an_earlier_stage_is_measured_again(converting, own_source, begun, tmp_path):
    (stored,) = (partial_folder(tmp_path / "out") / "kept").iterdir()
    stored.write_bytes(b"mOments")
    assert converting.convert(own_source, tmp_path / "out").error == ""
    assert contents(tmp_path / "out") == begun


@pytest.mark.parametrize("limit", [4_000, 20_000])
def test_a_disk_that_fills_up_keeps_what_is_written(converting, own_source, tmp_path, limit):
    """RLIMIT_FSIZE stands in for the full disk: a write beyond it is done in part, and the next one fails."""
    converting.convert(own_source, tmp_path / "whole")
    full = converting.convert(own_source, tmp_path / "out", file_bytes=limit)
    assert "can't be written: File too large" in full.error
    assert "Free some space" in full.hint
    assert "run the same command again" in full.hint
    assert "out" not in names_in(tmp_path)
    assert converting.convert(own_source, tmp_path / "out").error == ""
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bytes_that_are_written_already_need_no_more_room(tmp_path, monkeypatch):
    root = partial_folder(tmp_path / "out")
    (root / MODEL).mkdir(parents=True)
    (root / MODEL / "shard").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": SPARE_BYTES + 500})())
    check_space(tmp_path / "out", 1500)
    with pytest.raises(ConversionError, match=r"needs 16,778,717 B and its disk has 16,778,716 B left"):
        check_space(tmp_path / "out", 1501)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody may write")
def test_a_folder_that_may_not_be_written_is_told_with_another_way_out():
    with (
        pytest.raises(ConversionError, match="can't be written: ") as told,
        open_work_dir(Path("/sys/kernel/out"), "key"),
    ):
        pass
    assert told.value.hint == "Check its disk and permissions, or choose another folder."


# Another mind


@pytest.mark.parametrize("change", [{"bits": 3}, {"group_size": 32}, {"embed_bits": 8}, {"dtype": "float16"}], ids=str)
def test_other_options_start_afresh(converting, own_source, begun, tmp_path, change):
    again = converting.convert(own_source, tmp_path / "out", measured="other moments", **change)
    assert (again.resumed, again.notes, again.error) == (0, (AFRESH,), "")
    converting.convert(own_source, tmp_path / "other", measured="other moments", **change)
    assert contents(tmp_path / "out") == contents(tmp_path / "other") != begun


def test_options_that_no_weight_depends_on_go_on(converting, own_source, begun, tmp_path):
    again = converting.convert(own_source, tmp_path / "out", verify=False)
    assert again.resumed > 0
    assert again.notes == ()
    assert contents(tmp_path / "out") == begun


def test_what_another_plan_wrote_is_written_again(converting, own_source, begun, tmp_path):
    again = converting.convert(own_source, tmp_path / "out", shard_bytes=60_000)
    assert again.seen[0] == 1
    converting.convert(own_source, tmp_path / "other", shard_bytes=60_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "other") != begun


def test_a_source_that_changed_meanwhile_starts_afresh(converting, own_source, begun, tmp_path):
    rewrite(own_source, lambda arrays: arrays.update({"model.norm.weight": arrays["model.norm.weight"] * 2}))
    again = converting.convert(own_source, tmp_path / "out")
    assert (again.resumed, again.notes) == (0, (AFRESH,))
    converting.convert(own_source, tmp_path / "other")
    assert contents(tmp_path / "out") == contents(tmp_path / "other") != begun


def test_a_key_tells_what_counts_from_what_does_not(own_source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one")
    options = Options(calibration=text)
    key = conversion_key(own_source, options, None)
    assert conversion_key(own_source, replace(options, verify=False), None) == key
    assert conversion_key(own_source, replace(options, bits=3), None) != key
    text.write_text("two")
    assert conversion_key(own_source, options, None) != key
    text.write_text("one")
    (own_source / ".DS_Store").write_text("seen by a file manager")
    assert conversion_key(own_source, options, None) == key
    config = json.loads((own_source / "config.json").read_text())
    (own_source / "config.json").write_text(json.dumps({**config, "rope_theta": 2.0}))
    assert conversion_key(own_source, options, None) != key
    (own_source / "config.json").write_text(json.dumps(config))
    assert conversion_key(own_source, options, None) == key
    os.utime(own_source / "model.safetensors", ns=(1, 1))
    assert conversion_key(own_source, options, None) != key


def test_a_tensor_that_is_not_a_number_leaves_nothing_behind(converting, own_source, tmp_path):
    def poison(arrays):
        arrays["model.norm.weight"] = arrays["model.norm.weight"] * float("nan")

    rewrite(own_source, poison)
    told = converting.convert(own_source, tmp_path / "out")
    assert told.error.startswith("model.norm.weight")
    assert len(told.seen) > 3
    assert names_in(tmp_path) == {"source"}


# Others


def test_two_at_once_the_second_is_told_and_harms_nothing(converting, own_source, begun, tmp_path):
    with claimed(tmp_path / "out"):
        before = contents(partial_folder(tmp_path / "out"))
        told = converting.convert(own_source, tmp_path / "out")
        assert told.error == f"another conversion is writing to {tmp_path / 'out'}"
        assert contents(partial_folder(tmp_path / "out")) == before
    assert converting.convert(own_source, tmp_path / "out").resumed > 0
    assert contents(tmp_path / "out") == begun


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    def meanwhile():
        with open_work_dir(tmp_path / "out", "key") as place:
            place.stage("stage", lambda: b"work")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "mine.txt").write_text("mine")

    with pytest.raises(ConversionError, match="appeared meanwhile"):
        meanwhile()
    assert names_in(tmp_path / "out") == {"mine.txt"}
    shutil.rmtree(tmp_path / "out")
    with open_work_dir(tmp_path / "out", "key") as place:
        assert place.stage("stage", pytest.fail) == b"work"


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_only_has_the_name_of_a_partial_folder_is_left_alone(tmp_path, kind):
    root = partial_folder(tmp_path / "out")
    if kind == "file":
        root.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.mkdir()
        (root / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    check_target(tmp_path / "out", tmp_path / "source", overwrite=False)
    with pytest.raises(ConversionError, match="in the way"), open_work_dir(tmp_path / "out", "key"):
        pass
    assert contents(tmp_path) == before


# The parts


ENTRIES = (
    TensorEntry("a.weight", "model.safetensors", 10, "", WeightError(0.1, 1 / 3)),
    TensorEntry("b.weight", "model.safetensors", 20, "", WeightError(0.0, 0.0)),
    TensorEntry("c.weight", "model.safetensors", 30, "", WeightError(1e-30, 1e30)),
    TensorEntry("norm.weight", "model.safetensors", 44, "", None),
)


@pytest.fixture(scope="module")
def journal_bytes(tmp_path_factory):
    file = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(file, "key", ENTRIES[:1])
    for entry in ENTRIES[1:]:
        journal.add(entry)
    journal.close()
    assert read_journal(file).entries == ENTRIES
    return file, file.read_bytes()


@given(data=st.data())
def test_of_a_damaged_journal_a_beginning_is_read(journal_bytes, data):
    file, content = journal_bytes
    where = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[where] ^= 1 << data.draw(st.integers(0, 7))
    damaged = data.draw(st.sampled_from([content[:where], bytes(flipped)]))
    copy = file.with_name("copy")
    copy.write_bytes(damaged)
    found = read_journal(copy)
    assert found.entries == ENTRIES[: len(found.entries)]
    assert len(found.entries) < len(ENTRIES)
    assert found.key in (None, "key")
    lines_before = content[:where].count(b"\n")
    assert len(found.entries) == max(lines_before - 1, 0)


@given(data=st.binary(max_size=100), slice_bytes=st.integers(1, 40), taken=st.integers(1, 40))
def test_bytes_are_written_whole_and_once_however_few_the_disk_takes(tmp_path_factory, data, slice_bytes, taken):
    file = tmp_path_factory.mktemp("slices") / "file"
    seen, write = [], os.write
    handle = os.open(file, os.O_WRONLY | os.O_CREAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "SLICE_BYTES", slice_bytes)
        patch.setattr(os, "write", lambda handle, part: write(handle, part[:taken]))
        resume.append(handle, data, lambda part: seen.append(bytes(part)))
    os.close(handle)
    assert file.read_bytes() == b"".join(seen) == data


def test_entries_are_believed_as_far_as_their_bytes_are_there(tmp_path):
    content = bytes(range(44))
    (tmp_path / "model.safetensors").write_bytes(content)
    ends = [0, *(entry.end for entry in ENTRIES)]
    entries = [
        replace(entry, checksum=checksum(tmp_path / "model.safetensors", start, entry.end))
        for entry, start in zip(ENTRIES, ends, strict=False)
    ]
    assert intact(tmp_path, entries) == 4
    for where in range(44):
        damaged = bytearray(content)
        damaged[where] ^= 1
        (tmp_path / "model.safetensors").write_bytes(damaged)
        assert intact(tmp_path, entries) == sum(end <= where for end in ends[1:])
        (tmp_path / "model.safetensors").write_bytes(content[:where])
        assert intact(tmp_path, entries) == sum(end <= where for end in ends[1:])


def test_a_stage_is_computed_once_and_again_only_where_its_result_is_damaged(tmp_path):
    def interrupted():
        with open_work_dir(tmp_path / "out", "key") as work:
            assert work.stage("moments", lambda: b"one") == b"one"
            assert work.stage("more-moments", lambda: b"others") == b"others"
            assert work.stage("moments", pytest.fail) == b"one"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (stored,) = (partial_folder(tmp_path / "out") / "kept").glob("?" * 32 + "-moments")
    stored.write_bytes(b"on")
    with open_work_dir(tmp_path / "out", "key") as work:
        assert work.stage("moments", lambda: b"two") == b"two"
        assert work.stage("moments", pytest.fail) == b"two"
        assert work.stage("more-moments", pytest.fail) == b"others"
        assert not stored.exists()
        (work.folder / "config.json").write_text("{}")
    assert names_in(tmp_path / "out") == {"config.json"}

"""A conversion that was cut off goes on behind the last tensor, and ends byte for byte as if it never had been."""

import os
import random
import shutil
import signal

import mlx.core as mx
import pytest

from tests.quant.dying import interpreter
from tests.quant.quant_models import make_source, names_in
from tokamac.engine.errors import ConversionError
from tokamac.engine.files import exchange
from tokamac.quant.conversion import FINISHED, convert
from tokamac.quant.resume import MODEL, OLD, partial_folder

POINTS = 50


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


def chosen(points, count, seed):
    return sorted(random.Random(seed).sample(range(1, points + 1), count))


def test_killed_anywhere_the_same_command_ends_with_the_same_bytes(converting, source, uninterrupted, tmp_path):
    expected, points = uninterrupted
    resumed = []
    for point in chosen(points, POINTS, seed=6):
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


@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_while_replacing_there_is_the_old_model_or_the_new_one(
    converting, source, uninterrupted, tmp_path, exchanges
):
    if exchanges and not _can_exchange(tmp_path):
        pytest.skip("this file system can't exchange names")
    expected, _ = uninterrupted
    old = old_model(tmp_path / "out")
    points = converting.convert(source, tmp_path / "out", overwrite=True, exchanges=exchanges).points
    shutil.rmtree(tmp_path / "out")
    swapping = range(points - 24, points + 1)  # the last calls: the small files, the swap, the removal
    states = set()
    for point in sorted({*chosen(points, POINTS // 5, seed=7), *swapping}):
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
def test_the_same_command_after_a_crash_that_came_after_the_last_rename_is_done(
    converting, source, tmp_path, overwrite
):
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
def test_an_old_model_that_a_crash_left_aside_is_put_back_by_the_next_look(
    converting, source, uninterrupted, tmp_path, overwrite
):
    out = tmp_path / "out"
    old = old_model(out)
    converting.convert(source, out, overwrite=True, dies_at=100)
    out.rename(partial_folder(out) / OLD)  # as between the two renames
    again = converting.convert(source, out, overwrite=overwrite)
    assert contents(out) == (uninterrupted[0] if overwrite else old)
    assert ("already exists" in again.error) != overwrite


def test_killed_again_and_again_it_still_arrives(converting, source, uninterrupted, tmp_path):
    out, resumed = tmp_path / "out", [0]
    while converting.convert(source, out, dies_at=45).signal and not out.exists():
        resumed.append(len(journalled(out)))
        assert len(resumed) < 40
    assert resumed == sorted(resumed)
    assert len(set(resumed)) > 3
    assert contents(out) == uninterrupted[0]


def journalled(out):
    return (partial_folder(out) / "journal").read_text().splitlines()[1:]


def test_ctrl_c_anywhere_leaves_what_the_next_run_goes_on_with(converting, source, uninterrupted, tmp_path):
    expected, points = uninterrupted
    for point in chosen(points, 20, seed=8):
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
    ("options", "times"), [({"method": "round"}, 10), ({"calibration": "shipped"}, 2), ({"method": "gptq"}, 2)], ids=str
)
def test_the_whole_command_is_killed_and_ends_with_the_same_bytes(converting, source, tmp_path, options, times):
    whole = converting.convert(source, tmp_path / "whole", whole=True, **options)
    assert whole.error == ""
    for point in chosen(whole.points - 20, times, seed=9):
        out = tmp_path / str(point)
        assert converting.convert(source, out, whole=True, dies_at=point, **options).signal == signal.SIGKILL
        again = converting.convert(source, out, whole=True, **options)
        assert again.error == "", point
        assert contents(out) == contents(tmp_path / "whole"), point

"""Conversions that cannot be, or are cut short: a clear error, the target as it was, no leftovers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest

from tests.quant.dying import interpreter
from tests.quant.quant_models import make_source, names_in
from tokamac.engine import files
from tokamac.engine.errors import ConversionError, ModelDamagedError, ModelNotFoundError, ModelUnsupportedError
from tokamac.quant import convert, resume


def refuse(error, tmp_path, match, source=None, **options):
    """Converting must raise before any work: nothing appears beside the source."""
    before = names_in(tmp_path)
    with pytest.raises(error, match=match) as caught:
        convert(source or tmp_path / "source", tmp_path / "out", **options)
    assert names_in(tmp_path) == before
    assert caught.value.hint
    return caught.value


def edit_config(source, **changes):
    config = json.loads((source / "config.json").read_text())
    config.update(changes)
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(source, change):
    arrays = mx.load(str(source / "model.safetensors"))
    change(arrays)
    mx.eval(arrays)
    (source / "model.safetensors").unlink()
    mx.save_safetensors(str(source / "model.safetensors"), arrays)


def test_no_such_folder(tmp_path):
    refuse(ModelNotFoundError, tmp_path, "nowhere", source=tmp_path / "nowhere")


def test_a_folder_without_a_config(tmp_path):
    make_source(tmp_path, "llama")
    (tmp_path / "source" / "config.json").unlink()
    refuse(ModelDamagedError, tmp_path, r"config\.json")


def test_pickles_only(tmp_path):
    source = make_source(tmp_path, "llama")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refuse(ModelUnsupportedError, tmp_path, "pickle")


@pytest.mark.parametrize("cut", [1, 1000, 10**9])
def test_a_truncated_shard_is_named(tmp_path, cut):
    shard = make_source(tmp_path, "llama") / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: max(len(whole) - cut, 4)])
    refuse(ModelDamagedError, tmp_path, r"model\.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    source = make_source(tmp_path, "llama", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    refuse(ModelDamagedError, tmp_path, "model-00002-of-00003")


def test_an_unknown_architecture_is_named(tmp_path):
    edit_config(make_source(tmp_path, "llama"), model_type="hal9000")
    refuse(ModelUnsupportedError, tmp_path, "hal9000")


@pytest.mark.parametrize(
    ("key", "settings", "what"),
    [
        ("quantization", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("quantization", {"quant_method": "fp8"}, "fp8"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("quantization_config", {"group_size": 64, "bits": 4}, "an unnamed method"),
        ("quantization_config", "4bit", "an unnamed method"),
    ],
)
def test_a_config_that_tells_of_packing_no_weight_has(tmp_path, key, settings, what):
    edit_config(make_source(tmp_path, "llama"), **{key: settings})
    refuse(ConversionError, tmp_path, f"packed by {what}")


def test_a_missing_weight_is_named(tmp_path):
    rewrite(make_source(tmp_path, "llama"), lambda arrays: arrays.pop("model.layers.1.mlp.up_proj.weight"))
    refuse(ModelDamagedError, tmp_path, r"model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_weight_too_many_is_named(tmp_path):
    rewrite(make_source(tmp_path, "llama"), lambda arrays: arrays.update({"model.extra.weight": mx.zeros((2, 2))}))
    refuse(ModelDamagedError, tmp_path, r"model\.extra\.weight")


def test_a_weight_of_another_shape_is_named(tmp_path):
    rewrite(make_source(tmp_path, "llama"), lambda arrays: arrays.update({"model.norm.weight": mx.ones((64,))}))
    refuse(ModelDamagedError, tmp_path, r"128.*64.*model\.norm\.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_a_number_is_named(tmp_path, name, value):
    def poison(arrays):
        array = arrays[name]
        flat = array.reshape(-1)
        flat[-1] = value
        arrays[name] = flat.reshape(array.shape)

    rewrite(make_source(tmp_path, "llama"), poison)
    refuse(ConversionError, tmp_path, name.replace(".", r"\."))


def test_what_does_not_fit_the_wanted_type_is_named(tmp_path):
    source = make_source(tmp_path, "llama")
    rewrite(source, lambda arrays: arrays.update({"model.norm.weight": mx.full((128,), 1e6, dtype=mx.bfloat16)}))
    error = refuse(ConversionError, tmp_path, r"model\.norm\.weight", dtype="float16")
    assert "F16" in error.hint
    convert(source, tmp_path / "out", dtype="bfloat16")


def test_a_target_that_exists_is_left_alone(tmp_path):
    source = make_source(tmp_path, "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    refuse(ConversionError, tmp_path, "already exists")
    refuse(ConversionError, tmp_path, "not a model folder", overwrite=True)
    assert names_in(tmp_path / "out") == {"mine.txt"}
    assert source.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_target_that_is_no_folder_is_not_replaced(tmp_path, kind):
    make_source(tmp_path, "llama")
    if kind == "file":
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    refuse(ConversionError, tmp_path, "not a model folder", overwrite=True)


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_source_and_target_must_not_overlap(tmp_path, place):
    source = make_source(tmp_path, "llama")
    before = names_in(source)
    with pytest.raises(ConversionError, match="overlap"):
        convert(source, tmp_path / place, overwrite=True)
    assert names_in(source) == before


@pytest.mark.parametrize("inside", [False, True])
def test_another_name_of_the_source_is_the_source(tmp_path, monkeypatch, inside):
    """As on a disk that takes SOURCE for source: two names that compare unequal, and one folder."""
    source, other = make_source(tmp_path, "llama"), tmp_path / "SOURCE"
    other.mkdir()
    (other / "config.json").write_text("{}")  # a model folder, so that only the overlap is in the way
    numbers = {source.stat().st_ino, other.stat().st_ino}

    def samestat(one, two, plain=os.path.samestat):
        return plain(one, two) or {one.st_ino, two.st_ino} == numbers

    monkeypatch.setattr(os.path, "samestat", samestat)
    before = names_in(source)
    with pytest.raises(ConversionError, match="overlap"):
        convert(source, other / "inside" if inside else other, overwrite=True)
    assert names_in(source) == before


def test_a_source_that_is_mounted_in_another_place_too_is_the_source(tmp_path):
    source, other = make_source(tmp_path, "llama"), tmp_path / "other"
    other.mkdir()
    mounted = subprocess.run(["mount", "--bind", source, other], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount, on Linux")
    try:
        for target in (other, other / "inside"):
            with pytest.raises(ConversionError, match="overlap"):
                convert(source, target, overwrite=True)
    finally:
        subprocess.run(["umount", other], check=True)
    assert "config.json" in names_in(source)


def test_overwriting_replaces_the_whole_folder(tmp_path):
    source = make_source(tmp_path, "llama")
    convert(source, tmp_path / "out", bits=8)
    (tmp_path / "out" / "stale.txt").write_text("stale")
    convert(source, tmp_path / "out", bits=4, overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert "stale.txt" not in names_in(tmp_path / "out")
    assert names_in(tmp_path) == {"source", "out"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopping_after_any_tensor_leaves_the_old_folder_and_what_is_needed_to_go_on(tmp_path, error):
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", bits=8)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    total = len(convert(source, dry_run=True).tensors)
    for stop in range(1, total + 1):

        def stopping(step, stop=stop):
            if step.done == stop:
                raise error

        with pytest.raises(error):
            convert(source, tmp_path / "out", overwrite=True, progress=stopping)
        assert names_in(tmp_path) == {"source", "out", ".out.partial"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_folder_comes_back_when_the_swap_fails(tmp_path, monkeypatch, exchanges):
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", bits=8)
    rename = Path.rename

    def fail(self, target):
        if self == tmp_path / ".out.partial" / "model":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    def synced(path, sync=resume.sync):
        if path == tmp_path and json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4:
            raise OSError(5, "Input/output error")
        sync(path)

    if exchanges:
        monkeypatch.setattr(resume, "sync", synced)  # after the exchange
    else:
        monkeypatch.setattr(files, "exchange", lambda *_: False)  # as on a file system that can't
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConversionError, match="Input/output error"):
        convert(source, tmp_path / "out", overwrite=True)
    assert names_in(tmp_path) == {"source", "out", ".out.partial"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 8


def test_a_disk_without_room_is_refused_before_any_work(tmp_path, monkeypatch):
    make_source(tmp_path, "llama")
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    refuse(ConversionError, tmp_path, r"needs 1\d\.\d MB and its disk has 0\.0 MB left")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    make_source(tmp_path, "llama")
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConversionError, match="Permission denied"):
        convert(tmp_path / "source", tmp_path / "locked" / "out")


@pytest.fixture(scope="module")
def converting():
    with interpreter() as started:
        yield started


@pytest.mark.parametrize("limit", [100, 150_000])
def test_a_disk_that_fills_up_on_the_way(converting, tmp_path, limit):
    """RLIMIT_FSIZE stands in for the full disk: a write beyond it fails the same way, half way through a file."""
    source = make_source(tmp_path, "llama")
    full = converting.convert(source, tmp_path / "out", whole=True, file_bytes=limit)
    assert "can't be written: File too large" in full.error
    assert "out" not in names_in(tmp_path)


@pytest.mark.parametrize("stop", [1, 7])
def test_ctrl_c_in_the_middle(tmp_path, stop):
    source = make_source(tmp_path, "llama")
    code = f"""
        import signal, sys, time
        from tokamac.quant import convert
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def step(done):
            if done.done == {stop}:
                print("half way", flush=True)
                time.sleep(30)
        try:
            convert({str(source)!r}, {str(tmp_path / "out")!r}, progress=step)
        except KeyboardInterrupt:
            sys.exit(130)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "half way\n"
    assert names_in(tmp_path) == {"source", ".out.partial"}
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert names_in(tmp_path) == {"source", ".out.partial"}


def test_ctrl_c_between_the_two_renames_of_the_swap(tmp_path, monkeypatch):
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", bits=8)
    rename = Path.rename

    def interrupted(self, target):
        rename(self, target)
        if target == tmp_path / ".out.partial" / "old":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", overwrite=True)
    assert names_in(tmp_path) == {"source", "out", ".out.partial"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 8

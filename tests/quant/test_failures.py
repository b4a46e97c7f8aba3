"""Conversions that cannot be, are cut short, or are asked for something unusual: a clear error, and the target as it
was."""

import json
import os
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.families import crossed
from tests.quant.dying import interpreter
from tests.quant.models import QUICKLY, make_source, names_in
from tokamac.engine import files
from tokamac.engine.errors import (
    ConversionError,
    ModelDamagedError,
    ModelNotFoundError,
    ModelUnsupportedError,
    OptionError,
)
from tokamac.quant import convert, resume
from tokamac.quant.conversion import default_target
from tokamac.quant.options import Options
from tokamac.quant.plan import layer_of
from tokamac.quant.resume import check_target


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


@pytest.mark.parametrize(
    ("name", "value"),
    crossed(
        ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"],
        [float("nan"), float("inf"), -float("inf")],
    ),
)
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
    convert(source, tmp_path / "out", dtype="bfloat16", **QUICKLY)


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
    convert(source, tmp_path / "out", bits=8, **QUICKLY)
    (tmp_path / "out" / "stale.txt").write_text("stale")
    convert(source, tmp_path / "out", bits=4, overwrite=True, **QUICKLY)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert "stale.txt" not in names_in(tmp_path / "out")
    assert names_in(tmp_path) == {"source", "out"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_folder_comes_back_when_the_swap_fails(tmp_path, monkeypatch, exchanges):
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", bits=8, **QUICKLY)
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
        convert(source, tmp_path / "out", overwrite=True, **QUICKLY)
    assert names_in(tmp_path) == {"source", "out", ".out.partial"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 8


def test_a_disk_without_room_is_refused_before_any_work(tmp_path, monkeypatch):
    make_source(tmp_path, "llama")
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    refuse(ConversionError, tmp_path, r"needs 1\d\.\d MB and its disk has 1\.00 kB left")


@pytest.fixture(scope="module")
def converting():
    with interpreter() as started:
        yield started


def test_ctrl_c_between_the_two_renames_of_the_swap(tmp_path, monkeypatch):
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", bits=8, **QUICKLY)
    rename = Path.rename

    def interrupted(self, target):
        rename(self, target)
        if target == tmp_path / ".out.partial" / "old":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", overwrite=True, **QUICKLY)
    assert names_in(tmp_path) == {"source", "out", ".out.partial"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 8


# Where a conversion is asked for something unusual, or given it: refused by name before any work, or done as it
# should be.

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("text", ["notes.txt", "", "Shipped"])
def test_a_calibration_text_that_is_no_path_is_not_taken_for_the_shipped_one(text: str) -> None:
    with pytest.raises(OptionError, match="no calibration text"):
        Options(calibration=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["search", "gptq"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_calibration_text_that_is_missing_is_refused_before_any_work(tmp_path: Path, method, dry_run: bool) -> None:
    source = make_source(tmp_path, "tied")
    with pytest.raises(OptionError, match=r"nowhere\.txt can't be read"):
        convert(source, tmp_path / "out", method=method, calibration=tmp_path / "nowhere.txt", dry_run=dry_run)
    assert names_in(tmp_path) == {"source"}


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_bits_of_the_embedding_are_affine_beside_a_microscaling_format(tmp_path: Path, mode: str) -> None:
    source = make_source(tmp_path, "tied")
    convert(source, tmp_path / "out", mode=mode, embed_bits=8, method="round", verify=False)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert said["mode"] == mode
    assert said["model.embed_tokens"] == {"bits": 8, "group_size": 64, "mode": "affine"}
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    weight = mx.load(str(source / "model.safetensors"))["model.embed_tokens.weight"]
    assert mx.array_equal(arrays["model.embed_tokens.weight"], mx.quantize(weight, bits=8)[0])


def test_a_weight_whose_range_no_scale_can_hold_is_named(tmp_path: Path) -> None:
    source = make_source(tmp_path, "tied")
    rewrite(source, lambda arrays: arrays.update({TENSOR: wide(arrays[TENSOR].shape)}))
    with pytest.raises(ConversionError, match=f"{TENSOR}, once packed, holds values that are not finite"):
        convert(source, tmp_path / "out", method="round", verify=False)
    assert names_in(tmp_path) == {"source"}


def wide(shape: tuple[int, ...]) -> mx.array:
    """Finite numbers whose range is none."""
    ends = np.full(shape, 3e38, np.float32)
    ends[:, ::2] = -3e38
    return mx.array(ends)


def test_a_weight_that_is_no_number_is_named_though_a_text_was_read_first(tmp_path: Path) -> None:
    source = make_source(tmp_path, "tied", max_position_embeddings=64)
    text = tmp_path / "notes.txt"
    text.write_text("one line of text that says something\n" * 40)
    rewrite(source, lambda arrays: arrays.update({TENSOR: mx.full(arrays[TENSOR].shape, float("nan"))}))
    with pytest.raises(ConversionError, match=f"{TENSOR} holds values that are not finite"):
        convert(source, tmp_path / "out", calibration=text, verify=False)


def test_what_was_removed_of_an_earlier_run_is_told_and_not_recorded(tmp_path: Path) -> None:
    source = make_source(tmp_path, "tied")
    expected = convert(source, tmp_path / "whole", method="round", verify=False)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", method="round", bits=8, verify=False, progress=stop)
    report = convert(source, tmp_path / "out", method="round", verify=False)
    assert "with other options, was removed" in report.notes[-1]
    assert report.notes[:-1] == expected.notes
    for name in names_in(tmp_path / "whole"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_room_that_a_budget_needs_is_what_it_may_spend(tmp_path: Path) -> None:
    source = make_source(tmp_path, "tied", max_position_embeddings=64)
    plan = convert(source, dry_run=True, target_bpw=5.9)
    assert plan.bits_per_weight < 5.6, "planned as five bits for all"
    convert(source, tmp_path / "out", target_bpw=5.9, verify=False)
    files = (path for path in (tmp_path / "out").iterdir() if path.name not in {"README.md", "conversion.json"})
    written = sum(path.stat().st_size for path in files)
    # A config that tells packings apart, and headers of longer numbers, are all that may come on top.
    assert plan.output_bytes < written < plan.needed_bytes + 10_000


@pytest.mark.parametrize("name", [".", "..", "out/.."])
def test_a_target_without_a_name_of_its_own_is_refused(tmp_path: Path, name: str, monkeypatch) -> None:
    source = make_source(tmp_path, "tied")
    (tmp_path / "here" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConversionError, match="can't be the name of a new folder"):
        check_target(Path(name), source, overwrite=True)


def test_a_source_of_links_into_the_target_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path, "tied")
    links = tmp_path / "links"
    links.mkdir()
    for file in source.iterdir():
        (links / file.name).symlink_to(os.path.relpath(file, links))
    with pytest.raises(ConversionError, match="a source is never written"):
        convert(links, source, overwrite=True, verify=False)


def test_a_snapshot_of_links_converts_like_its_files_and_is_known_by_its_id(tmp_path: Path, monkeypatch) -> None:
    source = make_source(tmp_path, "tied")
    snapshot = tmp_path / "models--org--Tiny-1B" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    monkeypatch.chdir(tmp_path)
    plain, linked = (convert(folder, method="round", verify=False) for folder in (source, snapshot))
    assert linked.path == default_target("org/Tiny-1B", Options()) == Path("Tiny-1B-4bit")
    assert not any(path.is_symlink() for path in Path(linked.path).iterdir())
    for name in names_in(plain.path) - {"README.md", "conversion.json"}:
        assert Path(plain.path, name).read_bytes() == Path(linked.path, name).read_bytes(), name
    assert 'base_model: "org/Tiny-1B"' in Path(linked.path, "README.md").read_text()


@pytest.mark.parametrize(("method", "known"), [("gptq", True), ("awq", False)])
def test_what_a_calibrated_method_packs_is_told_from_what_the_source_held(tmp_path: Path, method, known: bool) -> None:
    source, text = make_source(tmp_path, "tied", max_position_embeddings=64), tmp_path / "notes.txt"
    text.write_text("one line of text that says something\n" * 40)
    report = convert(source, tmp_path / "out", method=method, calibration=text)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    errors = {each["name"]: each["relative_error"] for each in record["tensors"] if each["packing"]}
    assert not any(each["taken_over"] for each in record["tensors"])
    assert (errors[TENSOR] is not None) == known
    assert errors["model.embed_tokens.weight"] is not None
    whole = report.quality.relative_error
    assert (whole is not None) == known
    assert whole is None or min(errors.values()) < whole < max(errors.values())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.1.attn.c_attn.weight", "transformer.h.1"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("transformer.wte.weight", None),
        ("transformer.h.2.attn.c_attn.weight", None),
    ],
)
def test_layers_are_told_from_the_rest_whatever_they_are_called(name: str, layer: str | None) -> None:
    assert layer_of(frozenset({"transformer.h.1", "transformer.h.11"}), name) == layer


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_the_scales_of_microscaling_formats_are_searched_unless_rounding_is_asked_for(tmp_path: Path, mode) -> None:
    source = make_source(tmp_path, "llama")
    errors = {}
    for method in ("round", None):
        report = convert(source, tmp_path / str(method), mode=mode, method=method)
        errors[method] = report.quality.relative_error
    assert errors[None] < 0.99 * errors["round"]

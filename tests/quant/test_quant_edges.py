"""Where a conversion is asked for something unusual, or given it: refused by name before any work, or done as it should be."""

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.quant_models import make_source, names_in
from tests.quant.test_quant_failures import rewrite
from tokamac import quant
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.quant import convert
from tokamac.quant.conversion import default_target
from tokamac.quant.options import Options
from tokamac.quant.plan import layer_of
from tokamac.quant.resume import check_target

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", quant.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(quant, name).__name__ == name


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quant.nothing


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
    assert report.quality is not None
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
        assert report.quality is not None
        errors[method] = report.quality.relative_error
    assert errors[None] < 0.99 * errors["round"]

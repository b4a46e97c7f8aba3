"""GPTQ: what it packs, what it leaves, and that it does what mlx-lm's does in less memory."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from tests.quant.models import inputs_of, same_bytes, seeded_ids, source_of
from tokamac.assets import asset_path
from tokamac.engine.errors import ConversionError, OptionError
from tokamac.engine.model.config import read_config
from tokamac.engine.text.tokenizer import load_tokenizer
from tokamac.quant import gptq, streaming
from tokamac.quant.options import Options
from tokamac.quant.packing import choose
from tokamac.quant.report import StageDone
from tokamac.quant.source import Source, clone, fresh, open_source

IDS = seeded_ids()


def packed(source: Source, options: Options, ids: list[list[int]] = IDS) -> Source:
    chosen = choose(source, options)
    gptq.check(source.config, source.module, options)
    return gptq.pack(source, options, chosen, ids, lambda _: None)


def rounded(weight: mx.array, bits: int, group_size: int) -> mx.array:
    how = {"bits": bits, "group_size": group_size}
    words, scales, biases = mx.quantize(weight, **how)
    return mx.dequantize(words, scales, biases, **how)


def output_errors(source: Source, found: Source, bits: int, group_size: int, ids: list[list[int]]) -> dict[str, float]:
    """Return, for each packed layer, its output error on its inputs ÷ that of rounding."""
    inputs, weights = inputs_of(source, ids), fresh(source)
    ratios = {}
    for path in found.packed.keys() - source.packed.keys():
        weight, x = weights[f"{path}.weight"], inputs[path]
        errors = [
            np.linalg.norm(x @ np.array(other.astype(mx.float32) - weight.astype(mx.float32)).T)
            for other in (found.weights[f"{path}.weight"], rounded(weight, bits, group_size))
        ]
        ratios[path] = float(errors[0] / errors[1])
    return ratios


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_outputs_are_nearer_than_rounding_gets_them(tmp_path: Path, bits: int) -> None:
    source = source_of(tmp_path, "llama")
    found = packed(source, Options(bits=bits, group_size=32, method="gptq"))
    ratios = output_errors(source, found, bits, 32, IDS)
    assert len(ratios) == 15, "two blocks of seven layers, and the output head"
    assert max(ratios.values()) < 1, ratios
    assert np.mean(list(ratios.values())) < 0.8, ratios


def test_the_embedded_model_gains_too() -> None:
    folder = asset_path("guide", "model")
    source = replace(open_source(folder), packed={})
    tokenizer = load_tokenizer(folder, read_config(folder), "guide")
    ids = streaming.calibration_sequences(tokenizer, streaming.calibration_text(None), 2, 128)
    found = packed(source, Options(bits=2, method="gptq"), ids)
    ratios = output_errors(source, found, 2, 64, ids)
    assert len(ratios) == 7 * read_config(folder)["num_hidden_layers"]
    assert max(ratios.values()) < 1
    assert np.mean(list(ratios.values())) < 0.8


def test_it_is_what_mlx_lm_makes_of_the_whole_model(tmp_path: Path) -> None:
    from mlx_lm.quant.gptq import gptq_quantize

    source = source_of(tmp_path, "llama", dtype="float32")
    found = packed(source, Options(bits=4, group_size=64, method="gptq"))
    model: Any = clone(source.module)
    model.update(tree_unflatten([(name, weight.astype(mx.float32)) for name, weight in fresh(source).items()]))
    with redirect_stderr(io.StringIO()):
        gptq_quantize(model, mx.array(IDS), 4, 64, 8, 64)
    modules = dict(model.named_modules())
    for path, each in found.packed.items():
        words, scales, biases = each.arrays
        theirs = modules[path]
        # Sums of products in another order, so a value half-way between two codes may go either way.
        assert float(mx.mean(words == theirs.weight).item()) > 0.95, path
        for ours, other in ((scales, theirs.scales), (biases, theirs.biases)):
            assert float(mx.mean(mx.abs(ours - other) > 1e-3 * mx.abs(other)).item()) < 0.02, path


def test_arrays_have_the_layout_of_mx_quantize_and_weights_show_them_unpacked(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    options = Options(bits=4, group_size=32, method="gptq")
    found = packed(source, options)
    for path, each in found.packed.items():
        weight = source.weights[f"{path}.weight"]
        like = mx.quantize(weight, bits=4, group_size=32)
        assert [(a.shape, a.dtype) for a in each.arrays] == [(a.shape, a.dtype) for a in like]
        words, scales, biases = each.arrays
        seen = found.weights[f"{path}.weight"]
        assert seen.dtype == weight.dtype == mx.bfloat16
        assert mx.array_equal(seen, mx.dequantize(words, scales, biases, bits=4, group_size=32)).item()
        assert each.packing == choose(source, options)[path]


def test_only_what_gets_the_uniform_packing_is_packed_and_the_rest_is_untouched(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    found = packed(source, Options(bits=4, method="gptq", embed_bits=8))
    assert "lm_head" not in found.packed
    assert "model.embed_tokens" not in found.packed
    assert len(found.packed) == 14
    assert list(found.weights) == list(source.weights), "in the model's own order"
    for name, weight in source.weights.items():
        if name.removesuffix(".weight") not in found.packed:
            assert found.weights[name] is weight
    assert source.packed == {}, "the source given is left as it was"


def test_rows_that_groups_do_not_divide_stay_for_the_ordinary_path(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", intermediate_size=192)
    found = packed(source, Options(bits=4, group_size=128, method="gptq"))
    assert not any(path.endswith("down_proj") for path in found.packed)
    assert len(found.packed) == 13


def test_stacks_of_experts_are_packed(tmp_path: Path) -> None:
    source = source_of(tmp_path, "mixtral")
    found = packed(source, Options(bits=4, group_size=32, method="gptq"))
    stacks = [path for path in found.packed if "switch_mlp" in path]
    assert len(stacks) == 6
    for path in stacks:
        weight = source.weights[f"{path}.weight"]
        assert found.packed[path].arrays[0].shape == (*weight.shape[:-1], weight.shape[-1] // 8)
        error = mx.linalg.norm((found.weights[f"{path}.weight"] - weight).astype(mx.float32).reshape(-1))
        assert error.item() < 0.2 * mx.linalg.norm(weight.astype(mx.float32).reshape(-1)).item()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source, options = source_of(tmp_path, "llama"), Options(bits=4, method="gptq")
    assert same_bytes(packed(source, options), packed(source, options))


def test_progress_is_told_layer_by_layer_and_nothing_is_printed(tmp_path: Path) -> None:
    source, options = source_of(tmp_path, "llama"), Options(bits=4, method="gptq")
    steps: list[StageDone] = []
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        gptq.pack(source, options, choose(source, options), IDS, steps.append)
    assert steps == [StageDone(gptq.STAGE, 1, 2), StageDone(gptq.STAGE, 2, 2)]
    assert (out.getvalue(), err.getvalue()) == ("", "")


def test_what_progress_raises_ends_it(tmp_path: Path) -> None:
    source, options = source_of(tmp_path, "llama"), Options(bits=4, method="gptq")

    def stop(_: StageDone) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptq.pack(source, options, choose(source, options), IDS, stop)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_bits_that_words_do_not_hold_whole_are_refused(tmp_path: Path, bits: int) -> None:
    source = source_of(tmp_path, "llama")
    with pytest.raises(OptionError, match=f"2, 4 or 8 bits, not {bits}") as caught:
        gptq.check(source.config, source.module, Options(bits=bits, method="gptq"))
    assert "--bits" in caught.value.hint


def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    arrays = {**mx.load(str(source.folder / "model.safetensors"))}  # type: ignore[dict-item]
    arrays[name] = arrays[name].at[3, 5].add(float("nan"))
    mx.save_safetensors(str(source.folder / "model.safetensors"), arrays)
    with pytest.raises(ConversionError, match=name):
        packed(open_source(source.folder), Options(bits=4, method="gptq"))


def test_memory_is_predicted_from_above(tmp_path: Path, settled_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "SEQUENCES", 8)
    source, options = source_of(tmp_path, "llama"), Options(bits=4, method="gptq")
    chosen = choose(source, options)
    predicted = gptq.peak_bytes(source, options, chosen)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    gptq.pack(source, options, chosen, seeded_ids(gptq.SEQUENCES, streaming.LENGTH), lambda _: None)
    taken = mx.get_peak_memory() - before
    assert taken < predicted < 4 * taken

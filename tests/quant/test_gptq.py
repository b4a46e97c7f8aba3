"""GPTQ: what it packs, what it leaves, and that outputs are nearer than others get them."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from tests.quant.models import inputs_of, seeded_ids, source_of
from tokamac.engine.errors import ConversionError
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import gptq
from tokamac.quant.options import Options
from tokamac.quant.packing import choose
from tokamac.quant.search import search
from tokamac.quant.source import Source, clone, fresh, open_source

IDS = seeded_ids()


def packed(source: Source, options: Options, ids: list[list[int]] = IDS) -> Source:
    chosen = choose(source, options)
    gptq.check(source.config, source.module, options)
    return gptq.pack(source, options, chosen, ids, lambda _: None)


def test_codes_are_those_of_the_papers_own_steps() -> None:
    """Against its equations 2 and 3: one column after another, and no Cholesky factor."""
    rng, size = np.random.default_rng(0), 32
    x = rng.normal(size=(300, 96)) @ rng.normal(size=(96, 96))
    weight, squares, packing = rng.normal(size=(24, 96)).astype("f4"), x.T @ x, Packing(3, size, "affine")
    words, scales, biases = gptq.gptq_arrays(mx.array(weight), squares, packing, mx.float32)
    scale, bias = np.repeat(np.array(scales), size, axis=1), np.repeat(np.array(biases), size, axis=1)
    inverse, left = np.linalg.inv(squares + 0.01 * np.diag(squares).mean() * np.eye(96)), weight.astype("f8")
    expected = np.zeros_like(left)
    for column in range(96):
        codes = np.clip(np.rint((left[:, column] - bias[:, column]) / scale[:, column]), 0, 7)
        expected[:, column] = codes * scale[:, column] + bias[:, column]
        error = (left[:, column] - expected[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column], inverse[:, column] = 0, 0
        inverse[column, column] = 1  # never used again
    found = np.array(mx.dequantize(words, scales, biases, group_size=size, bits=3))
    assert np.mean(np.abs(found - expected) < 1e-4) > 0.99, "but for values half-way between two codes"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outputs_are_nearer_than_rounding_the_search_and_mlx_lms_gptq_get_them(tmp_path: Path, bits: int) -> None:
    from mlx_lm.quant.gptq import gptq_quantize

    source = source_of(tmp_path, "llama", dtype="float32")
    found = packed(source, Options(bits=bits, group_size=32, method="gptq"))
    weights, inputs, how = fresh(source), inputs_of(source, IDS), {"group_size": 32, "bits": bits}
    theirs: Any = clone(source.module)
    theirs.update(tree_unflatten(list(fresh(source).items())))
    if bits != 3:  # theirs has no words for them
        with redirect_stderr(io.StringIO()):
            gptq_quantize(theirs, mx.array(IDS), bits, 32, 8, 32)
    modules, ratios = dict(theirs.named_modules()), []
    for path, ours in found.packed.items():
        exact, x, layer = weights[f"{path}.weight"], inputs[path], modules[path]
        others = [mx.quantize(exact, **how), search(exact, Packing(bits, 32, "affine"), np.mean(x**2, axis=0))]
        others += [] if bits == 3 else [(layer.weight, layer.scales, layer.biases)]
        unpacked = [mx.dequantize(*each, **how) for each in (ours.arrays, *others)]
        errors = [float(np.linalg.norm(x @ np.array(each - exact).T)) for each in unpacked]
        assert errors[0] < min(errors[1:]), (path, errors)
        ratios.append(errors[0] / errors[1])
    assert len(ratios) == 15, "two blocks of seven layers, and the output head"
    assert np.mean(ratios) < 0.8, ratios


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


def test_what_gets_another_packing_is_packed_by_search_and_the_rest_is_untouched(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    found = packed(source, Options(bits=4, method="gptq", embed_bits=8))
    seen = np.square(inputs_of(source, IDS)["lm_head"]).sum(axis=0)
    head = search(source.weights["lm_head.weight"], Packing(8), seen)
    assert np.mean(np.array(found.packed["lm_head"].arrays[0] == head[0])) > 0.99  # sums in another order
    assert "model.embed_tokens" not in found.packed
    assert len(found.packed) == 15
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


def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    arrays = {**mx.load(str(source.folder / "model.safetensors"))}  # type: ignore[dict-item]
    arrays[name] = arrays[name].at[3, 5].add(float("nan"))
    mx.save_safetensors(str(source.folder / "model.safetensors"), arrays)
    with pytest.raises(ConversionError, match=name):
        packed(open_source(source.folder), Options(bits=4, method="gptq"))

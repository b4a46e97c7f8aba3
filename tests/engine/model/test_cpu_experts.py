"""Stacks of packed experts: products against MLX's own, bit by bit against each expert alone, and a mixture computed so."""

import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

if sys.platform != "linux":
    pytest.skip("these kernels are a plain CPU's", allow_module_level=True)

from mlx_lm.models.qwen3_moe import Model, ModelArgs
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from tests.engine.model.test_cpu import AFFINE, MICROSCALED, rows_of
from tokamac.engine.cpu.formats import can_round
from tokamac.engine.cpu.layers import PackedExperts, keep_packed, matrix_of, measure_cost, round_rows, use_kernels
from tokamac.engine.cpu.products import PackedMatrix
from tokamac.engine.device import device_kind

on_a_cpu = pytest.mark.skipif(device_kind() != "cpu", reason="a GPU multiplies by itself")


def stack(
    experts: int,
    outs: int,
    columns: int,
    how: tuple[int, int, str],
    dtype: mx.Dtype = mx.float32,
    *,
    bias: bool = False,
    seed: int = 0,
) -> Any:
    bits, group, mode = how
    mx.random.seed(seed)
    layer = QuantizedSwitchLinear(columns, outs, experts, bias=bias, group_size=group, bits=bits, mode=mode)
    weight = (mx.random.normal((experts, outs, columns)) * mx.exp(mx.random.normal((experts, outs, 1)))).astype(dtype)
    layer.weight, layer.scales, *biases = mx.quantize(weight, group, bits, mode=mode)
    layer.biases = biases[0] if biases else None
    if bias:
        layer.bias = mx.random.normal((experts, outs))
    mx.eval(layer.parameters())
    return layer


def replaced(layer: Any) -> Any:
    use_kernels(nn.Sequential(layer), logits=None)
    assert type(layer) is PackedExperts
    return layer


@on_a_cpu
@pytest.mark.parametrize("how", [*AFFINE, *MICROSCALED], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_chosen_experts_say_what_mlxs_say(how: tuple[int, int, str], bias: bool) -> None:
    columns = 2 * max(how[1], 64)
    layer, random = stack(6, 33, columns, how, bias=bias), np.random.default_rng(0)
    x = mx.array(rows_of(10, columns)).reshape(2, 5, 1, 1, columns)
    chosen = mx.array(random.integers(0, 6, (2, 5, 3)).astype(np.uint32))
    each_its_own = mx.array(rows_of(30, columns)).reshape(2, 5, 3, 1, columns)
    in_order = mx.sort(chosen.flatten())
    given = (
        (x, chosen, False),
        (each_its_own, chosen, False),
        (each_its_own.reshape(30, 1, columns), in_order, True),
        (
            mx.array(rows_of(8, columns)).reshape(2, 4, columns),
            mx.array([5, 1], mx.uint32),
            False,
        ),  # four rows an expert
    )
    expected = [np.asarray(layer(*each)) for each in given]
    replaced(layer)
    for each, before in zip(given, expected, strict=True):
        after = np.asarray(layer(*each))
        assert after.shape == before.shape
        assert np.abs(after - before).max() < 1e-5 * np.abs(before).max()


@settings(deadline=None, max_examples=40)
@given(
    how=st.sampled_from([*AFFINE, *MICROSCALED]),
    experts=st.integers(1, 9),
    outs=st.integers(1, 41),
    chosen=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=40),
    rounds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_bits_that_its_expert_gives_it_alone(  # noqa: PLR0917  # drawn by name
    how: tuple[int, int, str], experts: int, outs: int, chosen: list[tuple[int, int]], rounds: bool, seed: int
) -> None:
    columns = 3 * max(how[1], 32)
    layer, x = stack(experts, outs, columns, how, mx.bfloat16, seed=seed), rows_of(7, columns, seed=seed)
    matrix = matrix_of(layer)
    matrix = replace(matrix, rounds=rounds and can_round(matrix.format))
    rows = np.array([row for row, _ in chosen])
    parts = np.array([part % experts for _, part in chosen])
    found = matrix.multiply_chosen(x, rows, parts, outs)
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        own = slice(part * outs, (part + 1) * outs)
        biases = None if matrix.biases is None else matrix.biases[own]
        alone = replace(matrix, weight=matrix.weight[own], scales=matrix.scales[own], biases=biases)
        assert np.array_equal(found[index], alone.multiply(x[row : row + 1])[0])


def test_experts_that_no_row_chose_are_not_read() -> None:
    layer = stack(5, 40, 128, (4, 64, "affine"))
    spoiled = mx.arange(5).reshape(5, 1, 1) % 2 == 1
    layer.scales = mx.where(spoiled, float("nan"), layer.scales)
    found = matrix_of(layer).multiply_chosen(rows_of(6, 128), np.arange(6), np.array([0, 2, 4, 4, 2, 2]), 40)
    assert np.isfinite(found).all()
    assert np.isnan(matrix_of(layer).multiply_chosen(rows_of(1, 128), np.array([0]), np.array([3]), 40)).all()


SIZES = {
    "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 512, "norm_topk_prob": True,
}  # fmt: skip
IDS = [(7 * i) % 50 for i in range(40)]


def mixture(bits: int | None) -> Any:
    mx.random.seed(5)
    model = Model(ModelArgs.from_dict(SIZES))
    model.update(nn.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.08 if a.ndim > 1 else a, model.parameters()))
    if bits is not None:  # but for routers: where rounding sends a token elsewhere, nothing can be compared
        nn.quantize(
            model,
            64,
            bits,
            class_predicate=lambda path, layer: not path.endswith("mlp.gate") and hasattr(layer, "to_quantized"),
        )
    mx.eval(model.parameters())
    return model


def log_probabilities(model: Any) -> np.ndarray:
    logits = np.asarray(model(mx.array([IDS]))[0].astype(mx.float32), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


@on_a_cpu
def test_a_mixture_says_the_same_and_holds_no_second_copy() -> None:
    model = mixture(4)
    model.set_dtype(mx.bfloat16)
    held = sum(array.nbytes for path, array in nn.utils.tree_flatten(model.parameters()) if "switch_mlp" in path)
    restore = keep_packed(model)
    model.set_dtype(mx.float32)
    before = log_probabilities(model)
    restore()
    use_kernels(model, logits=None)
    stacks = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(stacks) == 3 * SIZES["num_hidden_layers"]
    assert all(isinstance(layer.mlp.switch_mlp, SwitchGLU) for layer in model.model.layers)
    assert held == sum(
        array.nbytes for path, array in nn.utils.tree_flatten(model.parameters()) if "switch_mlp" in path
    )
    assert np.abs(log_probabilities(model) - before).max() < 1e-3


@on_a_cpu
def test_what_packing_and_rounding_cost_counts_experts() -> None:
    exact, model = log_probabilities(mixture(None)), mixture(4)
    cost_of_it = float((np.exp(exact) * (exact - log_probabilities(model))).sum(axis=-1).mean())
    use_kernels(model, logits=None)
    cost = measure_cost(model, IDS)
    assert cost_of_it / 3 < cost.packing < 3 * cost_of_it
    stacks = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert all(type(module._matrix) is PackedMatrix for module in stacks)
    if round_rows(model, rounds=True):
        assert all(module._matrix.rounds for module in stacks)
        assert cost.added > 0

"""Rows rounded to whole numbers: products against float64, bit by bit across rows and threads, and when a model is computed so."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx import nn

if sys.platform != "linux":
    pytest.skip("these kernels are a plain CPU's", allow_module_level=True)

from tests.engine.helpers import write_model
from tests.engine.model.test_cpu import check_pieces_and_threads_change_no_bit, packed, rows_of, unpacked
from tokamac.engine import Engine, KVSpec, PromptCacheSpec, Sampling, loading
from tokamac.engine.cpu import COMPARED, cost_key, keep_cost, known_cost
from tokamac.engine.cpu.formats import FORMATS, FP8, WeightFormat, can_round
from tokamac.engine.cpu.kernels.byte_tiles import LONG
from tokamac.engine.cpu.layers import PackedLinear, matrix_of, measure_cost, round_rows, use_kernels
from tokamac.engine.cpu.products import PackedMatrix
from tokamac.engine.device import device_kind
from tokamac.engine.events import RoundingCost
from tokamac.engine.perf import hardware
from tokamac.engine.perf.inspection import inspect_model
from tokamac.engine.prompt_cache.folder import default_root, digest

if not can_round(WeightFormat(4)):
    pytest.skip("this CPU does not multiply bytes", allow_module_level=True)

WIDTHS = [format.bits for format in FORMATS if can_round(format)]
STORED = [*((bits, mx.bfloat16) for bits in WIDTHS), (4, mx.float32), (4, mx.float16)]


def rounding_matrix(layer: Any) -> PackedMatrix:
    return replace(matrix_of(layer), rounds=True)


def rounded(x: np.ndarray, group_size: int) -> np.ndarray:
    """Return what rows stand for once they are rounded, in float64."""
    groups = x.astype(np.float64).reshape(len(x), -1, group_size)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 127
    whole = np.rint(np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0))
    return np.asarray((whole * scales).reshape(x.shape))


@settings(deadline=None, max_examples=60)
@given(
    stored=st.sampled_from(STORED),
    group=st.sampled_from([32, 64, 128]),
    outs=st.integers(1, 41),
    groups=st.integers(1, 19),
    rows=st.integers(1, 23),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 99),
)
def test_the_error_is_that_of_half_a_step_of_a_groups_scale(  # noqa: PLR0917  # drawn by name
    stored: tuple[int, mx.Dtype], group: int, outs: int, groups: int, rows: int, spread: float, seed: int
) -> None:
    bits, dtype = stored
    layer = packed(outs, groups * group, (bits, group, "affine"), dtype, seed=seed)
    x = rows_of(rows, groups * group, seed=seed) * np.float32(2.0**spread)
    x[0, :group] = 0
    found, weights = rounding_matrix(layer).multiply(x), unpacked(layer)
    steps = np.repeat(np.abs(x).reshape(rows, groups, group).max(axis=-1) / 127, group, axis=-1).astype(np.float64)
    bound = (steps / 2) @ np.abs(weights).T * 1.001
    # Whole numbers are summed exactly; what is rounded are the sums over groups, with and without biases.
    size = (
        np.abs(x).astype(np.float64) @ np.abs(weights).T + np.abs(x).sum(axis=1, keepdims=True) * np.abs(weights).max()
    )
    assert (np.abs(found - x.astype(np.float64) @ weights.T) <= bound + 2e-6 * size).all()
    assert (np.abs(found - rounded(x, group) @ weights.T) <= 0.02 * bound + 2e-6 * size).all()


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from(WIDTHS),
    group=st.sampled_from([32, 64, 128]),
    outs=st.integers(1, 41),
    groups=st.integers(1, 19),
    rows=st.integers(1, 23),
    seed=st.integers(0, 99),
)
@example(bits=4, group=64, outs=41, groups=2 * LONG // 64 - 1, rows=7, seed=0)
@example(bits=4, group=64, outs=41, groups=2 * LONG // 64, rows=7, seed=0)
def test_a_row_is_the_same_in_a_batch(  # noqa: PLR0917  # drawn by name
    bits: int, group: int, outs: int, groups: int, rows: int, seed: int
) -> None:
    layer = packed(outs, groups * group, (bits, group, "affine"), mx.bfloat16, seed=seed)
    matrix, x = rounding_matrix(layer), rows_of(rows, groups * group, seed=seed)
    together = matrix.multiply(x)
    for row in range(rows):
        assert np.array_equal(matrix.multiply(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_threads_and_pieces_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = rounding_matrix(packed(1030, 256, (4, 64, "affine")))
    check_pieces_and_threads_change_no_bit(matrix, rows_of(rows, 256), monkeypatch)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_a_row_none_and_no_other(value: float) -> None:
    matrix, x = rounding_matrix(packed(20, 256, (4, 64, "affine"))), rows_of(3, 256)
    clean = matrix.multiply(x)
    for at in (0, 70, 255):
        spoiled = x.copy()
        spoiled[1, at] = value
        found = matrix.multiply(spoiled)
        assert np.isnan(found[1]).all()
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    matrix = rounding_matrix(packed(20, 128, (4, 64, "affine")))
    assert not matrix.multiply(np.full((1, 128), 2.0**-125, np.float32)).any()


def test_matrices_that_take_the_same_rows_say_so() -> None:
    four, other, two = (packed(outs, 256, (bits, 64, "affine")) for outs, bits in ((8, 4), (12, 4), (8, 2)))
    pairs = itertools.product((four, other, two), repeat=2)
    same = [rounding_matrix(a).preparation == rounding_matrix(b).preparation for a, b in pairs]
    assert same == [True, True, False, True, True, False, False, False, True]
    assert matrix_of(four).preparation == matrix_of(other).preparation != rounding_matrix(four).preparation
    assert matrix_of(two).preparation is None


def test_other_numbers_are_not_rounded() -> None:
    assert not can_round(WeightFormat(8, FP8))
    with pytest.raises(AssertionError):
        rounding_matrix(packed(8, 64, (8, 32, "mxfp8")))


# Whether a model's rows are rounded.

on_a_cpu = pytest.mark.skipif(device_kind() != "cpu", reason="a GPU multiplies by itself")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
IDS = [(7 * i) % 50 for i in range(24)]


def llama(bits: int | None) -> Any:
    from mlx_lm.models.llama import Model, ModelArgs

    from tests.engine.helpers import CONFIG

    mx.random.seed(3)
    model = Model(ModelArgs.from_dict({**CONFIG, **SIZES}))
    model.update(nn.utils.tree_map(lambda a: mx.random.normal(a.shape) * 0.05 if a.ndim > 1 else a, model.parameters()))
    if bits is not None:
        nn.quantize(model, 64, bits)
    mx.eval(model.parameters())
    return model


def log_probabilities(model: Any, ids: Sequence[int] = IDS) -> np.ndarray:
    logits = np.asarray(model(mx.array([list(ids)]))[0].astype(mx.float32), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


@on_a_cpu
@pytest.mark.parametrize("bits", sorted({3, 4, 8} & set(WIDTHS)))
def test_the_packing_is_said_to_cost_about_what_it_did(bits: int) -> None:
    exact, model = log_probabilities(llama(None)), llama(bits)
    cost_of_it = float((np.exp(exact) * (exact - log_probabilities(model))).sum(axis=-1).mean())
    use_kernels(model, logits=None)
    cost = measure_cost(model, IDS)
    assert cost_of_it / 3 < cost.packing < 3 * cost_of_it


@on_a_cpu
def test_the_same_model_costs_the_same_and_stays_exact() -> None:
    model = llama(4)
    use_kernels(model, logits=None)
    before, costs = log_probabilities(model), [measure_cost(model, IDS) for _ in range(2)]
    assert costs[0] == costs[1] is not None
    assert np.array_equal(log_probabilities(model), before)
    assert all(type(each._matrix) is PackedMatrix for each in model.modules() if isinstance(each, PackedLinear))
    assert round_rows(model, rounds=True)
    assert not np.array_equal(log_probabilities(model), before)


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[tuple[Engine, list[str]]]:
    stages: list[str] = []
    with Engine.load(folder, progress=lambda at: stages.append(at.stage), **options) as engine:
        yield engine, stages


def logprobs(engine: Engine) -> np.ndarray:
    return np.asarray(engine.logprobs(IDS))


@pytest.fixture(autouse=True)
def own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What other tests kept of models is not there, and a line tells of measuring even a small one."""
    monkeypatch.setattr(loading, "SLOWLY_MEASURED", 0)
    file = tmp_path / "rounding.json"
    monkeypatch.setattr(hardware, "store_file", lambda _: file)
    return file


@on_a_cpu
@pytest.mark.parametrize(("bits", "rounds"), [(bits, bits < 8) for bits in (4, 8) if bits in WIDTHS])
def test_rows_are_rounded_where_that_costs_little(bits: int, rounds: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", bits=bits, **SIZES)
    assert inspect_model(folder, context=128).rounding is None
    with loaded(folder, prompt_cache=None) as (engine, stages), loaded(folder, prompt_cache=None) as (again, later):
        cost = engine.spec.rounding
        assert cost.is_small is rounds
        assert ("rounded to 8 bits (adds" in str(cost)) is rounds
        assert ("rounding" in stages, "rounding" in later) == (True, False)
        assert again.spec.rounding == cost == inspect_model(folder, context=128).rounding
        found = logprobs(engine)
        assert np.array_equal(logprobs(again), found)
    with loaded(folder, prompt_cache=None, cpu_exact=True) as (engine, stages):
        assert engine.spec.rounding is None
        assert "rounding" not in stages
        assert np.array_equal(logprobs(engine), found) is not rounds


@on_a_cpu
def test_what_is_measured_in_no_time_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", bits=4, **SIZES)
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(loading, "SLOWLY_MEASURED", 2 * size)
    with loaded(folder, prompt_cache=None) as (engine, stages):
        assert engine.spec.rounding is not None
        assert "rounding" not in stages


@on_a_cpu
def test_the_decision_is_the_kept_one_until_the_model_changes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", bits=4, **SIZES)
    key = cost_key(folder, digest([folder / "model.safetensors"], default_root()))
    keep_cost(key, RoundingCost(1.0, 9.9))
    with loaded(folder, prompt_cache=None) as (engine, _):
        assert engine.spec.rounding == RoundingCost(1.0, 9.9)
        assert not engine.spec.rounding.is_small
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-5}))
    with loaded(folder, prompt_cache=None) as (engine, stages):
        assert "rounding" in stages
        assert engine.spec.rounding.is_small


@on_a_cpu
def test_what_was_equal_once_is_compared_again_when_something_changes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", bits=4, **SIZES)

    def load(**options: Any) -> tuple[int, str]:
        with loaded(folder, prompt_cache=None, **options) as (engine, _):
            *_, end = engine.generate([1, 2, 3], Sampling(temperature=0, max_tokens=9))
        return list(hardware.load(hardware.store_file(COMPARED)).values()).count(True), end.text

    first = load()
    assert (load(), first[0]) == (first, 1)
    assert load(kv=KVSpec(8, 8))[0] == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-5}))
    assert load()[0] == 3


@pytest.mark.parametrize(
    "kept", [1, "x", [], [1, 2, 3], [-1, 2], [1, "2"], [True, 1], [float("nan"), 1], [1, float("inf")]]
)
def test_what_can_not_be_right_is_as_good_as_none(kept: Any) -> None:
    hardware.keep(hardware.store_file(""), {"key": kept})
    assert known_cost("key") is None


@on_a_cpu
def test_prompts_of_rounded_rows_are_not_those_of_exact_ones(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", bits=4, **SIZES)
    ids = [(11 * i) % 50 for i in range(300)]

    def cached(**options: Any) -> int:
        with loaded(folder, prompt_cache=PromptCacheSpec(), **options) as (engine, _):
            *_, end = engine.generate(ids, Sampling(temperature=0, max_tokens=2))
            return int(end.metrics.cached_tokens)

    assert cached() == 0
    assert cached(cpu_exact=True) == 0
    assert cached() > 0
    assert cached(cpu_exact=True) > 0

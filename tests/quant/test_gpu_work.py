"""Rows of a calibration text are multiplied some at a time on a slow Apple GPU, and it makes no difference to what comes of it."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.quant_models import make_source
from tokamac.engine.device import DeviceKind
from tokamac.engine.perf.hardware import lookup
from tokamac.quant import convert, streaming
from tokamac.quant.calibration import LENGTH
from tokamac.quant.methods import awq, gptq
from tokamac.quant.source import open_source
from tokamac.quant.streaming import LONGEST_S, STEP, Inputs, Streamed, in_pieces, rows_at_once, streamable_source

WIDE = 2 * 4096 * 14336
"""Operations for a row of an 8B model's largest matrix."""


@pytest.fixture
def slow_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU so slow that no product may take more rows than a step."""
    monkeypatch.setattr(
        streaming, "rows_at_once", lambda _kind, _peak, operations: rows_at_once("metal", 1e-9, operations)
    )


@pytest.mark.parametrize(
    ("kind", "chip", "cores", "rows"),
    [
        ("metal", "Apple M1", 7, 2304),
        ("metal", "Apple M1", 8, 2816),
        ("metal", "Apple M2", 10, 3584),
        ("metal", "Apple M1 Max", 32, 11264),
        ("metal", "Apple M4 Max", 40, 16384 + 768),  # all 32 sequences of gptq at once
        ("metal", "Apple M99", None, 2304),
        ("cpu", "Apple M1", 8, None),
        ("cuda", "NVIDIA H100", None, None),
    ],
)
def test_rows_follow_from_the_chips_peak(kind: DeviceKind, chip: str, cores: int | None, rows: int | None) -> None:
    peak = lookup(chip, cores).fp16_tflops
    assert rows_at_once(kind, peak, WIDE) == rows
    if rows is not None and peak is not None:
        assert rows * WIDE <= peak * 1e12 * LONGEST_S


def test_a_row_too_large_for_the_bound_still_goes_a_step_at_a_time() -> None:
    assert rows_at_once("metal", 2.32, 10**12) == STEP


@pytest.mark.usefixtures("slow_gpu")
def test_pieces_are_the_whole() -> None:
    mx.random.seed(2)
    x, weight, taken = mx.random.normal((3, 200, 64)), mx.random.normal((64, 48)), list[int]()

    def product(rows: mx.array) -> mx.array:
        taken.append(rows.shape[0])
        return rows @ weight

    found = in_pieces(product, x, outputs=48)
    assert taken == [256, 256, 88]
    assert found.shape == (3, 200, 48)
    np.testing.assert_allclose(np.asarray(found), np.asarray(x @ weight), rtol=1e-5, atol=1e-5)


def observed(source: Path) -> dict[str, np.ndarray]:
    rows: dict[str, np.ndarray] = {}

    def note(inputs: Inputs) -> None:
        rows[inputs.path] = np.asarray(inputs.rows.astype(mx.float32))

    batch = [[(7 * i + 3 * j) % 300 for j in range(150)] for i in range(3)]
    Streamed(streamable_source(open_source(source))).observe(batch, note)
    return rows


def test_a_calibration_sees_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = make_source(tmp_path, "llama")
    whole = observed(source)
    request.getfixturevalue("slow_gpu")
    pieces = observed(source)
    assert whole.keys() == pieces.keys()
    for path, rows in whole.items():
        np.testing.assert_allclose(pieces[path], rows, rtol=1e-4, atol=1e-4, err_msg=path)


def test_gptqs_sums_are_the_same(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    mx.random.seed(4)
    rows = mx.random.normal((700, 96))
    whole = gptq._squares(rows)
    request.getfixturevalue("slow_gpu")
    monkeypatch.setattr(gptq, "device_kind", lambda: "metal")
    np.testing.assert_allclose(np.asarray(gptq._squares(rows)), np.asarray(whole), rtol=1e-4, atol=1e-3)


def test_awq_runs_some_sequences_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    source = make_source(tmp_path, "llama", num_hidden_layers=1)
    monkeypatch.setattr(awq, "SEQUENCES", 2)
    module, scales = open_source(source).module, []
    for name, at_once in (("whole", 2), ("pieces", 1)):
        assert awq._at_once(module, 2, LENGTH) == at_once
        convert(source, tmp_path / name, method="awq", verify=False)
        packed = mx.load(str(tmp_path / name / "model.safetensors"))
        scales.append(np.asarray(packed["model.layers.0.mlp.gate_proj.scales"].astype(mx.float32)))
        if name == "whole":
            request.getfixturevalue("slow_gpu")
    np.testing.assert_allclose(scales[1], scales[0], rtol=0.02, atol=1e-4)

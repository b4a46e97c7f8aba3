"""Conversion by the path a GPU takes: the search in MLX's own operations, beside the CPU's."""

import pytest

from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, Sampling
from tokamac.quant import convert
from tokamac.quant.search import implementation


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path / "source", hidden_size=128, intermediate_size=256)


def test_the_search_of_a_gpu_finds_what_the_cpus_finds(tmp_path, source):
    assert implementation().name == "mlx"
    on_gpu = convert(source, tmp_path / "gpu", bits=4, group_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokamac.engine.device._device_kind", lambda: "cpu")
        pytest.importorskip("numba")
        assert implementation().name == "numba"
        on_cpu = convert(source, tmp_path / "cpu", bits=4, group_size=64)
    assert on_gpu.weight_bytes == on_cpu.weight_bytes
    assert on_gpu.bits_per_weight == on_cpu.bits_per_weight
    assert on_gpu.quality.relative_error == pytest.approx(on_cpu.quality.relative_error, rel=0.005)


@pytest.mark.parametrize("method", ["round", "search"])
def test_what_a_gpu_converted_answers(tmp_path, source, method):
    convert(source, tmp_path / "out", bits=8, group_size=64, method=method)
    with Engine.load(tmp_path / "out") as engine:
        *_, last = engine.generate([5, 6, 7, 8], Sampling(temperature=0, max_tokens=5))
        assert isinstance(last, Finished)
        assert last.metrics.generated_tokens == 5

"""What a GPU works on at a time and what its pool may keep: bounded by its memory, and never seen in the result."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.quant.quant_models import make_source
from tokamac.engine.device import DeviceKind
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import conversion, convert
from tokamac.quant.conversion import POOL_BYTES, pool_bytes
from tokamac.quant.search import on_mlx
from tokamac.quant.search.on_mlx import LARGEST, SMALLEST, MlxSearch, block_weights, search_scales

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "memory", "weight_bytes", "weights"),
    [
        ("cpu", 64 * GIB, 80, SMALLEST),
        ("metal", None, 80, SMALLEST),
        ("metal", 8 * GIB, 80, 1 << 23),
        ("metal", 16 * GIB, 80, 1 << 24),
        ("metal", 8 * GIB, 140, 1 << 22),
        ("metal", 512 * GIB, 80, LARGEST),
        ("cuda", 1 * GIB, 140, SMALLEST),
    ],
)
def test_a_block_grows_with_the_gpus_memory(
    kind: DeviceKind, memory: int | None, weight_bytes: int, weights: int
) -> None:
    assert block_weights(kind, memory, weight_bytes) == weights
    if memory is not None and weights > SMALLEST:
        assert weights * weight_bytes <= memory / on_mlx.PART_OF_MEMORY


@pytest.mark.parametrize("importance", [None, (1, 128), (3, 128)])
@pytest.mark.parametrize("packing", [Packing(4, 64), Packing(3, 32), Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")])
def test_the_size_of_a_block_changes_no_bit(
    packing: Packing, importance: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(11)
    weight = mx.random.normal((3 * 41, 128)).astype(mx.bfloat16)
    known = None if importance is None else np.random.default_rng(5).random(importance, dtype=np.float32)
    found = []
    for block in (128, 7 * 128, 1 << 12, LARGEST):
        monkeypatch.setattr(on_mlx, "block_here", lambda _, block=block: block)
        if packing.mode == "affine":
            arrays = MlxSearch().search(weight, packing, known)
        else:
            stack = weight.reshape(3, 41, 128)
            given = known if known is None or len(known) == 3 else known[0]
            arrays = tuple(part.reshape(3 * 41, -1) for part in search_scales(stack, packing, given))
        found.append(
            ([np.asarray(each.view(mx.uint8)) for each in arrays], on_mlx.unpacked_error(weight, arrays, packing))
        )
    first, errors = found[0]
    for arrays, measured in found[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(first, arrays, strict=True))
        assert measured == pytest.approx(errors, rel=1e-6)  # squares are added up in another order


def test_a_cpu_keeps_no_pool_and_a_gpu_a_bounded_one() -> None:
    assert pool_bytes("cpu", 64 * GIB) == 0
    assert pool_bytes("metal", 8 * GIB) == GIB
    assert pool_bytes("metal", 64 * GIB) == pool_bytes("cuda", None) == POOL_BYTES == 2 * GIB


def test_what_a_tensor_left_in_the_pool_is_gone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "device_kind", lambda: "metal")
    limits, kept, source = set[int](), set[int](), make_source(tmp_path, "llama")
    before = mx.set_cache_limit(POOL_BYTES)
    mx.set_cache_limit(before)

    def progress(_: object) -> None:
        kept.add(mx.get_cache_memory())
        limits.add(limit := mx.set_cache_limit(0))
        mx.set_cache_limit(limit)

    convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
    assert limits == {pool_bytes("metal", conversion.device_total())}
    assert kept == {0}
    assert mx.set_cache_limit(before) == before

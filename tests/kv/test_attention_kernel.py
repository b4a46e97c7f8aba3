"""Which kernel attends: MLX's own conditions, as a table written by hand."""

from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx
import pytest

from tokamac.engine.kv.attention_kernel import (
    MLX_VERSION,
    AttentionCall,
    AttentionDevice,
    Kernel,
    has_fused_kernel,
    kernel_of,
)

M4 = AttentionDevice("metal", architecture="applegpu_g16g")
M4_MAX = AttentionDevice("metal", architecture="applegpu_g16s")
M3_ULTRA = AttentionDevice("metal", architecture="applegpu_g15d")
M5 = AttentionDevice("metal", neural=True, architecture="applegpu_g17g")
M5_WITHOUT_TF32 = replace(M5, tf32=False)
CUDA = AttentionDevice("cuda")
CPU = AttentionDevice("cpu")

PREFILL = AttentionCall(32, 8, 512, 8192, 128, 128, "causal")
DECODE = AttentionCall(32, 8, 1, 2048, 128, 128, "none")

CASES: list[tuple[AttentionCall, AttentionDevice, Kernel]] = [
    # Prefill by head size.
    *[(replace(PREFILL, size=d, value_size=d), M4, "full") for d in (64, 72, 80, 96, 128)],
    *[(replace(PREFILL, size=d, value_size=d), M4, "unfused") for d in (32, 48, 112, 160, 192, 256, 512)],
    (replace(PREFILL, size=96, value_size=64), M4, "full"),
    (replace(PREFILL, size=192, value_size=128), M4, "unfused"),
    (replace(PREFILL, mask="bool"), M4, "full"),
    (replace(PREFILL, mask="additive"), M4, "full"),
    (replace(PREFILL, sinks=True), M4, "full"),
    (replace(PREFILL, queries=9, keys=8), M4, "unfused"),
    (replace(PREFILL, number="float32"), M4, "full"),
    (replace(PREFILL, written_out=True), M4, "unfused"),
    (PREFILL, CPU, "unfused"),
    # Wide heads, many rows: shaders.
    (replace(PREFILL, size=256, value_size=256, queries=2048, keys=2048), M4, "full"),
    (replace(PREFILL, size=256, value_size=256, queries=2048, keys=2049), M4, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=2047, keys=2047), M4, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=2048, keys=2048, mask="bool"), M4, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=2048, keys=2048, number="float32"), M4, "unfused"),
    (replace(PREFILL, size=192, value_size=192, queries=2048, keys=2048), M4, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024), M4, "blocked"),
    (replace(PREFILL, size=512, value_size=512, queries=1023), M4, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024, sinks=True), M4, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024, mask="bool"), M4, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024, number="float32"), M4, "unfused"),
    # The same with neural accelerators.
    (replace(PREFILL, size=256, value_size=256, queries=1024), M5, "full"),
    (replace(PREFILL, size=256, value_size=256, queries=1024, mask="bool"), M5, "full"),
    (replace(PREFILL, size=256, value_size=256, queries=1024, mask="none"), M5, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=1023), M5, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=1024, number="float32"), M5, "full"),
    (replace(PREFILL, size=256, value_size=256, queries=1024, number="float32"), M5_WITHOUT_TF32, "unfused"),
    (replace(PREFILL, size=256, value_size=256, queries=2048, keys=2048, number="float32"), M5_WITHOUT_TF32, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024), M5, "full"),  # 32 tiles of 32 heads: just enough
    (replace(PREFILL, size=512, value_size=512, queries=1024, query_heads=24), M5, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1023, query_heads=64), M5, "unfused"),
    (replace(PREFILL, size=512, value_size=512, queries=1024, mask="bool"), M5, "unfused"),
    # Few queries: vector kernels, by head size, rows and repeats.
    *[(replace(DECODE, size=d, value_size=d), M4, "vector") for d in (64, 96, 128, 256)],
    *[(replace(DECODE, size=d, value_size=d), M4, "unfused") for d in (32, 72, 80, 112, 160, 192)],
    (replace(DECODE, size=192, value_size=128), M4, "vector"),
    (replace(DECODE, size=96, value_size=64), M4, "vector"),
    (replace(DECODE, mask="bool"), M4, "vector"),
    (replace(DECODE, queries=8, mask="causal"), M4, "vector"),
    (replace(DECODE, queries=9, mask="causal"), M4, "full"),
    (replace(DECODE, query_heads=256, queries=1), M4, "vector"),
    (replace(DECODE, query_heads=264, queries=1), M4, "unfused"),
    (replace(DECODE, query_heads=40, queries=7), M4, "unfused"),
    (replace(DECODE, queries=2, keys=1), M4, "unfused"),
    (replace(DECODE, written_out=True), M4, "unfused"),
    (DECODE, CPU, "unfused"),
    (replace(DECODE, size=512, value_size=512, query_heads=64), M4, "vector"),
    (replace(DECODE, size=512, value_size=512, query_heads=64), M5, "vector"),
    (replace(DECODE, size=512, value_size=512, query_heads=32), M4, "unfused"),
    (replace(DECODE, size=512, value_size=512, query_heads=64, keys=1023), M4, "unfused"),
    (replace(DECODE, size=512, value_size=512, query_heads=64, queries=2), M4, "unfused"),
    (replace(DECODE, size=512, value_size=512, query_heads=64, mask="bool"), M4, "unfused"),
    # Two passes: long contexts of grouped queries, and from 1,024 keys on Max and Ultra.
    (replace(DECODE, keys=4095), M4, "vector"),
    (replace(DECODE, keys=4096), M4, "vector two-pass"),
    (replace(DECODE, keys=4096, query_heads=8), M4, "vector"),
    (replace(DECODE, keys=1023), M4_MAX, "vector"),
    (replace(DECODE, keys=1024), M4_MAX, "vector two-pass"),
    (replace(DECODE, keys=1024, query_heads=8), M3_ULTRA, "vector two-pass"),
    (replace(DECODE, keys=4095), AttentionDevice("metal"), "vector"),
    # CUDA: cuDNN for half precision and sizes up to 128; its vector kernel for up to three queries and no array.
    (PREFILL, CUDA, "cudnn"),
    (replace(PREFILL, size=80, value_size=80), CUDA, "cudnn"),
    (replace(PREFILL, size=100, value_size=100), CUDA, "unfused"),
    (replace(PREFILL, size=256, value_size=256), CUDA, "unfused"),
    (replace(PREFILL, number="float32"), CUDA, "unfused"),
    (replace(PREFILL, mask="bool"), CUDA, "cudnn"),
    (DECODE, CUDA, "vector"),
    (replace(DECODE, number="float32", queries=3), CUDA, "vector"),
    (replace(DECODE, number="float32", queries=4), CUDA, "unfused"),
    (replace(DECODE, mask="bool"), CUDA, "unfused"),
    (replace(DECODE, size=80, value_size=80), CUDA, "unfused"),
]


@pytest.mark.parametrize(("call", "device", "kernel"), CASES)
def test_kernel(call: AttentionCall, device: AttentionDevice, kernel: Kernel) -> None:
    assert kernel_of(call, device) == kernel


@pytest.mark.parametrize(
    ("size", "queries", "mask", "device", "kernel"),
    [
        (256, 512, "causal", M4, "full"),
        (256, 512, "bool", M4, "full"),
        (192, 512, "causal", M5, "full"),
        (192, 1, "none", M4, "vector two-pass"),
        (512, 512, "causal", M5, "full"),
        (512, 512, "causal", M4, "unfused"),  # no kernel: MLX would raise
        (512, 2048, "causal", M4, "unfused"),  # blocked is no fused kernel
        (112, 512, "causal", M5, "unfused"),
        (256, 512, "causal", CUDA, "unfused"),
        (128, 512, "causal", CPU, "unfused"),
    ],
)
def test_force_fused(size: int, queries: int, mask: str, device: AttentionDevice, kernel: Kernel) -> None:
    call = replace(PREFILL, size=size, value_size=size, queries=queries, mask=mask)  # type: ignore[arg-type]
    assert kernel_of(call, device, force_fused=True) == kernel
    assert has_fused_kernel(call, device) == (kernel != "unfused")


def test_the_installed_mlx_is_the_one_whose_conditions_were_read() -> None:
    found = version("mlx")
    assert found == MLX_VERSION, (
        f"MLX {found} is installed. Look again at ScaledDotProductAttention::use_fallback and eval_gpu in "
        "mlx/backend/metal and mlx/backend/cuda, mend engine/kv/attention_kernel.py, and then raise MLX_VERSION."
    )


def test_the_installed_mlx_takes_force_fused() -> None:
    x = mx.zeros((1, 1, 16, 64))
    with pytest.raises(ValueError, match="no fused kernel"):
        mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, force_fused=True)

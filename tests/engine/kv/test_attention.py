"""Attention: the one place where mlx-lm is touched, NumPy's attention, and which of MLX's kernels a step takes."""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kv.models import bypassed, codec, feed, largest_difference, tiny_llama, tokens
from tokamac.engine import KVSpec
from tokamac.engine.kv import attention
from tokamac.engine.kv import cache as cache_module
from tokamac.engine.kv import layout as layout_module
from tokamac.engine.kv.attention import NAME, install_seam
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.costs import MLX_VERSION, AttentionCall, AttentionDevice, Kernel, has_fused_kernel, kernel_of
from tokamac.engine.kv.layout import Codec, Growing, Layout, Ring
from tokamac.engine.kv.plan import plan_caches


@pytest.fixture
def original() -> Any:
    """mlx-lm's own function, whatever is installed by now."""
    from mlx_lm.models import base

    return getattr(getattr(base, NAME), "__wrapped__", getattr(base, NAME))


def test_installing_twice_changes_nothing_more() -> None:
    from mlx_lm.models import base

    install_seam()
    first = getattr(base, NAME)
    install_seam()
    assert getattr(base, NAME) is first
    assert not hasattr(first.__wrapped__, "__wrapped__")


def test_modules_imported_before_and_after_are_covered(original: Any) -> None:
    from mlx_lm.models import base

    early = importlib.import_module("mlx_lm.models.llama")
    setattr(early, NAME, original)  # as if it had been imported before anything was installed
    install_seam()
    assert getattr(early, NAME) is getattr(base, NAME)
    sys.modules.pop("mlx_lm.models.olmo2", None)
    late = importlib.import_module("mlx_lm.models.olmo2")
    assert getattr(late, NAME) is getattr(base, NAME)


def test_a_stranger_who_rebound_the_name_is_left_alone() -> None:
    module = importlib.import_module("mlx_lm.models.qwen2")
    install_seam()
    ours = getattr(module, NAME)

    def theirs(*args: Any, **kwargs: Any) -> None: ...

    try:
        setattr(module, NAME, theirs)
        install_seam()
        assert getattr(module, NAME) is theirs
    finally:
        setattr(module, NAME, ours)


def test_other_users_of_mlx_lm_see_it_unchanged(original: Any) -> None:
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    model, ids = tiny_llama(), tokens(60)
    makers = (KVCache, lambda: RotatingKVCache(16, keep=2), lambda: QuantizedKVCache(32, 8))
    install_seam()
    seam = getattr(llama, NAME)
    for make in makers:
        results = []
        for bound in (seam, original):
            setattr(llama, NAME, bound)
            results.append(feed(model, [make(), make()], ids, [20, 1, 1]))
        setattr(llama, NAME, seam)
        assert largest_difference(*results) == 0
    without = [model(ids)[0]]
    assert largest_difference(without[0], feed(model, [KVCache(), KVCache()], ids, [])) < 1e-4


def test_quantized_strangers_still_cannot_have_sinks() -> None:
    from mlx_lm.models import base
    from mlx_lm.models.cache import QuantizedKVCache

    install_seam()
    x = mx.zeros((1, 1, 1, 32))
    with pytest.raises(ValueError, match="sinks"):
        getattr(base, NAME)(x, x, x, QuantizedKVCache(32, 8), 1.0, None, mx.zeros((1,)))


def test_gemma2_is_unchanged_for_strangers() -> None:
    from mlx_lm.models import gemma2
    from mlx_lm.models.cache import KVCache

    from tests.engine.kv.test_cache import gemma2 as make

    model, ids = make(), tokens(30)
    install_seam()
    ours = gemma2.Attention.__call__
    with_door = feed(model, [KVCache() for _ in model.layers], ids, [10, 1])
    try:
        gemma2.Attention.__call__ = ours.__wrapped__
        without = feed(model, [KVCache() for _ in model.layers], ids, [10, 1])
    finally:
        gemma2.Attention.__call__ = ours
    assert largest_difference(with_door, without) == 0


def test_calls_are_counted_so_that_a_bypass_shows() -> None:
    model = tiny_llama()
    caches = plan_caches(model, {}, KVSpec()).make()
    feed(model, caches, tokens(5), [2, 1])
    assert [cache.seam_calls for cache in caches] == [3, 3]
    caches = plan_caches(model, {}, KVSpec()).make()
    caches[1].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
    assert bypassed(caches) == [(1,)]


# NumPy's attention says what MLX's does: masks of every kind, shared heads, sinks.


def arrays(heads: int, repeats: int, count: int, total: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    random = np.random.default_rng(seed)
    shapes = ((1, heads * repeats, count, 32), (1, heads, total, 32), (1, heads, total, 16))
    return tuple(mx.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes)  # type: ignore[return-value]


def difference(a: mx.array, b: mx.array) -> float:
    return float(mx.max(mx.abs(a - b)).item())


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 20),
    st.sampled_from(["causal", "bool", "add", None]),
)
def test_it_agrees_with_the_fused_kernel(heads: int, repeats: int, count: int, before: int, kind: str | None) -> None:
    queries, keys, values = arrays(heads, repeats, count, before + count)
    mask: mx.array | str | None = kind
    if kind == "bool":
        mask = mx.tri(count, before + count, before, dtype=mx.bool_)
    elif kind == "add":
        mask = mx.random.normal((count, before + count), key=mx.random.key(3))
    ours = attention.attend_in_numpy(queries, keys, values, scale=0.2, mask=mask, sinks=None)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    assert difference(ours, theirs) < 1e-5


def test_sinks_take_weight_and_give_nothing() -> None:
    queries, keys, values = arrays(2, 2, 5, 9)
    sinks = mx.array([0.5, -1.0, 3.0, 0.0])
    ours = attention.attend_in_numpy(queries, keys, values, scale=0.2, mask="causal", sinks=sinks)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask="causal", sinks=sinks)
    assert difference(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("count", "total", "dtype", "worth"),
    [
        (256, 4096, mx.float32, True),
        (1, 40_000, mx.float32, False),
        (8, 64, mx.float32, False),
        (256, 4096, mx.float16, False),
    ],
)
def test_only_large_float32_work_on_a_cpu_goes_there(count: int, total: int, dtype: mx.Dtype, worth: bool) -> None:
    queries, keys = mx.zeros((1, 2, count, 8), dtype), mx.zeros((1, 2, total, 8), dtype)
    assert attention.prefers_numpy(queries, keys) is (worth and mx.default_device() == mx.Device(mx.cpu))


def test_calls_without_a_cache_go_there_where_that_is_asked_for() -> None:
    from mlx_lm.models import base

    install_seam()
    queries, keys, values = arrays(2, 2, 512, 512)
    by: dict[str, Any] = {"scale": 0.2, "mask": "causal"}
    ours = attention.attend_in_numpy(queries, keys, values, **by, sinks=None)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, **by)
    assert mx.array_equal(base.scaled_dot_product_attention(queries, keys, values, cache=None, **by), theirs)
    with attention.attending_uncached():
        found = base.scaled_dot_product_attention(queries, keys, values, cache=None, **by)
    assert mx.array_equal(found, ours if mx.default_device() == mx.Device(mx.cpu) else theirs)


# Which kernel attends: MLX's own conditions, as a table written by hand.

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
        "mlx/backend/metal and mlx/backend/cuda, mend engine/kv/costs.py, and then raise MLX_VERSION."
    )


def test_the_installed_mlx_takes_force_fused() -> None:
    x = mx.zeros((1, 1, 16, 64))
    with pytest.raises(ValueError, match="no fused kernel"):
        mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, force_fused=True)


# Which of MLX's kernels a step asks for on a GPU: recorded here from calls and graphs, since what they take can't
# be measured.

# Rows from which MLX's Metal backend multiplies by qmm_n where `transpose` is off (QuantizedMatmul::eval_gpu).
QMM_ROWS = 4

DEVICES = (cache_module, layout_module)  # the modules that ask which device it is

Calls = list[tuple[tuple[mx.array, ...], dict[str, Any]]]


def on_metal(patch: pytest.MonkeyPatch) -> None:
    for module in DEVICES:
        patch.setattr(module, "device_kind", lambda: "metal")


def recorded(patch: pytest.MonkeyPatch, name: str) -> Calls:
    """Record from now on the calls of one of MLX's functions: its arrays and its options."""
    own: Callable[..., Any] = getattr(mx, name)
    calls: Calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return own(*args, **kwargs)

    patch.setattr(mx, name, call)
    return calls


def attended(cache: Cache, count: int, repeats: int, seed: int, *, heads: int = 2, dim: int = 64) -> mx.array:
    """Feed ``count`` tokens; return what they gather (1, H·R, count, D)."""
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    queries = mx.random.normal((1, heads * repeats, count, dim), key=a)
    keys, values = (mx.random.normal((1, heads, count, dim), key=key) for key in (b, c))
    mask = cache.make_mask(count)
    out = cache.attend(queries, *cache.update_and_fetch(keys, values), scale=dim**-0.5, mask=mask)
    mx.eval(out, cache.state)
    return out


layouts = st.sampled_from((Growing(), Ring(24, 4, 8), Ring(24, 0, 8), Ring(16, 3, 0), Ring(400, 4, 64)))
codecs = st.tuples(st.sampled_from((16, 8, 6, 5, 4, 3, 2)), st.sampled_from((8, 6, 5, 4, 3, 2)), st.booleans()).map(
    lambda each: (
        codec(each[0], rotated_dim=64 if each[0] <= 4 else None),
        codec(each[1], rotated_dim=64 if each[2] else None),
    )
)


@given(
    layout=layouts,
    codecs=codecs,
    repeats=st.sampled_from((1, 2, 3, 4, 5, 7, 8)),
    depth=st.sampled_from((1, 15, 23, 24, 32, 70)),
    heads=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_a_decode_step_on_metal_keeps_from_the_kernel_that_walks_all_tokens(
    layout: Layout, codecs: tuple[Codec, Codec], repeats: int, depth: int, heads: int
) -> None:
    def steps() -> list[mx.array]:
        cache = Cache(layout, *codecs)
        attended(cache, depth, repeats, 1, heads=heads)
        return [attended(cache, 1, repeats, seed, heads=heads) for seed in (2, 3, 4)]

    elsewhere = steps()
    with pytest.MonkeyPatch.context() as patch:
        on_metal(patch)
        calls = recorded(patch, "quantized_matmul")
        there = steps()
    by_tokens = [arrays for arrays, options in calls if not options["transpose"]]
    assert len(by_tokens) == 3 + (depth == 1)
    for weights, *packed in by_tokens:
        assert weights.shape[-2] < QMM_ROWS
        # One row of words for all queries of a head: the kernel reads it again, and nothing copies it.
        assert all((array.shape[:2] == (1, heads) and array.ndim == 4) or array.shape[2] == 1 for array in packed)
    for ours, theirs in zip(there, elsewhere, strict=True):
        assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("heads", [4, 5, 7, 8])
@pytest.mark.parametrize(
    "spec",
    [KVSpec(8, 8, 32), KVSpec(8, 4, 32, window=24, keep=4), KVSpec(4, 4, 32), KVSpec(16, 4, 32, window=24, keep=0)],
    ids=str,
)
def test_logits_on_metals_path_are_the_others(heads: int, spec: KVSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(heads=heads, kv_heads=1)
    plan, ids, cuts = plan_caches(model, {"model_type": "llama"}, spec), tokens(60), [50, *[1] * 9]
    elsewhere = feed(model, plan.make(), ids, cuts)
    on_metal(monkeypatch)
    calls = recorded(monkeypatch, "quantized_matmul")
    there = feed(model, plan.make(), ids, cuts)
    rows = [arrays[0].shape[-2] for arrays, options in calls if not options["transpose"]]
    assert len(rows) == 10 * 2  # steps and layers
    assert max(rows) < QMM_ROWS
    assert largest_difference(there, elsewhere) < 1e-4


@pytest.mark.parametrize(("count", "depth"), [(40, 300), (40, 0), (300, 40)])
@pytest.mark.parametrize("bits", [(4, 8), (4, 4), (8, 3)])
def test_prefill_rotates_the_queries_or_the_keys_whichever_are_fewer(
    count: int, depth: int, bits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, repeats, dim = 2, 3, 64
    key_codec = codec(bits[0], rotated_dim=dim if bits[0] <= 4 else None)
    value_codec = codec(bits[1], rotated_dim=dim if bits[1] <= 4 else None)
    cache = Cache(Growing(), key_codec, value_codec)
    if depth:
        attended(cache, depth, repeats, 1)
    calls = recorded(monkeypatch, "hadamard_transform")
    out = attended(cache, count, repeats, 2)
    sizes = [arrays[0].size // dim for arrays, _ in calls]
    whole = Cache(Growing(), key_codec, value_codec, direct=False)  # it decodes all, and rotates it back
    if depth:
        attended(whole, depth, repeats, 1)
    assert largest_difference(out, attended(whole, count, repeats, 2)) < 1e-5
    rotated = (key_codec.block is not None) + (value_codec.block is not None)
    fewer = heads * min(repeats * count, depth + count)
    assert Counter(sizes) == Counter([heads * count] * rotated + [fewer] * rotated)


@pytest.mark.parametrize("tokens_held", [1000, 4000])
def test_metal_decodes_all_slots_rather_than_copy_some(tokens_held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def piece() -> tuple[mx.array, Cache]:
        cache = Cache(Growing(), codec(4, rotated_dim=64), codec(8))
        attended(cache, tokens_held, 2, 1)
        return attended(cache, 30, 2, 2), cache

    elsewhere, _ = piece()
    on_metal(monkeypatch)
    calls = recorded(monkeypatch, "dequantize")
    there, cache = piece()
    assert cache.slots > tokens_held + 30
    assert [arrays[0].shape[2] for arrays, _ in calls[-2:]] == [cache.slots] * 2
    assert largest_difference(there, elsewhere) == 0


def test_metal_does_not_decode_slots_of_which_most_are_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(Growing(), codec(4), codec(4))
    attended(cache, 4000, 2, 1)
    assert cache.trim(3000) == 3000
    on_metal(monkeypatch)
    calls = recorded(monkeypatch, "dequantize")
    attended(cache, 30, 2, 2)
    assert [arrays[0].shape[2] for arrays, _ in calls] == [1030] * 2


def operations(out: mx.array, folder: Path) -> Counter[str]:
    """Return what ``out`` would compute, by the names of MLX's operations."""
    mx.export_to_dot(str(folder / "step.dot"), out)
    return Counter(re.findall(r'label ?="([A-Za-z]+)"', (folder / "step.dot").read_text(encoding="utf-8")))


# What a mask takes where positions are compared on the device.
MASKING = {"Less", "LessEqual", "Greater", "GreaterEqual", "Remainder", "BitwiseBinary", "BitwiseAnd", "BitwiseOr"}


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
@pytest.mark.parametrize("held", [20, 31, 141])
def test_a_step_in_a_ring_computes_no_mask(keep: int, bits: tuple[int, int], held: int, tmp_path: Path) -> None:
    model = tiny_llama()
    caches = plan_caches(model, {"model_type": "llama"}, KVSpec(*bits, 32, window=24, keep=keep)).make()
    growing = plan_caches(model, {"model_type": "llama"}, KVSpec(*bits, 32)).make()
    for each in (caches, growing):
        feed(model, each, tokens(held), [])
    step = operations(model(tokens(1, 5), cache=caches), tmp_path)
    assert not MASKING & set(step)
    plain = operations(model(tokens(1, 5), cache=growing), tmp_path)
    masked = {name: count - plain[name] for name, count in step.items() if count > plain[name]}
    # Where the fused kernel takes no mask (on a CPU): views, and a choice in each layer.
    assert set(masked) <= {"Select", "Broadcast", "Unflatten", "Reshape"}
    assert masked.get("Select", 0) <= len(caches)


def test_layers_alike_share_the_mask_of_a_step() -> None:
    caches = [Cache(Ring(24, 4, 8), codec(16), codec(16)) for _ in range(3)]
    for each in caches:
        attended(each, 50, 1, 1)
    masks = [each.make_mask(1) for each in caches]
    assert isinstance(masks[0], mx.array)
    assert all(mask is masks[0] for mask in masks)

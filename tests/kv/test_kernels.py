"""Which of MLX's kernels a step asks for on a GPU: recorded here from calls and graphs, since what they take can't be measured."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.models import codec, feed, largest_difference, tiny_llama, tokens
from tokamac.engine import KVSpec
from tokamac.engine.kv import cache as cache_module
from tokamac.engine.kv import codec as codec_module
from tokamac.engine.kv import plan_caches
from tokamac.engine.kv.cache import Cache
from tokamac.engine.kv.codec import Codec
from tokamac.engine.kv.layout import Growing, Layout, Ring

QMM_ROWS = 4
"""Rows from which MLX's Metal backend multiplies by qmm_n where ``transpose`` is off (QuantizedMatmul::eval_gpu)."""

DEVICES = (cache_module, codec_module)
"""The modules that ask which device it is."""

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
def test_a_models_logits_on_metals_path_are_those_of_the_other(
    heads: int, spec: KVSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_metal_decodes_all_slots_rather_than_copy_the_used_ones(
    tokens_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


MASKING = {"Less", "LessEqual", "Greater", "GreaterEqual", "Remainder", "BitwiseBinary", "BitwiseAnd", "BitwiseOr"}
"""What a mask takes where positions are compared on the device."""


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

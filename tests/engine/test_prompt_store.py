"""The prompt cache over real caches: what is taken equals what a cold run computes, for every kind of cache."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.kv.models import seeded, tiny_llama
from tests.kv.zoo import VOCABULARY
from tokamac.engine import kv
from tokamac.engine.kv import snapshot
from tokamac.engine.kv.plan import CachePlan, plan_caches
from tokamac.engine.model.config import model_classes, normalise
from tokamac.engine.options import KVSpec
from tokamac.engine.prompt_cache.cache import PromptCache
from tokamac.engine.prompt_cache.disk import DiskStore
from tokamac.engine.prompt_cache.folder import Folder
from tokamac.engine.prompt_cache.memory import CacheLease, MemoryStore

LARGE = 1 << 40


def llama() -> tuple[Any, dict[str, Any]]:
    return tiny_llama(), {"model_type": "llama"}


def hybrid() -> tuple[Any, dict[str, Any]]:
    """Two recurrent layers and two of attention."""
    from mlx_lm.models import lfm2

    config = {
        "model_type": "lfm2",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "rope_theta": 10000.0,
    }
    return seeded(lfm2.Model(lfm2.ModelArgs.from_dict(config))), config


def compressed() -> tuple[Any, dict[str, Any]]:
    """A layer that slides, and two kinds that see far tokens through compressed entries (DeepSeek V4)."""
    case = Path(__file__).parents[1] / "golden" / "deepseek_v4_window" / "config.json"
    config = normalise({**json.loads(case.read_text()), "mlp_layer_types": ["moe"] * 4})
    make, arguments = model_classes(config)
    return seeded(make(arguments.from_dict(config))), config


KINDS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], KVSpec, float]] = {
    "full": (llama, KVSpec(), 1e-4),
    "packed": (llama, KVSpec(8, 4, group_size=32), 1e-3),
    "window": (llama, KVSpec(window=24, keep=2), 1e-4),
    "packed window": (llama, KVSpec(4, 4, group_size=32, window=24, keep=2), 1e-3),
    "hybrid": (hybrid, KVSpec(), 1e-4),
    "compressed": (compressed, KVSpec(), 1e-4),
}


def compute(model: Any, lease: CacheLease, ids: list[int]) -> np.ndarray:
    """Compute what is missing of ``ids`` and return the logits of the last."""
    new = ids[len(lease.ids) :]
    logits = model(mx.array([new]), cache=lease.caches)[0, -1]
    mx.eval(logits, [cache.state for cache in lease.caches])
    lease.ids.extend(new)
    return np.array(logits.astype(mx.float32))  # a copy: a view would hold all of the logits


class Bench:
    """A model, its plan, and what a cold run computes."""

    def __init__(self, kind: str) -> None:
        make, self.spec, self.tolerance = KINDS[kind]
        self.model, config = make()
        self.plan: CachePlan = plan_caches(self.model, config, self.spec)
        self._cold: dict[tuple[int, ...], np.ndarray] = {}

    def store(self, budget: int = LARGE) -> MemoryStore:
        return MemoryStore(self.plan.make, lambda: budget, all_grow=snapshot.all_grow(self.plan.make(None)))

    def cache(self, folder: Folder, model: str, budget: int = LARGE, **more: Any) -> PromptCache:
        """A cache as a fresh process has it."""
        cache = PromptCache(self.plan.make, lambda: budget, all_grow=snapshot.all_grow(self.plan.make(None)))
        cache.use_disk(DiskStore(folder, model, "m", cache.rates, **more))
        return cache

    def cold(self, ids: list[int]) -> np.ndarray:
        if tuple(ids) not in self._cold:
            self._cold[tuple(ids)] = compute(self.model, CacheLease([], self.plan.make(None), None), ids)
        return self._cold[tuple(ids)]


BENCHES = {kind: Bench(kind) for kind in KINDS}


def ask(bench: Bench, store: MemoryStore, prompt: list[int], reply: list[int]) -> int:
    """Do as a request does: take, prefill, mark, decode; check the logits; return how many tokens were found computed."""
    lease = store.acquire(prompt, None)
    cached = len(lease.ids)
    assert lease.ids == prompt[:cached]
    assert cached < len(prompt)
    with lease:
        if len(lease.ids) < len(prompt) - 1:
            compute(bench.model, lease, prompt[:-1])
        store.checkpoint(lease)
        found = compute(bench.model, lease, prompt)
        assert np.abs(found - bench.cold(prompt)).max() < bench.tolerance
        if reply:
            compute(bench.model, lease, prompt + reply)
    return cached


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_to_another_branch_and_back_computes_one_token(kind: str) -> None:
    bench, store = BENCHES[kind], BENCHES[kind].store()
    trunk = [number % VOCABULARY for number in range(7, 47)]
    one, two = [*trunk, 1, 2, 3], [*trunk, 9, 8]
    assert ask(bench, store, trunk, []) == 0
    costs = [len(prompt) - ask(bench, store, prompt, [4] * 9) for prompt in (one, two, one, two)]
    assert costs[2:] == [1, 1]
    if kind in ("full", "packed"):
        assert costs[:2] == [3, 2]


def test_branches_hold_their_prefix_once() -> None:
    bench = BENCHES["full"]
    store = bench.store()
    trunk = [number % VOCABULARY for number in range(512)]
    ask(bench, store, trunk, [])
    for branch in range(8):
        ask(bench, store, [*trunk, *([branch] * 16)], [])
    tokens = sum(len(node.tokens) for node in store._nodes())
    assert tokens == len(trunk) + 8 * 16
    grown = segments_of(store)
    assert grown == tokens * bench.plan.bytes_per_token


def segments_of(store: MemoryStore) -> int:
    """Bytes of all tokens held: pieces, and what is used of the live caches."""
    assert store._live is not None
    return sum(node.value.nbytes for node in store._nodes()) + sum(
        array[..., : cache.offset, :].nbytes for cache in store._live.caches for array in cache.arrays
    )


@pytest.fixture
def no_pool() -> Iterator[None]:
    """MLX puts an array into a pooled buffer that may be larger by two pages: without the pool, bytes are what they are."""
    mx.clear_cache()
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_pool")
@pytest.mark.usefixtures("settled_memory")
def test_bytes_are_counted_and_returned(kind: str) -> None:
    bench = BENCHES[kind]
    trunk = [number % VOCABULARY for number in range(3, 403)]
    for last in (1, 2):
        bench.cold([*trunk, last])
    before = mx.get_active_memory()
    store = bench.store()
    for last in (1, 2):
        ask(bench, store, [*trunk, last], [5] * 300)
    held, counted = mx.get_active_memory(), store.nbytes
    if kind != "hybrid":  # whose own state is a view of a larger array
        assert held - before == pytest.approx(counted, abs=4096)
    store._budget = lambda: 0
    store._evict()
    assert store._live is not None
    assert store.nbytes == kv.nbytes(store._live.caches)
    assert held - mx.get_active_memory() == pytest.approx(counted - store.nbytes, abs=4096)
    assert counted > store.nbytes
    store.clear()
    assert mx.get_active_memory() - before < 4096


def test_the_least_recently_used_goes_first() -> None:
    bench = BENCHES["full"]
    per_token = bench.plan.bytes_per_token
    store = bench.store(kv.nbytes(filled(bench, 100)) + 250 * per_token)
    prompts = [[first, *counting(100)] for first in (1, 2, 3, 4)]
    for prompt in prompts:
        ask(bench, store, prompt, [])
    assert [store.known(prompt, None).tokens for prompt in prompts] == [0, 100, 100, 100]


def filled(bench: Bench, tokens: int) -> list[Any]:
    lease = CacheLease([], bench.plan.make(None), None)
    compute(bench.model, lease, counting(tokens))
    return lease.caches


def counting(tokens: int) -> list[int]:
    """So many ids, each of the vocabulary: MLX would look up any other beyond the end of its table."""
    return [number % VOCABULARY for number in range(tokens)]


def test_after_a_failure_nothing_of_it_is_used() -> None:
    bench = BENCHES["full"]
    store = bench.store()
    ask(bench, store, [1, 2, 3, 4], [])
    lease = store.acquire([1, 2, 3, 9], None)
    with pytest.raises(RuntimeError, match="halfway"), lease:
        raise RuntimeError("halfway")
    assert store.nbytes == 0
    assert ask(bench, store, [1, 2, 3, 4], []) == 0


def test_caches_with_other_pinned_tokens_are_other_caches() -> None:
    bench, ids = BENCHES["window"], list(range(12))
    store = bench.store()
    lease = store.acquire(ids, 2)
    with lease:
        compute(bench.model, lease, ids)
    assert store.acquire([*ids, 5], 3).ids == []
    assert store.acquire([*ids, 5], 2).ids == ids


def test_crumbs_are_not_kept() -> None:
    bench = BENCHES["full"]
    store = bench.store()
    ask(bench, store, list(range(40)), [3, 3, 3])
    ask(bench, store, [*range(40), 5, 6], [])
    assert sum(node.value.nbytes for node in store._nodes()) == 0
    assert store.known([*range(40), 5, 6, 7], None).tokens == 42


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_put_back_is_the_state_it_was(kind: str) -> None:
    bench = BENCHES[kind]
    ids = [number % VOCABULARY for number in range(60)]
    lease = CacheLease([], bench.plan.make(None), None)
    compute(bench.model, lease, ids)
    whole, states = snapshot.cut(lease.caches, 0, 60), snapshot.freeze(lease.caches)
    compute(bench.model, lease, [*ids, 1, 2, 3])  # writes over what was frozen, were it not a copy
    fresh = CacheLease(list(ids), bench.plan.make(None), None)
    snapshot.extend(fresh.caches, whole)
    snapshot.thaw(fresh.caches, states)
    found = compute(bench.model, fresh, [*ids, 9])
    assert np.abs(found - bench.cold([*ids, 9])).max() < bench.tolerance

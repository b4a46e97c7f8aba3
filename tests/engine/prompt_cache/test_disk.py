"""Prompts in memory and on disk: what is taken equals what a cold run computes, and what is wrong there is a miss."""

import datetime
import errno
import gc
import json
import subprocess
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from sys import getsizeof
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.inside import disk_of, held_of, idle_of, nodes_of
from tests.engine.kv.models import VOCABULARY, seeded, tiny_llama
from tests.waiting import PATIENCE_S
from tokamac.engine import Engine, Finished, PromptCacheSpec, Sampling
from tokamac.engine.kv import snapshot
from tokamac.engine.kv.cache import nbytes
from tokamac.engine.kv.plan import CachePlan, plan_caches
from tokamac.engine.kv.snapshot import LOCAL
from tokamac.engine.metrics import Rates
from tokamac.engine.model.config import model_classes, normalise
from tokamac.engine.options import KVSpec
from tokamac.engine.prompt_cache import memory
from tokamac.engine.prompt_cache.cache import PAUSE_S, PromptCache
from tokamac.engine.prompt_cache.disk import (
    AGAIN_S,
    DamagedError,
    DiskStore,
    HostSegment,
    from_bytes,
    to_bytes,
    to_host,
)
from tokamac.engine.prompt_cache.folder import Budgets, Folder, child_name, root_name
from tokamac.engine.prompt_cache.memory import (
    WORTH_WAITING,
    CacheLease,
    CacheStore,
    Node,
    common_prefix,
    insert,
    match_prefix,
    remove,
    split,
)

# The radix tree under the prompt cache, against a plain list of what was put in.

runs = st.lists(st.integers(0, 2), max_size=12)


def root() -> Node[str]:
    return Node([], None, 0, "")


def put(tree: Node[str], ids: list[int]) -> None:
    node, at = match_prefix(tree, ids)
    if at < node.stop:
        node = split(node, at, "", node.value)
    if at < len(ids):
        insert(node, ids[at:], "")


def leading(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(runs, runs)
def test_the_common_prefix_is_what_counting_finds(a: list[int], b: list[int]) -> None:
    assert common_prefix(a, b) == leading(a, b)


@given(st.lists(runs, max_size=12), runs)
def test_the_longest_known_prefix_is_found_at_any_length(held: list[list[int]], wanted: list[int]) -> None:
    tree = root()
    for ids in held:
        put(tree, ids)
    node, at = match_prefix(tree, wanted)
    assert at == max((leading(ids, wanted) for ids in held), default=0)
    assert node.ids()[:at] == wanted[:at]
    assert node.start <= at <= node.stop


@given(st.lists(runs, min_size=1, max_size=12))
def test_every_beginning_is_held_once(held: list[list[int]]) -> None:
    tree = root()
    for ids in held:
        put(tree, ids)
    prefixes = {tuple(ids[:length]) for ids in held for length in range(1, len(ids) + 1)}
    assert sum(len(node.tokens) for node in tree.subtree()) == len(prefixes)
    assert all(node.stop == node.start + len(node.tokens) == len(node.ids()) for node in tree.subtree())


def test_what_is_removed_is_gone_with_all_below_it() -> None:
    tree = root()
    for ids in ([1, 2, 3], [1, 2, 4], [5]):
        put(tree, ids)
    remove(tree.children[1])
    assert match_prefix(tree, [1, 2, 3]) == (tree, 0)
    assert match_prefix(tree, [5])[1] == 1


# The prompt cache over real caches: what is taken equals what a cold run computes, for every kind of cache.

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
    case = Path(__file__).parents[2] / "golden" / "deepseek_v4_window" / "config.json"
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

    def store(self, budget: int = LARGE) -> CacheStore:
        return CacheStore(self.plan.make, lambda: budget, all_grow=snapshot.all_grow(self.plan.make(None)))

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


def ask(bench: Bench, store: CacheStore | PromptCache, prompt: list[int], reply: list[int]) -> int:
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
    tokens = sum(len(node.tokens) for node in nodes_of(store))
    assert tokens == len(trunk) + 8 * 16
    grown = segments_of(store)
    assert grown == tokens * bench.plan.bytes_per_token


def segments_of(store: CacheStore) -> int:
    """Bytes of all tokens held: pieces, and what is used of the live caches."""
    assert idle_of(store) is not None
    return sum(node.value.nbytes for node in nodes_of(store)) + sum(
        array[..., : cache.offset, :].nbytes for cache in idle_of(store).lease.caches for array in cache.arrays
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
    assert idle_of(store) is not None
    assert store.nbytes == nbytes(idle_of(store).lease.caches)
    assert held - mx.get_active_memory() == pytest.approx(counted - store.nbytes, abs=4096)
    assert counted > store.nbytes
    store.clear()
    assert mx.get_active_memory() - before < 4096


def test_the_least_recently_used_goes_first() -> None:
    bench = BENCHES["full"]
    per_token = bench.plan.bytes_per_token
    store = bench.store(nbytes(filled(bench, 100)) + 250 * per_token)
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


class ShortOfMemory:
    """What is done to caches; ``fails_after`` so many things it fails at one, halfway where tokens are moved. None: at none."""

    def __init__(self) -> None:
        self.fails_after: int | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def act(caches: Any, *more: Any, **named: Any) -> Any:
            if self.fails_after == 0:
                self.fails_after = None
                self._begin(name, caches, *more, **named)
                raise RuntimeError(f"[malloc] Unable to allocate for {name}")
            if self.fails_after is not None:
                self.fails_after -= 1
            return getattr(LOCAL, name)(caches, *more, **named)

        return act

    def _begin(self, name: str, caches: Any, *more: Any, **named: Any) -> None:
        """Move the tokens of the first cache alone."""
        first = [cache for cache in caches if snapshot.grows(cache)][:1] if name in ("cut_off", "extend") else []
        if first and name == "cut_off":
            snapshot.cut_off(first, *more)
        elif first:
            piece, *bounds = more
            snapshot.extend(first, piece[:1], *bounds, **named)


TRUNK = [number % VOCABULARY for number in range(7, 47)]
ONE, TWO, OTHER = [*TRUNK, *range(1, 15)], [*TRUNK, *range(20, 33)], [*range(60, 90)]


def switches(bench: Bench, store: CacheStore) -> Iterator[Callable[[], Any]]:
    """Yield requests of a few conversations in turn, two of them at once."""
    yield lambda: ask(bench, store, TWO, [4] * 9)
    yield lambda: ask(bench, store, ONE, [4] * 9)
    yield lambda: ask(bench, store, TWO, [4] * 9)
    yield lambda: ask(bench, store, OTHER, [])

    def at_once() -> None:
        with store.acquire(ONE, None) as lease:
            compute(bench.model, lease, ONE[: len(lease.ids) + 3])
            ask(bench, store, TWO, [])
            ask(bench, store, ONE, [])

    yield at_once
    yield lambda: ask(bench, store, TRUNK, [])


@pytest.mark.parametrize(
    ("kind", "sharing", "step"),
    [
        *(("full", LARGE, 3), ("full", 10, 3), ("hybrid", LARGE, 7)),
        *(pytest.param("full", sharing, 1, marks=pytest.mark.exhaustive) for sharing in (LARGE, 10)),
        pytest.param("hybrid", LARGE, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_where_there_is_no_memory_to_move_caches_they_are_dropped_and_no_answer_is_wrong(
    kind: str, sharing: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time another thing that is done to caches fails, ``step`` after the one before."""
    monkeypatch.setattr(memory, "WORTH_SHARING", sharing)
    bench, failures = BENCHES[kind], 0
    while True:
        operations = ShortOfMemory()
        store = CacheStore(
            bench.plan.make,
            lambda: LARGE,
            all_grow=snapshot.all_grow(bench.plan.make(None)),
            operations=operations,  # type: ignore[arg-type]
        )
        operations.fails_after = failures
        for request in switches(bench, store):
            try:
                request()
            except RuntimeError as error:
                assert "Unable to allocate" in str(error)  # noqa: PT017  # any other step does not fail
            assert not store.leases
            check_tree(store)
        if operations.fails_after is not None:  # nothing is left that could fail
            break
        failures += step
        for prompt in (ONE, TWO, OTHER):
            ask(bench, store, prompt, [])
            check_tree(store)
    assert failures > 10


def check_tree(store: CacheStore) -> None:
    """Check that every token the tree knows is held once: by live caches, or in the tree."""
    for held in held_of(store):
        assert held.lease.ids == held.end.ids()
        assert all(cache.offset == len(held.lease.ids) for cache in held.lease.caches if snapshot.grows(cache))
    on_path = {id(node) for held in held_of(store) for node in held.end.path()}
    growing = any(snapshot.grows(cache) for held in held_of(store) for cache in held.lease.caches)
    for node in nodes_of(store):
        assert (node.value.piece is None) == (id(node) in on_path) or not growing


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
    assert sum(node.value.nbytes for node in nodes_of(store)) == 0
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


# The prompt cache across restarts: what comes back from disk equals a cold run, and what is wrong there is a miss.

MODEL = "cd" * 16
LONG = [(7 * number + number // 9) % VOCABULARY for number in range(700)]


def opened(bench: Bench, root: Path, budgets: Budgets | None = None) -> PromptCache:
    return bench.cache(Folder(root, budgets or Budgets()), MODEL)


def ask_disk(bench: Bench, cache: PromptCache, prompt: list[int], reply: list[int]) -> int:
    """Do so, and what can wait after it."""
    cached = ask(bench, cache, prompt, reply)
    cache.flush(PATIENCE_S)
    assert cache.trouble is None
    return cached


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_the_conversation_goes_on(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    assert ask_disk(bench, opened(bench, tmp_path), LONG, [1, 2, 3]) == 0
    grows = kind in ("full", "packed")  # else it goes on where its state was frozen: at the end of the prompt
    assert ask_disk(bench, opened(bench, tmp_path), [*LONG, 1, 2, 3, 4], [5] * 40) == (703 if grows else 699)
    third = opened(bench, tmp_path)
    assert third.known([*LONG, 1, 2, 3, 4, *([5] * 40), 9], None).tokens == 744
    assert ask_disk(bench, third, [*LONG, 1, 2, 3, 4, *([5] * 40), 9], []) == 744


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_any_beginning_of_what_is_stored_is_of_use(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    for length in (300, 512, 650):
        assert ask_disk(bench, opened(bench, tmp_path), [*LONG[:length], 0, 1], []) == length + (LONG[length] == 0)


def test_conversations_that_begin_alike_share_files_and_a_longer_end_replaces_a_shorter(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    cache = opened(bench, tmp_path)
    ask_disk(bench, cache, LONG, [])  # 256, 512, 700
    assert lengths(tmp_path) == [188, 256, 256]
    ask_disk(bench, cache, [*LONG, *([3] * 40)], [])
    assert lengths(tmp_path) == [228, 256, 256]
    ask_disk(bench, cache, [*LONG[:600], *([4] * 100)], [])
    assert lengths(tmp_path) == [188, 228, 256, 256]


def lengths(root: Path) -> list[int]:
    folder = Folder(root)
    return sorted(len(from_bytes(data).tokens) for entry in folder.entries(MODEL) if (data := folder.read(entry)))


def test_short_prompts_are_not_stored(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    ask_disk(bench, opened(bench, tmp_path), LONG[:200], [])
    assert lengths(tmp_path) == []


def held_by(disk: DiskStore) -> tuple[int, int]:
    """Return the bytes of what a store reaches, but code; and the tokens in arrays of them."""
    seen, waiting = dict[int, object](), list[object]([disk])
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType | BuiltinFunctionType):
            seen[id(each)] = each
            waiting += gc.get_referents(each)
    return sum(map(getsizeof, seen.values())), sum(len(each) for each in seen.values() if isinstance(each, array))


def test_a_stored_segment_takes_little_memory_and_the_tokens_of_all_are_bounded(tmp_path: Path) -> None:
    folder, root = Folder(tmp_path), entries_root()
    prompts = [[at, *range(1000, 1255)] for at in range(300, 360)]
    few, stores = 0, [DiskStore(folder, MODEL, "m", Rates(), most_tokens=most) for most in (1 << 21, 1024)]
    for at, prompt in enumerate(prompts):
        data = to_bytes(HostSegment(0, prompt, {}, {}, None))
        folder.write(MODEL, "m", root, child_name(root, prompt), data)
        if at == 19:
            assert stores[0].chain(prompts[7], None)[0].whole
            few = held_by(stores[0])[0]
    for prompt in prompts:
        assert [[(link.tokens, link.whole) for link in store.chain([*prompt, 1], None)] for store in stores] == [
            [(256, True)]
        ] * 2
        assert stores[1].nearest(prompt[:200], None) == prompt
    assert held_by(stores[0])[0] - few < 40 * 2000  # bytes; as lists they were 12,000 each
    assert [held_by(store)[1] for store in stores] == [60 * 256, 1024]


def test_what_is_dearer_to_read_than_to_compute_is_neither_written_nor_read(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    slow = opened(bench, tmp_path)
    slow.rates.prefill_tps, slow.rates.read_bps = 1e6, 1e3
    ask_disk(bench, slow, LONG, [])
    assert lengths(tmp_path) == []
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    slow = opened(bench, tmp_path)
    slow.rates.prefill_tps, slow.rates.read_bps = 1e6, 1e3
    assert slow.known(LONG, None).tokens == 0
    assert ask_disk(bench, slow, LONG, []) == 0


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_damaged_file_is_a_miss_from_there_on(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    entries = sorted(Folder(tmp_path).entries(MODEL), key=lambda entry: entry.size)
    data = bytearray(entries[0].path.read_bytes())
    data[len(data) // 2] ^= 1
    entries[0].path.write_bytes(data)
    assert ask_disk(bench, opened(bench, tmp_path), [*LONG, 1], []) == (512 if kind == "full" else 0)
    assert not entries[0].path.exists() or bytes(data) != entries[0].path.read_bytes()


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_whole_file_in_the_wrong_place_is_a_miss(kind: str, tmp_path: Path) -> None:
    """Its checksum is right, and its name says that it holds other tokens."""
    bench = BENCHES[kind]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    folder = Folder(tmp_path)
    first = next(entry for entry in folder.entries(MODEL) if entry.parent == entries_root())
    other = to_bytes(to_host(0, [9] * 256, snapshot.cut(filled_disk(bench), 0, 256), None))
    folder.remove(first)
    folder.write(MODEL, "m", first.parent, first.name, other)
    assert ask_disk(bench, opened(bench, tmp_path), [9] * 300, []) == 0
    assert ask_disk(bench, opened(bench, tmp_path), LONG, []) == 0


def entries_root() -> str:
    return root_name(MODEL, None)


def filled_disk(bench: Bench) -> list[Any]:
    from tokamac.engine.prompt_cache.memory import CacheLease

    lease = CacheLease([], bench.plan.make(None), None)
    compute(bench.model, lease, [9] * 256)
    return lease.caches


def test_what_was_read_in_part_for_want_of_memory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BENCHES["hybrid"]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    cache, thaw = opened(bench, tmp_path), snapshot.thaw

    def fail(*given: Any) -> None:
        thaw(*given)
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(snapshot, "thaw", fail)
        with pytest.raises(MemoryError):
            cache.acquire(LONG, None)
    assert ask_disk(bench, cache, LONG[9:50], []) == 0
    assert ask_disk(bench, cache, LONG, []) == len(LONG) - 1


def test_segments_of_another_shape_are_a_miss(tmp_path: Path) -> None:
    """Nothing but the fingerprint keeps models apart; where that fails, shapes still do."""
    ask_disk(BENCHES["full"], opened(BENCHES["full"], tmp_path), LONG, [])
    assert ask_disk(BENCHES["hybrid"], opened(BENCHES["hybrid"], tmp_path), LONG, []) == 0
    assert ask_disk(BENCHES["packed"], opened(BENCHES["packed"], tmp_path), LONG, []) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_read_in_pieces_it_is_the_same_and_nobody_reads_it_twice(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    at_once = opened(bench, tmp_path).acquire(LONG, None)
    cache = opened(bench, tmp_path)
    with cache.lend(LONG, None) as lease:
        for _ in cache.restore(lease, LONG, lambda: 0.0):
            assert lease.ids in (LONG[: len(lease.ids)], [])
            assert cache.is_coming(LONG, None) == (len(lease.ids) < len(LONG) - WORTH_WAITING)
            assert not cache.is_coming(LONG, None, but=lease)
        assert lease.ids == at_once.ids == LONG[:-1]
    cache = opened(bench, tmp_path)
    with cache.lend(LONG, None) as lease:
        assert not any(cache.is_coming(LONG, None) for _ in cache.restore(lease, LONG, lambda: 0.0, awaited=False))
        assert lease.ids == at_once.ids
        assert np.array_equal(*(compute(bench.model, each, LONG) for each in (lease, at_once)))


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_what_was_read_until_it_was_let_go_of_is_kept(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask_disk(bench, opened(bench, tmp_path), LONG, [])
    cache = opened(bench, tmp_path)
    with cache.lend(LONG, None) as lease, closing(cache.restore(lease, LONG, lambda: 0.0)) as reading:
        next(reading)
        with cache.lend([9, 8, 7], None) as other:  # whoever comes in between gets caches of its own
            assert np.abs(compute(bench.model, other, [9, 8, 7]) - bench.cold([9, 8, 7])).max() < bench.tolerance
    assert not lease.restoring
    assert lease.ids == LONG[:256]
    assert ask(bench, cache, LONG, [4]) == len(LONG) - 1


def test_segments_of_another_shape_leave_a_lease_in_use_empty_and_in_use(tmp_path: Path) -> None:
    bench = BENCHES["packed"]
    ask_disk(BENCHES["full"], opened(BENCHES["full"], tmp_path), LONG, [])
    cache = opened(bench, tmp_path)
    with cache.lend(LONG, None) as lease:
        assert list(cache.restore(lease, LONG, lambda: 0.0)) == []
        assert (lease.ids, cache.leases) == ([], [lease])
        assert np.abs(compute(bench.model, lease, LONG) - bench.cold(LONG)).max() < bench.tolerance
    assert ask(bench, cache, [*LONG, 5], []) == len(LONG)


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"\xff" * 64, (9).to_bytes(8, "little") + b'{"a": 1}  ' + b"x" * 9])
def test_what_is_no_segment_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(DamagedError):
        from_bytes(data)


def test_half_precision_comes_back_as_it_was() -> None:
    piece = ((mx.arange(24).reshape(1, 2, 3, 4).astype(mx.bfloat16), mx.ones((1, 2, 3, 1), mx.float16)),)
    segment = from_bytes(to_bytes(to_host(5, [1, 2, 3], piece, None)))
    assert (segment.start, segment.tokens, segment.states) == (5, [1, 2, 3], None)
    assert [array.dtype for array in segment.piece[0]] == [mx.bfloat16, mx.float16]
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(segment.piece[0], piece[0], strict=True))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs to be root on Linux")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_said_once_and_the_chat_goes_on(small_disk: Path) -> None:
    bench = BENCHES["full"]
    (small_disk / "filler").write_bytes(b"x" * 150_000)
    cache = opened(bench, small_disk / "cache", Budgets(total=LARGE))
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(PATIENCE_S)
    assert cache.trouble is not None
    assert "stored" in cache.trouble or "written" in cache.trouble
    assert not list(small_disk.rglob(".new-*"))
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)
    assert ask_disk(bench, opened(bench, small_disk / "cache", Budgets(total=LARGE)), [1, 2], []) == 0


def test_a_read_only_disk_is_read_and_said_once(small_disk: Path) -> None:
    bench, root = BENCHES["packed"], small_disk / "cache"
    ask_disk(bench, opened(bench, root, Budgets(total=LARGE)), LONG[:300], [])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cache = opened(bench, root, Budgets(total=LARGE))
    lease = cache.acquire(LONG, None)
    with lease:
        assert len(lease.ids) == 300
        compute(bench.model, lease, LONG)
    cache.flush(PATIENCE_S)
    assert cache.trouble is not None
    assert "Read-only" in cache.trouble
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)


def test_a_folder_that_can_not_be_made_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    (tmp_path / "file").write_text("not a folder")
    cache = opened(bench, tmp_path / "file")
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(PATIENCE_S)
    assert cache.trouble is not None
    assert "can't be written" in cache.trouble
    pause = cache.idle()
    assert 0 < pause <= AGAIN_S
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)


def test_trouble_passes_once_there_is_room(tmp_path: Path) -> None:
    bench, now, day = BENCHES["full"], [0.0], [datetime.date(2026, 1, 1)]
    folder = Folder(tmp_path, Budgets(daily=4_000_000), today=lambda: day[0])
    cache = bench.cache(folder, MODEL, clock=lambda: now[0])
    folder.write("ef" * 16, "other", MODEL, MODEL, b"x" * 3_999_000)
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(PATIENCE_S)
    assert cache.trouble is not None
    assert "daily budget" in cache.trouble
    assert cache.idle() == AGAIN_S
    day[0], now[0] = datetime.date(2026, 1, 2), AGAIN_S
    while cache.idle() is not None:
        disk_of(cache).wait(PATIENCE_S)
    assert cache.trouble is None
    assert opened(bench, tmp_path).known([*LONG, 1], None).tokens == len(LONG)


def test_an_unwritten_longer_end_leaves_the_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, now = BENCHES["full"], [0.0]
    cache = bench.cache(Folder(tmp_path), MODEL, clock=lambda: now[0])
    ask_disk(bench, cache, LONG, [])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "write", full)
    longer = [*LONG, *([3] * 40)]
    lease = cache.acquire(longer, None)
    with lease:
        compute(bench.model, lease, longer)
    cache.flush(PATIENCE_S)
    assert cache.trouble is not None
    now[0] = AGAIN_S
    while disk_of(cache).rest_s == 0:  # tried again, and failed again
        cache.idle()
        disk_of(cache).wait(PATIENCE_S)
    assert lengths(tmp_path) == [188, 256, 256]


@pytest.mark.parametrize("loss", ["the file is gone", "it could not be written"])
@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_each_segment_has_its_end_state(kind: str, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, now, folder = BENCHES[kind], [0.0], Folder(tmp_path)
    cache = bench.cache(folder, MODEL, clock=lambda: now[0])
    with monkeypatch.context() as full:
        if loss == "it could not be written":
            full.setattr(Folder, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        ask(bench, cache, LONG[:600], [])
        while cache.idle() == PAUSE_S:
            disk_of(cache).wait(PATIENCE_S)
    assert cache.shrink(LARGE) > 0  # the states, as nothing else is in the tree
    folder.clear()
    now[0] += AGAIN_S
    longer = [*LONG[:600], *LONG[:80]]
    ask(bench, cache, longer, [])
    while cache.idle() == PAUSE_S:
        disk_of(cache).wait(PATIENCE_S)
    assert cache.trouble is None
    segments = [from_bytes(data) for entry in folder.entries(MODEL) if (data := folder.read(entry))]
    assert segments
    assert all(segment.states is not None for segment in segments)
    assert ask_disk(bench, opened(bench, tmp_path), [*longer, 5], []) == len(longer) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_in_memory_reaches_the_disk_not_the_last_prompt_alone(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    cache = opened(bench, tmp_path)
    prompts = [[*LONG[:300], number, *LONG[: 280 + number]] for number in range(4)]
    grows = kind in ("full", "packed")  # else it goes on where its state was frozen: at the end of the prompt
    for prompt in prompts:
        lease = cache.acquire(prompt, None)
        with lease:
            if len(lease.ids) < len(prompt) - 1:
                compute(bench.model, lease, prompt[:-1])
            cache.checkpoint(lease)
            compute(bench.model, lease, prompt)
    cache.flush(PATIENCE_S)
    assert cache.trouble is None
    for prompt in prompts:
        later = opened(bench, tmp_path)
        assert ask_disk(bench, later, [*prompt, 7], []) == len(prompt) - (not grows)


def test_looking_for_a_long_prompt_copies_each_token_once(tmp_path: Path) -> None:
    class Counted(list[int]):
        copied = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Counted.copied += len(found) if isinstance(at, slice) else 1
            return found

    folder = Folder(tmp_path)
    disk = DiskStore(folder, MODEL, "m", Rates())
    ids, bounds = [number % 251 for number in range(64 * 40)], list(range(64, 64 * 40 + 1, 64))
    parts = list(disk.parts(ids, bounds, None))
    for start, stop, parent, name in parts:
        folder.write(MODEL, "m", parent, name, to_bytes(to_host(start, ids[start:stop], (), None)))
    links = DiskStore(folder, MODEL, "m", Rates()).chain(Counted([*ids, 1]), None)
    assert len(links) == 40
    assert Counted.copied <= 2 * len(ids)


def finish(engine: Engine, prompt: list[int], **more: Any) -> Finished:
    *_, last = engine.generate(prompt, Sampling(temperature=0, max_tokens=8, **more))
    assert isinstance(last, Finished)
    return last


@pytest.mark.usefixtures("all_worth_storing")
@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(8, 4, group_size=32), KVSpec(window=96)], ids=["16", "8,4", "window"])
def test_an_engine_finds_what_another_left(tiny: Path, tmp_path: Path, kv: KVSpec) -> None:
    prompt = [(5 * number + number // 7) % 260 for number in range(400)]
    spec = PromptCacheSpec(folder=tmp_path)
    with Engine.load(tiny, kv=kv, prompt_cache=spec) as engine:
        first = finish(engine, prompt)
    with Engine.load(tiny, kv=kv, prompt_cache=spec) as engine:
        again = finish(engine, [*prompt, 5])
        same = finish(engine, prompt)
    with Engine.load(tiny, kv=KVSpec(4, 4, group_size=32), prompt_cache=spec) as engine:
        other = finish(engine, prompt)
    assert (first.metrics.cached_tokens, other.metrics.cached_tokens) == (0, 0)
    assert again.metrics.cached_tokens == (400 if kv.window is None else 399)  # where its state was frozen
    assert (same.text, same.metrics.cached_tokens) == (first.text, 399)


def test_without_a_prompt_cache_none_is_written(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path))
    for spec in (None, PromptCacheSpec(disk=False)):
        with Engine.load(tiny, prompt_cache=spec) as engine:
            finish(engine, list(range(300 % 260)) * 2)
    assert list(tmp_path.iterdir()) == []


def test_whatever_goes_wrong_in_the_writers_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(Folder, "write", fail)
    disk = DiskStore(Folder(tmp_path), MODEL, "a model", Rates())
    monkeypatch.setattr("tokamac.engine.prompt_cache.disk.to_bytes", lambda _: b"")
    disk.write(None, "0" * 32, "1" * 32)  # type: ignore[arg-type]
    disk.wait(PATIENCE_S)
    assert "no room for the copy" in (disk.trouble or "")
    assert disk.rest_s > 0

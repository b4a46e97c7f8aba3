"""Pinned tokens that move along with a rolling window: where to, exactly, at what price, and for which models."""

import importlib
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from tests.engine.kv import models as zoo
from tests.engine.kv.models import (
    MovingReference,
    codec,
    feed,
    follow,
    largest_difference,
    llama_move,
    overhear,
    seeded,
    shift,
    tiny_llama,
    tokens,
    trim,
)
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.kv.attention import map_leaves
from tokamac.engine.kv.cache import Cache, nbytes
from tokamac.engine.kv.layout import Ring
from tokamac.engine.kv.plan import READ_ELSEWHERE, CachePlan, plan_caches
from tokamac.engine.kv.rotary import CHANGING, UNKNOWN, Rotation
from tokamac.engine.kv.snapshot import freeze, thaw

LLAMA = {"model_type": "llama"}
DIM, HEADS = 32, 2
ROTATION = Rotation(DIM, traditional=False, base=10_000, scale=1.0)
BITS = [(16, 16), (8, 8), (8, 4), (4, 16)]


def plan_of(model: Any, bits: tuple[int, int] = (16, 16), window: int = 40, keep: int = 5) -> CachePlan:
    return plan_caches(model, LLAMA, KVSpec(*bits, 32, window=window, keep=keep))


def rotated_kv(count: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries (1, 2·H, count, D) and keys (1, H, count, D), rotated as a llama's, and values."""
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    queries, keys = (mx.random.normal((1, heads, count, DIM), key=key) for heads, key in ((2 * HEADS, a), (HEADS, b)))
    at = [mx.fast.rope(x, DIM, traditional=False, base=10_000, scale=1.0, offset=0) for x in (queries, keys)]
    return at[0], at[1], mx.random.normal((1, HEADS, count, DIM), key=c)


def gathered(cache: Cache, kv: tuple[mx.array, mx.array, mx.array], cuts: list[int]) -> mx.array:
    """Return what the queries gather, (1, 2·H, T, D), fed in pieces of these lengths from where the cache is."""
    parts = []
    for count in cuts:
        queries, keys, values = (x[:, :, cache.offset : cache.offset + count] for x in kv)
        mask = cache.make_mask(count)
        handed = cache.update_and_fetch(keys, values)
        parts.append(cache.attend(queries, *handed, scale=DIM**-0.5, mask=mask))
        mx.eval(parts[-1], cache.state)
    return mx.concatenate(parts, axis=2)


@given(
    bits=st.sampled_from(BITS),
    window=st.integers(3, 40),
    keep=st.integers(1, 20),
    spare=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_queries_see_pinned_keys(bits: tuple[int, int], window: int, keep: int, spare: int, cuts: list[int]) -> None:
    keep, kv = min(keep, window - 1), rotated_kv(sum(cuts), 3)
    codecs = codec(bits[0], rotated_dim=DIM if bits[0] == 4 else None), codec(bits[1])
    out = gathered(Cache(Ring(window, keep, spare), *codecs, rotation=ROTATION), kv, cuts)
    reference = MovingReference(*codecs, window, keep, llama_move(bits[0]))
    wanted = reference.attend(kv[0], *reference.update_and_fetch(*kv[1:]), scale=DIM**-0.5, mask=None)
    assert largest_difference(out, wanted) < 1e-4


@given(window=st.integers(2, 300), keep=st.integers(0, 299), position=st.integers(0, 1000), count=st.integers(1, 300))
def test_pinned_tokens_stay_in_reach_and_only_move(window: int, keep: int, position: int, count: int) -> None:
    ring = Ring(window, min(keep, window - 1))
    moved = ring.shift(position)
    assert moved == shift(position, window, ring.keep)
    assert position - moved < window  # what the first pinned token is behind
    assert moved == 0 or position - moved >= window - ring.block
    assert position - moved >= ring.keep - 1 or position < ring.keep  # and none is ahead
    parts = ring.parts(position, count)
    rows = [part.shift for part in parts for _ in range(part.begin, part.stop)]
    assert rows == [ring.shift(p) for p in range(position, position + count)]
    assert all(a.shift < b.shift for a, b in pairwise(parts))


def test_until_a_token_is_out_of_sight_nothing_moves() -> None:
    model, ids = tiny_llama(), tokens(60)
    rolling = feed(model, plan_of(model).make(), ids, [])
    growing = feed(model, plan_caches(model, LLAMA, KVSpec()).make(), ids, [])
    assert largest_difference(rolling[:40], growing[:40]) < 1e-4
    assert largest_difference(rolling[40:], growing[40:]) > 1e-2


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_cuts_change_no_logits(bits: tuple[int, int]) -> None:
    model, ids = tiny_llama(), tokens(220)
    plan = plan_of(model, bits)
    caches = plan.make()
    taken = [overhear(cache) for cache in caches]
    whole = feed(model, caches, ids, [])
    for cuts in ([1] * 219, [7] * 31, [45, 3, 1, 2, 60], [41, 4, 4, 4, 4]):
        caches = plan.make()
        for cache, its in zip(caches, taken, strict=True):
            follow(cache, its)
        assert largest_difference(feed(model, caches, ids, cuts), whole) < 1e-4


@given(bits=st.sampled_from(BITS), count=st.integers(6, 200), back=st.integers(1, 64), chunk=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_taking_back_and_redoing_is_bit_for_bit(bits: tuple[int, int], count: int, back: int, chunk: int) -> None:
    kv, back = rotated_kv(count + 1, 4), min(back, count)
    cache = Cache(Ring(24, 3, 64), codec(bits[0]), codec(bits[1]), rotation=ROTATION)
    cuts = [*[chunk] * ((count - back) // chunk), (count - back) % chunk]
    if count > back:
        gathered(cache, kv, [cut for cut in cuts if cut])
    steps = [1] * back
    first = gathered(cache, kv, steps)
    before = [mx.array(array) for array in (*cache.state[0], *cache.state[2])]
    assert cache.trim(back) == back
    again = gathered(cache, kv, steps)
    assert mx.array_equal(first, again)
    assert all(mx.array_equal(a, b) for a, b in zip(before, (*cache.state[0], *cache.state[2]), strict=True))


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_copies_and_states_go_on_alike(bits: tuple[int, int]) -> None:
    model, ids = tiny_llama(), tokens(150)
    plan = plan_of(model, bits)
    caches = plan.make()
    feed(model, caches, ids[:, :100], [30])
    copies, thawed = [cache.copy() for cache in caches], plan.make()
    thaw(thawed, freeze(caches))
    wanted = feed(model, caches, ids[:, 100:], [])
    for others in (copies, thawed):
        assert trim(others, 20) == 20
        feed(model, others, ids[:, 80:100], [])
        assert mx.array_equal(feed(model, others, ids[:, 100:], []), wanted)


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("held", [3, 30, 500])
def test_bytes_planned_are_bytes_held_and_kept(bits: tuple[int, int], held: int) -> None:
    model = tiny_llama()
    plan = plan_of(model, bits)
    caches = plan.make()
    feed(model, caches, tokens(held), [])
    arrays = [array for cache in caches for part in cache.state[:3] for array in part]
    assert nbytes(caches) == sum(array.nbytes for array in arrays)
    assert sum(state.nbytes for state in freeze(caches)) == nbytes(caches)
    if held == 500:
        assert nbytes(caches) == plan.bytes_at(held)
        still = plan_caches(model, LLAMA, KVSpec(*bits, 32, window=40, keep=0)).bytes_at(held)
        assert plan.bytes_at(held) - still == 2 * 5 * HEADS * DIM * 4  # layers, tokens, float32


@pytest.mark.usefixtures("settled_memory")
def test_the_keys_beside_the_slots_have_memory_of_their_own() -> None:
    cache = Cache(Ring(24, 4, 64), codec(16), codec(16), rotation=ROTATION)
    before, kv = mx.get_active_memory(), rotated_kv(4000, 5)
    gathered(cache, kv, [4000])
    del kv
    mx.synchronize()
    assert mx.get_active_memory() - before < cache.nbytes + 100_000  # the call's keys alone are a million


def notes(name: str, spec: KVSpec, **changes: Any) -> tuple[list[bool], list[str]]:
    """Return of each of a family's caches whether its pinned keys move, and what the plan says of those that don't."""
    config = {**zoo.config_of(name), **changes}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    plan = plan_caches(seeded(module.Model(module.ModelArgs.from_dict(config))), config, spec)
    moves = [layer.ours is not None and layer.ours.rotation is not None for layer in plan.layers]
    return moves, [note for note in plan.notes if "pinned" in note]


PINNED = KVSpec(window=24, keep=4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "glm4", "phi3", "gpt_neox", "olmo2"])
def test_most_models_keys_move(name: str) -> None:
    assert notes(name, PINNED) == ([True, True], [])


def test_layers_without_positions_need_nothing() -> None:
    assert notes("smollm3", PINNED) == ([True, False], [])
    assert notes("exaone4", PINNED) == ([False, False], [])  # one slides by itself, the other has no positions


@pytest.mark.parametrize("name", ["gpt2", "gptj", "hunyuan_v1_dense", "ministral3"])
def test_keys_that_are_no_plain_rotary_embeddings_stay_and_that_is_said(name: str) -> None:
    moves, said = notes(name, PINNED)
    assert not any(moves)
    assert len(said) == 1
    assert UNKNOWN in said[0]


def test_keys_that_other_layers_read_stay() -> None:
    moves, said = notes("gemma4_text", PINNED)
    assert not any(moves)
    assert READ_ELSEWHERE in said[0]


def test_an_embedding_that_changes_with_the_context_stays() -> None:
    scaling = {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}}
    moves, said = notes("llama", PINNED, **scaling)
    assert moves == [False, False]
    assert said == [
        "2 of 2 caches: pinned tokens keep their first positions, ever further from the newest token: " + CHANGING
    ]


@pytest.mark.parametrize(
    "spec",
    [KVSpec(), KVSpec(window=24, keep=0), KVSpec(window=24, on_full="stop")],
    ids=["no window", "keep 0", "stop"],
)
def test_where_nothing_is_pinned_or_nothing_rolls_nothing_is_kept_beside(spec: KVSpec) -> None:
    assert notes("llama", spec) == ([False, False], [])


SCALED = {
    "linear": {"type": "linear", "rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("traditional", [False, True])
def test_a_key_moved_is_the_key_that_the_model_makes_there(kind: str, traditional: bool) -> None:
    """The same token alone, at position 0 and at 77: with one token attention is its value, so nothing else differs."""
    config = {**zoo.config_of("llama"), "rope_scaling": SCALED[kind], "rope_traditional": traditional}
    module = importlib.import_module("mlx_lm.models.llama")
    args = module.ModelArgs.from_dict(config)
    args.max_position_embeddings = 256
    args.rope_scaling["long_factor"] = [
        1.0 + i for i in range(args.head_dim or args.hidden_size // args.num_attention_heads)
    ][::2]
    model = seeded(module.Model(args))
    assert_moves(model, config)


class Alone:
    """Holds nothing, at a position that it is told: a token sees itself, and what it was given is kept."""

    def __init__(self, position: int) -> None:
        self.offset, self.given = position, mx.zeros(())

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.given, self._values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.given, self._values


def assert_moves(model: Any, config: dict[str, Any]) -> None:

    try:
        plan = plan_caches(model, config, PINNED)
    except OptionError:
        return
    moving = {layer.path: layer.ours.rotation for layer in plan.layers if layer.ours and layer.ours.rotation}
    ours = {layer.path for layer in plan.layers if layer.ours}  # gemma3n asks one cache for the position of all
    first, later = given_at(model, ours, 0), given_at(model, ours, 77)
    for path, rotation in moving.items():
        assert largest_difference(rotation.move(first[path], 77), later[path]) < 1e-4


def given_at(model: Any, paths: set[tuple[int, ...]], position: int) -> dict[tuple[int, ...], mx.array]:
    """Return the key that a model makes of a token at this position, for each of these caches."""
    alone = {path: Alone(position) for path in paths}
    model(tokens(1), cache=map_leaves(make_prompt_cache(model), lambda path, own: alone.get(path, own)))
    return {path: each.given for path, each in alone.items()}

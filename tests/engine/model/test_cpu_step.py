"""A decode step as one sequence of kernels: equal to the class's own, whatever family, layout and bits, alone and in a batch."""

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.tuner.lora import LoRALinear

from tests.engine.helpers import write_model
from tests.engine.kv.models import WINDOW, config_of, seeded, tokens
from tests.families import crossed
from tokamac.engine import Engine, KVSpec
from tokamac.engine.device import device_kind
from tokamac.engine.kv.cache import forward
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.kv.snapshot import freeze, own_prefixes, share, thaw
from tokamac.engine.model.config_rules import correct
from tokamac.engine.model.head import asking_for_logits, keeping_hidden_states

if sys.platform != "linux" or device_kind() != "cpu":
    pytest.skip("these kernels are a plain CPU's", allow_module_level=True)

from tokamac.engine.cpu import products, stepping
from tokamac.engine.cpu.formats import WeightFormat, can_round
from tokamac.engine.cpu.layers import round_rows, rounds_rows, use_kernels

Caches = list[Any]

BIASED = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases and a head": ("llama", {**BIASED, "tie_word_embeddings": False, "num_attention_heads": 6}),
    "llama, paired rotations": ("llama", {"rope_traditional": True}),
    "llama 3's rotations": ("llama", {"rope_scaling": LLAMA3}),
    "mistral with a window": (
        "llama", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"rope_scaling": YARN}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3": ("gemma3", {}),
    "a llama inside": ("pixtral", {}),
    "a qwen3 inside": ("qwen3_vl", {}),
    "phi3": ("phi3", {}),
    "phi3, long": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "granite": ("granite", {"hidden_size": 128, "num_key_value_heads": 2, "num_attention_heads": 4}),
}  # fmt: skip

ROUNDS = pytest.mark.skipif(not can_round(WeightFormat(4)), reason="this CPU does not multiply bytes")
SPECS = {
    "growing": KVSpec(),
    "8 and 4 bits": KVSpec(key_bits=8, value_bits=4, group_size=32),
    "rotated": KVSpec(key_bits=4, value_bits=2, group_size=32),
    "3 and 6 bits": KVSpec(key_bits=3, value_bits=6, group_size=32),
    "keys of 5 bits alone": KVSpec(key_bits=5, value_bits=16, group_size=32),
    "ring": KVSpec(window=WINDOW, keep=0),
    "pinned": KVSpec(window=WINDOW, keep=4),
    "packed ring": KVSpec(key_bits=8, value_bits=8, group_size=32, window=WINDOW, keep=2),
}


def built(
    name: str, *, bits: int = 4, mode: str = "affine", head_bits: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """A packed model, whose steps are its class's own, and its config."""
    kind, changes = MODELS[name]
    config = config_of(kind)
    config.get("text_config", config).update(changes)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = seeded(module.Model(module.ModelArgs.from_dict(config)))
    correct(model, config)
    head = {"group_size": 32, "bits": head_bits}
    nn.quantize(
        model, 32, bits, mode=mode,
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and (head if head_bits and "head" in path else True),
    )  # fmt: skip
    use_kernels(model, logits=None)
    return model, config


@cache
def stepping_model(name: str, bits: int = 4, mode: str = "affine") -> tuple[Any, dict[str, Any], type[Any]]:
    """A model that takes steps, its config, and its own class."""
    model, config = built(name, bits=bits, mode=mode)
    own = type(model)
    plan = plan_caches(model, config, KVSpec())
    assert not stepping.take_steps(model, plan, plan.make)
    return model, config, own


def made(name: str, spec: str) -> tuple[Any, Callable[[], Caches]]:
    model, config, _ = stepping_model(name)
    return model, plan_caches(model, config, SPECS[spec]).make


def begin(model: Any, make: Callable[[], Caches], length: int, seed: int = 0, own: Any = None) -> Caches:
    """Return caches that hold some tokens. own: the model's class, where that is to read them."""
    caches = make()
    (model if own is None else partial(own.__call__, model))(tokens(length, seed), cache=caches)
    mx.eval([each.state for each in caches])
    return caches


def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that is taken from now on."""
    found: list[int] = []
    run = stepping._Space.run

    def watched(space: Any, ids: Any, *others: Any) -> Any:
        found.append(len(ids))
        return run(space, ids, *others)

    monkeypatch.setattr(stepping._Space, "run", watched)
    return found


@pytest.mark.parametrize(
    ("spec", "read", "trimmed"),
    [(KVSpec(window=192, keep=0), 256, 0), (KVSpec(window=192, keep=0), 512, 0), (KVSpec(), 256, 6)],
    ids=["a full ring", "again", "growing, taken back"],
)
def test_slots_that_a_class_filled_at_once_are_read_as_they_lie(spec: KVSpec, read: int, trimmed: int) -> None:
    """MLX takes what is written over a whole array in its place, and a class's own values lie in the order of tokens."""
    model, config, own = stepping_model("granite")  # two heads of keys
    make = plan_caches(model, config, spec).make
    caches = begin(model, make, read, own=own), begin(model, make, read, own=own)
    for each in [*caches[0], *caches[1]]:
        assert each.trim(trimmed) == trimmed
    for at in range(3):
        found = np.array(model(tokens(1, at), cache=caches[0]))
        expected = np.array(own.__call__(model, tokens(1, at), cache=caches[1]))
        assert np.allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def contents(caches: Caches) -> list[np.ndarray]:
    return [np.array(array) for each in caches for array in each.arrays]


@pytest.mark.parametrize(("name", "spec"), crossed(MODELS, SPECS, "growing"))
def test_steps_are_what_the_class_computes(name: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, own = stepping_model(name)
    make = plan_caches(model, config, SPECS[spec]).make
    ours, its = begin(model, make, 5), begin(model, make, 5, own=own)
    steps = taken(monkeypatch)
    rounding, flipped = 0.0, 0.0
    for at in range(3 * WINDOW):
        ids = tokens(1, 70 + at)
        found, expected = model(ids, cache=ours), own.__call__(model, ids, cache=its)
        mx.eval(found, expected)
        off = float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected)))  # type: ignore[arg-type]
        rounding, flipped = max(rounding, off) if at < 1 else rounding, max(flipped, off)
    print(
        f"{name}, {spec}: {rounding:.1e} of the largest logit in the first step, {flipped:.1e} in all, {len(steps)} steps"
    )
    assert len(steps) >= 2 * WINDOW  # where pinned keys move, the class goes on
    assert [each.offset for each in ours] == [each.offset for each in its]
    # A packed number may fall on the other side of a half, and stays in the cache.
    assert flipped < (1e-4 if SPECS[spec].key_bits == 16 else 0.05)


@pytest.mark.parametrize(
    ("bits", "mode"), [(2, "affine"), (3, "affine"), (6, "affine"), (8, "affine"), (4, "mxfp4"), (8, "mxfp8")]
)
def test_every_packing_of_weights_takes_steps(bits: int, mode: str) -> None:
    model, config, own = stepping_model("llama", bits, mode)
    make = plan_caches(model, config, KVSpec()).make
    ours, its = begin(model, make, 5), begin(model, make, 5, own=own)
    for at in range(4):
        ids = tokens(1, at)
        found, expected = model(ids, cache=ours), own.__call__(model, ids, cache=its)
        assert float(mx.max(mx.abs(found - expected))) < 1e-4 * float(mx.max(mx.abs(expected)))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_new_tokens_are_packed_as_mlx_packs_them(bits: int) -> None:
    model, config, _ = stepping_model("qwen3")
    packed = KVSpec(key_bits=bits, value_bits=bits, group_size=32)
    plain, few = (
        begin(model, plan_caches(model, config, spec, rotate_keys=False).make, 3) for spec in (KVSpec(), packed)
    )
    for at in range(20):
        model(tokens(1, at), cache=plain)
        model(tokens(1, at), cache=few)
    for array, stored in zip(plain[0].arrays, (few[0].arrays[:3], few[0].arrays[3:]), strict=True):
        expected = mx.quantize(array[..., 3:23, :], group_size=32, bits=bits)
        for ours, theirs in zip(stored, expected, strict=True):
            assert np.array_equal(np.array(ours)[..., 3:23, :], np.array(theirs))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["llama, biases and a head", "qwen3", "gemma2", "gemma3_text"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made(name, spec)
    lengths = (2, 9, 31, 40, 5)
    lanes, alone = ([begin(model, make, length, seed) for seed, length in enumerate(lengths)] for _ in range(2))
    steps = taken(monkeypatch)
    for at in range(24):
        here = [number for number in range(len(lengths)) if (at + number) % 5]  # they come and go
        ids = [tokens(1, 100 * at + number) for number in here]
        expected = [model(each, cache=alone[number]) for each, number in zip(ids, here, strict=True)]
        found = forward(model, mx.concatenate(ids, axis=0), [lanes[number] for number in here])
        assert mx.array_equal(found, mx.concatenate(expected, axis=0))
    assert 4 in steps
    for one, other in zip(lanes, alone, strict=True):
        assert all(map(np.array_equal, contents(one), contents(other)))


def test_replies_of_different_bits_share_a_step() -> None:
    made_by = [made("llama", spec)[1] for spec in ("growing", "8 and 4 bits", "ring")]
    model = stepping_model("llama")[0]
    lanes, alone = ([begin(model, make, 20, seed) for seed, make in enumerate(made_by)] for _ in range(2))
    for at in range(5):
        ids = tokens(3, at).reshape(3, 1)
        expected = [model(ids[row : row + 1], cache=caches) for row, caches in enumerate(alone)]
        assert mx.array_equal(forward(model, ids, lanes), mx.concatenate(expected, axis=0))


@pytest.mark.parametrize("spec", SPECS)
def test_guesses_are_verified_with_the_bits_of_single_steps(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made("qwen3", spec)
    several, single = begin(model, make, 30), begin(model, make, 30)
    steps = taken(monkeypatch)
    for at in range(6):
        ids = tokens(5, at)
        with asking_for_logits():
            found = model(ids, cache=several)
        moving = spec in ("pinned", "packed ring")
        assert moving or steps == [5]
        expected = mx.concatenate([model(ids[:, each : each + 1], cache=single) for each in range(5)], axis=1)
        steps.clear()
        if moving:  # where pinned keys move, the class takes several tokens in another order than one
            assert mx.allclose(found, expected, atol=0.05)
        else:
            assert mx.array_equal(found, expected)
        for caches in (several, single):
            assert all(each.trim(2) == 2 for each in caches)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["llama, biases and a head", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_a_prompt_has_the_bits_of_single_tokens(name: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made(name, spec)
    steps = taken(monkeypatch)
    whole, single, cut = make(), make(), make()
    ids = tokens(100)
    model(ids, cache=whole)
    if spec not in ("pinned", "packed ring"):
        assert steps == [64, 36]
    for at in range(100):
        model(ids[:, at : at + 1], cache=single)
    for begun, stop in ((0, 7), (7, 8), (8, 41), (41, 100)):
        model(ids[:, begun:stop], cache=cut)
    after = [np.array(model(tokens(1, 5), cache=caches)) for caches in (whole, single, cut)]
    assert [each.offset for each in whole] == [101] * len(whole)
    for found in after[1:]:
        if spec in ("pinned", "packed ring"):  # where pinned keys move, the class reads on, in another order
            assert np.allclose(found, after[0], atol=0.1)
        else:
            assert np.array_equal(found, after[0])


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_is_read_as_the_class_reads_it(spec: str) -> None:
    model, config, own = stepping_model("qwen3")
    make = plan_caches(model, config, SPECS[spec]).make
    ours, its = begin(model, make, 3 * WINDOW), begin(model, make, 3 * WINDOW, own=own)
    found, expected = (own.__call__(model, tokens(1, 3), cache=caches) for caches in (ours, its))
    off = float(mx.max(mx.abs(found - expected)) / mx.max(mx.abs(expected)))  # type: ignore[arg-type]
    assert off < (1e-4 if SPECS[spec].key_bits == 16 else 0.05)


@pytest.mark.parametrize("rows", [16, 17, 32])
@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=ROUNDS)], ids=["exact", "rounded"])
@pytest.mark.parametrize("spec", ["growing", "8 and 4 bits"])
def test_the_longest_draft_has_equal_bits(spec: str, rounds: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = built("qwen3")
    round_rows(model, rounds=rounds)
    plain = plan_caches(model, config, KVSpec())
    assert stepping.take_steps(model, plain, plain.make) == ""
    make = plan_caches(model, config, SPECS[spec]).make
    several, single = begin(model, make, 30), begin(model, make, 30)
    steps = taken(monkeypatch)
    ids = tokens(rows)
    with asking_for_logits(), keeping_hidden_states() as kept:
        found = model(ids, cache=several)
    assert steps == [rows]
    with keeping_hidden_states() as one_by_one:
        expected = mx.concatenate([model(ids[:, each : each + 1], cache=single) for each in range(rows)], axis=1)
    assert mx.array_equal(found, expected)
    assert mx.array_equal(kept[-1], mx.concatenate(one_by_one, axis=1))
    assert [each.offset for each in several] == [each.offset for each in single]


def test_what_a_step_gives_its_head_is_what_the_class_gives_it() -> None:
    model, config = built("llama")
    plain = plan_caches(model, config, KVSpec())
    expected = model.model(tokens(4), cache=plain.make())
    assert stepping.take_steps(model, plain, plain.make) == ""
    with asking_for_logits(), keeping_hidden_states() as kept:
        model(tokens(4), cache=plain.make())
    (found,) = kept
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, atol=1e-3)


def test_what_asks_for_many_logits_or_has_no_cache_stays_with_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made("llama", "growing")
    steps = taken(monkeypatch)
    with asking_for_logits():
        assert model(tokens(stepping.MOST_ROWS + 1), cache=make()).shape[1] == stepping.MOST_ROWS + 1
    model(tokens(1))
    model(mx.concatenate([tokens(3), tokens(3, 1)]), cache=None)
    assert not steps


@pytest.mark.parametrize("spec", SPECS)
def test_what_others_hold_of_a_cache_is_never_written(spec: str) -> None:
    model, make = made("llama", spec)
    caches = begin(model, make, 2 * WINDOW)
    model(tokens(1), cache=caches)
    kept = [each.copy() for each in caches] if spec != "pinned" else None
    states, before = freeze(caches), contents(caches)
    if kept is not None:
        held = contents(kept)
    first = [np.array(model(tokens(1, at), cache=caches)) for at in range(9)]
    if kept is not None:
        assert all(map(np.array_equal, contents(kept), held))
        assert all(np.array_equal(np.array(model(tokens(1, at), cache=kept)), first[at]) for at in range(9))
    if states:
        thaw(caches, states)
        assert all(map(np.array_equal, contents(caches), before))
        assert all(np.array_equal(np.array(model(tokens(1, at), cache=caches)), first[at]) for at in range(9))


def test_taking_back_and_going_on_equals_never_having_gone_further() -> None:
    model, make = made("llama", "growing")
    once, twice = begin(model, make, 9), begin(model, make, 9)
    for at in range(5):
        model(tokens(1, 50 + at), cache=twice)
    for each in twice:
        each.trim(5)
    for at in range(5):
        assert mx.array_equal(model(tokens(1, at), cache=once), model(tokens(1, at), cache=twice))


@pytest.mark.parametrize("spec", ["growing", "8 and 4 bits", "rotated"])
def test_a_prefix_that_others_share_is_read_where_it_lies(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made("llama", spec)
    whole, first, second = begin(model, make, 40), begin(model, make, 40), make()
    assert share(first, second, 30) == 30
    model(tokens(40)[:, 30:], cache=second)
    steps = taken(monkeypatch)
    for at in range(20):
        ids = tokens(1, at)
        expected = np.array(model(ids, cache=whole))
        for caches in (first, second):
            found = np.array(model(ids, cache=caches))
            assert np.abs(found - expected).max() < (1e-4 if spec == "growing" else 0.05) * np.abs(expected).max()
    assert len(steps) == 60
    own_prefixes(second)
    assert second[0].offset == 60


@pytest.mark.parametrize("shared", [1, 30, 256, 299])
@pytest.mark.parametrize("spec", ["growing", "8 and 4 bits", "rotated"])
def test_behind_a_shared_prefix_prompts_are_equal(spec: str, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = made("llama", spec)
    steps = taken(monkeypatch)
    whole, first, second, third = begin(model, make, 300), begin(model, make, 300), make(), make()
    assert share(first, second, shared) == shared
    model(tokens(300)[:, shared:], cache=second)
    assert share(second, third, 300) == 300  # a prefix behind another
    assert sum(steps) == 3 * 300 - shared  # the class has read nothing
    for at in range(3):
        found = [np.array(model(tokens(1, at), cache=caches)) for caches in (whole, first, second, third)]
        assert all(np.array_equal(each, found[0]) for each in found)


@ROUNDS
def test_layers_may_round_where_the_head_does_not() -> None:
    model, config = built("llama, biases and a head", head_bits=6)
    round_rows(model, rounds=True)
    plan = plan_caches(model, config, KVSpec())
    assert stepping.take_steps(model, plan, plan.make) == ""
    assert rounds_rows(model)


def test_no_weight_is_held_twice() -> None:
    model, _, _ = stepping_model("llama")
    space = model._steps._spaces[1, True]
    matrices = {
        id(module): module._matrix
        for _, module in model.named_modules()
        if getattr(module, "_matrix", None) is not None
    }
    held = {int(np.asarray(matrix.weight).ctypes.data) for matrix in matrices.values()}
    words = [each for each in space._kept if each.dtype == np.int64 and len(each) == 13]
    assert {int(each[products.WEIGHTS]) for each in words} == held
    assert len(words) == len(matrices)


def test_a_model_that_does_not_fit_says_why_and_stays_as_it_was() -> None:
    def why(model: Any, config: dict[str, Any]) -> str:
        kind = type(model)
        plan = plan_caches(model, config, KVSpec())
        found = stepping.take_steps(model, plan, plan.make)
        assert type(model) is kind
        return found

    model, config = built("llama")
    model.layers[1].self_attn.q_proj = LoRALinear.from_base(model.layers[1].self_attn.q_proj)
    assert "its q_proj is a LoRALinear" in why(model, config)
    model, config = built("llama")
    model.layers[0].mlp.__class__ = type("Other", (type(model.layers[0].mlp),), {})
    assert "holds a Other" in why(model, config)
    module = importlib.import_module("mlx_lm.models.llama")
    plain = seeded(module.Model(module.ModelArgs.from_dict(config)))
    assert "not packed" in why(plain, config)
    config = config_of("starcoder2")
    module = importlib.import_module("mlx_lm.models.starcoder2")
    other = seeded(module.Model(module.ModelArgs.from_dict(config)))
    assert "its class, starcoder2" in why(other, config)
    model, config = built("llama")
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    module = importlib.import_module("mlx_lm.models.llama")
    model.layers[0].self_attn.rope = module.initialize_rope(32, 1e4, False, dynamic, 512)
    assert "DynamicNTKScalingRoPE" in why(model, config)


def test_a_step_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = built("granite")
    kind, read = type(model), stepping.parts_of

    def misread(model: Any) -> Any:
        parts = read(model)
        object.__setattr__(parts, "residual", 1.01 * parts.residual)
        return parts

    monkeypatch.setattr(stepping, "parts_of", misread)
    plan = plan_caches(model, config, KVSpec())
    assert "of the largest logit off" in stepping.take_steps(model, plan, plan.make)
    assert type(model) is kind
    assert not stepping.take_steps(model, plan, plan.make, compared=True)


@pytest.mark.parametrize(
    ("bits", "fits"), [(4, True), (4, False), (None, True)], ids=["packed", "another class", "plain"]
)
def test_an_engine_says_when_packed_weights_are_decoded_layer_by_layer(
    bits: int | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fits:
        monkeypatch.delitem(stepping.FAMILIES, "llama")
    with Engine.load(write_model(tmp_path / "model", bits=bits)) as engine:
        notes = [note for note in engine.spec.notes if "layer by layer" in note]
        assert bool(notes) is not fits

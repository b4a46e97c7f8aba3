"""Plans: recipes, budgets of mixed precision, and conversions that would gain nothing."""

import json
import math
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder
from mlx_lm.models.switch_layers import SwitchLinear

from tests.families import crossed
from tests.quant.models import GOLDEN, build, make_source, packed_folder, run
from tokamac.engine.errors import OptionError
from tokamac.engine.model.config import normalise
from tokamac.engine.model.loader import skeleton_model
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant import plan, sensitivity
from tokamac.quant.conversion import foreseen
from tokamac.quant.options import Options
from tokamac.quant.packing import RECIPES, Round, Search, choose, in_spread, left_out, packable
from tokamac.quant.plan import (
    Candidate,
    alternatives,
    make_plan,
    plan_budget,
    sizes,
    smallest_bytes,
    spend,
    total_bytes,
    total_error,
)
from tokamac.quant.report import in_vain
from tokamac.quant.sensitivity import Alpha, Replay, coarse, references, relative_errors, sample
from tokamac.quant.source import Source, fresh, open_source
from tokamac.quant.streaming import Streamable, Streamed, activation_statistics, streamable_source

# Recipes: the same packings as mlx-lm's builder gives, the models' own rules, and a word about what stays unpacked.


def skeleton_source(config):
    """A source that holds shapes only."""
    module = skeleton_model(config, value_bytes=2)
    return Source(Path(), config, module, dict(tree_flatten(module.parameters())), {}, 0)


def golden(family, **changes):
    return normalise({**json.loads((GOLDEN / family / "config.json").read_text()), **changes})


ARCHITECTURES = {
    "llama": golden("llama", num_hidden_layers=17),
    "tied": golden("llama", num_hidden_layers=16, tie_word_embeddings=True),
    "latent attention and experts": golden("deepseek_v3", num_hidden_layers=19),
    "latent attention": golden("minicpm3", num_hidden_layers=8),
    "experts": golden("mixtral", num_hidden_layers=33),
    "shared experts": golden("qwen2_moe", num_hidden_layers=9),
}


@pytest.mark.parametrize("recipe", QUANT_RECIPES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_mixed_recipes_choose_what_mlx_lm_chooses(kind, recipe):
    source = skeleton_source(ARCHITECTURES[kind])
    theirs = mixed_quant_predicate_builder(recipe, source.module, 32)
    expected = {
        path: Packing(**theirs(path, module)) if module.weight.shape[-1] % 32 == 0 else None
        for path, module in packable(source)
    }
    chosen = choose(source, Options(recipe=recipe, group_size=32))
    assert chosen == expected
    assert len({packing for packing in chosen.values() if packing}) == 2


@pytest.mark.parametrize("layers", [1, 7, 8, 9, 16, 40])
def test_the_spread_holds_both_ends_and_every_third_layer_between(layers):
    chosen = [layer for layer in range(layers) if in_spread(layer, layers)]
    eighth = layers // 8
    ends = [layer for layer in range(layers) if layer < eighth or layer >= 7 * layers // 8]
    assert set(ends) <= set(chosen)
    between = [layer for layer in chosen if layer not in ends]
    assert between == list(range(eighth + 2, 7 * layers // 8, 3))


def test_uniform_is_the_same_as_no_recipe():
    source = skeleton_source(ARCHITECTURES["experts"])
    assert choose(source, Options(recipe="uniform", bits=3)) == choose(source, Options(bits=3))


def test_the_models_own_rule_gives_its_router_more_bits():
    source = skeleton_source(golden("granitemoe"))
    chosen = choose(source, Options(bits=3, group_size=32))
    routers = [packing for path, packing in chosen.items() if "router" in path]
    assert routers
    assert all(packing.bits == 8 for packing in routers)
    assert chosen["model.layers.0.self_attn.q_proj"] == Packing(3, 32)


def test_embedding_and_head_get_the_bits_asked_for_whatever_the_recipe_says():
    source = skeleton_source(ARCHITECTURES["llama"])
    chosen = choose(source, Options(recipe="mixed_2_6", group_size=32, embed_bits=8))
    assert chosen["lm_head"] == chosen["model.embed_tokens"] == Packing(8, 32)
    chosen = choose(source, Options(recipe="mixed_2_6", group_size=32, embed_bits=16))
    assert chosen["lm_head"] is None
    assert chosen["model.embed_tokens"] is None


def test_an_unknown_recipe_is_refused_with_the_list_of_those_there_are():
    with pytest.raises(OptionError) as failure:
        choose(skeleton_source(ARCHITECTURES["llama"]), Options(recipe="mixed_9_9"))
    assert all(name in failure.value.hint for name in RECIPES)
    assert set(QUANT_RECIPES) | {"uniform"} == set(RECIPES)


def test_a_recipe_refuses_a_model_without_the_layers_it_speaks_of():
    with pytest.raises(OptionError, match="down_proj"):
        choose(skeleton_source(golden("gpt_neox")), Options(recipe="mixed_3_6", group_size=32))


def test_bits_and_a_mixed_recipe_contradict_each_other():
    with pytest.raises(OptionError, match="contradict"):
        choose(skeleton_source(ARCHITECTURES["llama"]), Options(recipe="mixed_3_6", bits=4, group_size=32))


def test_layers_whose_rows_no_group_divides_are_told_of(tmp_path):
    source = open_source(make_source(tmp_path, "llama", intermediate_size=160))
    assert left_out(source, choose(source, Options(group_size=32))) == ()
    chosen = choose(source, Options(group_size=64))
    assert chosen["model.layers.0.mlp.down_proj"] is None
    assert left_out(source, chosen) == (
        "2 layers stay unpacked: rows of 160 weights can't be divided into a group of 64",
    )


def test_a_model_that_no_group_divides_is_refused(tmp_path):
    source = open_source(make_source(tmp_path, "llama", hidden_size=96, intermediate_size=96))
    with pytest.raises(OptionError, match="rows of 96 weights"):
        choose(source, Options(group_size=64))


def test_nothing_is_left_out_of_what_shall_not_be_packed(tmp_path):
    source = open_source(make_source(tmp_path, "llama", intermediate_size=160))
    assert left_out(source, choose(source, Options(dequantize=True))) == ()


def test_every_packable_module_has_a_choice():
    source = skeleton_source(ARCHITECTURES["experts"])
    kinds = {type(module).__name__ for _, module in packable(source)}
    assert kinds == {"Embedding", "Linear", "SwitchLinear"}
    assert set(choose(source, Options(group_size=32))) == {path for path, _ in packable(source)}


# A conversion that gains nothing says so in its plan: of what is packed like that already, or is packed into less.

COPY = "the source is packed like this already: the result is a copy of it"


def said(folder: Path, **options) -> str:
    """What the plan says first; what it says of a gain is nothing."""
    plan = foreseen(open_source(folder), Options(**options))
    told = in_vain(plan)
    assert (told == plan.notes[0]) if told else ("already" not in " ".join(plan.notes))
    return told


def test_what_is_packed_like_that_already_is_copied(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder) == COPY
    assert run(folder, tmp_path / "again", bits=4).notes[0] == COPY


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "group_size": 32}])
def test_more_bits_than_there_are_make_it_larger_and_no_better(tmp_path, options):
    folder = packed_folder(tmp_path)
    plan = foreseen(open_source(folder), Options(**options))
    before = 8 * plan.source_bytes / plan.parameters
    assert said(folder, **options) == (
        f"the source already has only {before:.2f} bits per weight: with {plan.bits_per_weight:.2f} it gets larger, not better"
    )
    assert plan.weight_bytes > plan.source_bytes


def test_what_gets_smaller_or_is_unpacked_is_not_in_vain(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder, bits=3) == ""
    assert said(folder, dequantize=True) == ""  # larger, and that is what was asked for


def test_floats_are_not_packed_already(tmp_path):
    folder = make_source(tmp_path, "llama")
    assert said(folder, bits=8) == ""


def test_a_budget_whose_choices_are_not_made_yet_promises_no_copy(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder) == COPY
    assert COPY not in foreseen(open_source(folder), Options(target_bpw=6.0)).notes


# Spending a budget: never more than there is, as good as trying everything, and the same every time.


def candidate(nbytes, error):
    return Candidate(None, nbytes, float(error))


def packings(parameters, alpha):
    """Affine packings of a tensor, error falling fourfold with every bit."""
    return [
        Candidate(
            Packing(bits, group), parameters * bits // 8 + 4 * parameters // group, alpha * 4.0**-bits * group**0.5
        )
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 64, 128)
    ]


def best_by_trying(candidates, budget):
    fitting = [choice for choice in product(*candidates.values()) if sum(each.nbytes for each in choice) <= budget]
    return min((sum(each.error for each in choice) for choice in fitting), default=None)


options = st.lists(st.builds(candidate, st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5)
models = st.dictionaries(st.text("abc", min_size=1, max_size=3), options, min_size=1, max_size=5)


@given(models, st.integers(1, 200))
def test_no_choice_within_the_budget_has_less_error(candidates, budget):
    best = best_by_trying(candidates, budget)
    if best is None:
        with pytest.raises(OptionError):
            spend(candidates, budget)
        return
    chosen = spend(candidates, budget)
    assert total_bytes(chosen) <= budget
    assert total_error(chosen) == pytest.approx(best)
    assert all(chosen[name] in candidates[name] for name in candidates)


@given(models, st.integers(0, 100))
def test_more_to_spend_never_has_more_error(candidates, more):
    least = smallest_bytes(candidates)
    assert total_error(spend(candidates, least + more)) <= total_error(spend(candidates, least))


@pytest.mark.parametrize("order", [1, -1])
def test_ties_are_settled_the_same_way_whatever_is_listed_first(order):
    tensors = {name: packings(1 << 14, 1.0)[::order] for name in ("a", "b", "c", "d")}
    chosen = spend(tensors, 4 * 10_000)
    assert chosen == spend(tensors, 4 * 10_000)
    assert sorted(each.nbytes for each in chosen.values()) == sorted(
        each.nbytes for each in spend({name: each[::-1] for name, each in tensors.items()}, 4 * 10_000).values()
    )


def test_a_large_model_is_within_a_thousandth_of_the_bound_that_nothing_can_beat():
    candidates = {f"layer {i}": packings(1 << (12 + i % 9), 1.0 + (i * 37 % 101)) for i in range(400)}
    budget = 2 * smallest_bytes(candidates)
    chosen = spend(candidates, budget)
    assert 0.999 * budget <= total_bytes(chosen) <= budget
    # For every price of a byte, the cheapest choice at that price less what the budget costs bounds the error from below.
    prices = [10.0 ** (power / 40) for power in range(-400, 0)]
    bound = max(
        sum(min(each.error + price * each.nbytes for each in options) for options in candidates.values())
        - price * budget
        for price in prices
    )
    assert total_error(chosen) <= 1.001 * bound + 1e-6


def test_too_small_a_budget_is_refused():
    with pytest.raises(OptionError, match="smallest packing takes 12"):
        spend({"a": [candidate(5, 0)], "b": [candidate(7, 0), candidate(9, 0)]}, 11)


# The budget planner on real arrays: within the target, better than packing everything alike, the same every time.

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 320, 96)]
UNIFORM = Options(bits=4, group_size=64)


def quiet(_):
    pass


def uneven(folder, kind="llama", *, layers, **changes):
    """Write a source with heavy-tailed weights whose layers matter unequally: each adds a third of what the one before adds."""
    source = make_source(folder, kind, num_hidden_layers=layers, **changes)
    weights = mx.load(str(source / "model.safetensors"))
    noise = np.random.default_rng(11)
    for name, array in weights.items():
        if array.ndim < 2:
            continue
        values = noise.standard_t(5, array.shape).astype(np.float32) / math.sqrt(array.shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= 2.0 * 3.0 ** -int(name.split(".")[2])
        weights[name] = mx.array(values).astype(mx.bfloat16)
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    return open_source(source)


def divergence(source, chosen, quantizer, ids):
    """KL of a model packed as chosen against its source, in nats a token: computed by mlx-lm's own module in float32."""
    log_chances = []
    for packings in ({}, chosen):
        weights = fresh(source)
        for path, packing in packings.items():
            if packing is not None:
                name = f"{path}.weight"
                weights[name] = coarse(path, weights[name], packing, quantizer)
        model = open_source(source.folder).module
        model.update(tree_unflatten([(name, array.astype(mx.float32)) for name, array in weights.items()]))
        logits = np.asarray(model(mx.array([ids]))[0], np.float64)
        log_chances.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    exact, other = log_chances
    return float((np.exp(exact) * (exact - other)).sum(axis=-1).mean())


def bits_per_weight(source, chosen):
    return make_plan(source, UNIFORM, chosen).bits_per_weight


@pytest.mark.parametrize("quantizer", [Round(), Search()], ids=["round", "search"])
def test_a_target_of_the_same_size_beats_packing_everything_alike(tmp_path, quantizer):
    source = uneven(tmp_path, layers=4)
    uniform = choose(source, UNIFORM)
    target = bits_per_weight(source, uniform)
    chosen, notes = plan_budget(source, Options(target_bpw=target), quantizer, IDS, quiet)
    assert bits_per_weight(source, chosen) <= target
    other_text = IDS[::-1]
    ours, theirs = (divergence(source, each, quantizer, other_text) for each in (chosen, uniform))
    assert ours < 0.5 * theirs
    assert notes[0] == plan.NOTES["measured"]
    assert "expected KL divergence: " in notes[1]


def test_a_target_for_the_divergence_takes_the_fewest_bits_that_keep_it(tmp_path):
    source, before = uneven(tmp_path, layers=3), (0.0, math.inf)
    for target in (0.3, 0.02):
        chosen, notes = plan_budget(source, Options(target_kl=target), Search(), IDS, quiet)
        assert 0.9 * target <= float(notes[1].split()[3]) <= target
        found = (bits_per_weight(source, chosen), divergence(source, chosen, Search(), IDS[::-1]))
        assert before[0] < found[0]
        assert found[1] < min(before[1], 2 * target)  # errors of tensors add up, nearly
        before = found
    with pytest.raises(OptionError, match=r"can't be measured: there is no text"):
        plan_budget(source, Options(target_kl=0.05), Search(), None, quiet)


@pytest.mark.parametrize(("kind", "target"), crossed(["llama", "tied", "mixtral", "gemma3"], [3.0, 4.5, 7.25]))
def test_what_is_stored_never_exceeds_the_target_and_comes_close_to_it(tmp_path, kind, target):
    source = open_source(make_source(tmp_path, kind))
    chosen, _ = plan_budget(source, Options(target_bpw=target), Round(), IDS[:32], quiet)
    assert 0.97 * target < bits_per_weight(source, chosen) <= target
    assert set(chosen) == {path for path, _ in packable(source)}


def test_the_same_source_gives_the_same_choice_and_stays_unread(tmp_path):
    source = uneven(tmp_path, layers=2)
    first = plan_budget(source, Options(target_bpw=4.0), Search(), IDS, quiet)
    assert plan_budget(source, Options(target_bpw=4.0), Search(), IDS, quiet) == first
    assert set(source.weights) == {name for name, _ in tree_flatten(source.module.parameters())}


def test_a_target_below_the_smallest_packing_says_what_is_possible(tmp_path):
    source = open_source(make_source(tmp_path, "llama"))
    told = []
    with pytest.raises(OptionError, match="the smallest packing of this model has") as failure:
        plan_budget(source, Options(target_bpw=2.2), Round(), IDS, told.append)
    assert told == []
    least = float(failure.value.message.rpartition(" ")[2])
    chosen, _ = plan_budget(source, Options(target_bpw=least), Round(), IDS, quiet)
    assert bits_per_weight(source, chosen) <= least


def test_routers_keep_eight_bits_and_the_embedding_what_was_asked_for(tmp_path):
    source = open_source(make_source(tmp_path, "mixtral"))
    chosen, _ = plan_budget(source, Options(target_bpw=3.5, embed_bits=6), Round(), IDS, quiet)
    routers = [packing for path, packing in chosen.items() if path.endswith("block_sparse_moe.gate")]
    assert len(routers) == 2
    assert all(packing is None or packing.bits >= 8 for packing in routers)
    assert chosen["lm_head"].bits == chosen["model.embed_tokens"].bits == 6


def test_a_group_size_that_was_asked_for_holds(tmp_path):
    source = open_source(make_source(tmp_path, "llama", intermediate_size=160))
    chosen, notes = plan_budget(source, Options(target_bpw=6.0, group_size=128), Round(), IDS, quiet)
    assert {packing.group_size for packing in chosen.values() if packing} == {128}
    assert "rows of 160 weights" in notes[2]


@pytest.fixture
def no_room(monkeypatch):
    """There is no memory to measure with what each layer's packing changes."""
    monkeypatch.setattr(sensitivity, "fits", lambda *_: False)


@pytest.mark.parametrize("how", ["guessed", "by kind"])
def test_without_room_or_text_the_target_holds_and_a_note_says_how_it_was_met(tmp_path, no_room, how):
    source = uneven(tmp_path, layers=2)
    ids = IDS if how == "guessed" else None
    chosen, notes = plan_budget(source, Options(target_bpw=4.5), Round(), ids, quiet)
    assert bits_per_weight(source, chosen) <= 4.5
    assert notes[0] == plan.NOTES[how]
    assert all(packing is None or packing.bits >= 3 for packing in chosen.values())


def test_a_guess_gives_more_bits_to_layers_that_change_more(tmp_path, no_room):
    source = uneven(tmp_path, layers=6)
    chosen, _ = plan_budget(source, Options(target_bpw=4.5), Round(), IDS, quiet)
    bits = [chosen[f"model.layers.{layer}.mlp.down_proj"].bits for layer in range(6)]
    assert bits[0] > bits[-1]
    assert bits == sorted(bits, reverse=True)


def test_what_the_source_has_packed_may_stay_so_without_error(tmp_path):
    source = open_source(make_source(tmp_path, "llama"))
    packed = tmp_path / "packed"
    packed.mkdir()
    config = json.loads((source.folder / "config.json").read_text())
    model, _ = build("llama")
    from mlx import nn

    nn.quantize(model, group_size=64, bits=4)
    mx.save_safetensors(str(packed / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (packed / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    again = open_source(packed)
    target = bits_per_weight(again, choose(again, UNIFORM))
    chosen, _ = plan_budget(again, Options(target_bpw=target), Round(), IDS, quiet)
    assert set(chosen.values()) == {Packing(4, 64)}


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_sizes_are_those_of_the_plan(tmp_path, kind):
    source = open_source(make_source(tmp_path, kind))
    among = alternatives(source, Options())
    counted = sizes(source, Options(), among)
    generator = np.random.default_rng(1)
    for _ in range(5):
        chosen = {path: each[generator.integers(len(each))] for path, each in among.items()}
        plan = make_plan(source, UNIFORM, chosen)
        assert plan.weight_bytes == counted.fixed + sum(counted.of[path][chosen[path]] for path in chosen)
        assert plan.parameters == counted.parameters


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
def test_a_replay_gives_what_a_whole_reading_gives(tmp_path, kind):
    source = uneven(tmp_path, kind, layers=3)
    replay = Replay(source, IDS)
    for path in [path for path, _ in packable(source)][::5]:
        packing = Packing(3, 64)
        changed = coarse(path, replay.weight(path).astype(mx.bfloat16), packing, Round())
        whole = divergence(source, {path: packing}, Round(), IDS)
        assert replay.divergence(path, changed) == pytest.approx(whole, rel=1e-3, abs=1e-7)
        assert replay.divergence(path, replay.weight(path)) == pytest.approx(0, abs=1e-9)


def test_relative_errors_weigh_channels_by_their_inputs():
    weight = mx.array(np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32))
    importance_of = np.where(np.arange(128) < 64, 1.0, 0.0).astype(np.float32)
    made = coarse("x", weight, Packing(3, 64), Round())
    half = slice(0, 64)
    expected = float((mx.sum(mx.square(made - weight)[:, half]) / mx.sum(mx.square(weight)[:, half])).item())
    found = relative_errors("x", weight, [Packing(3, 64)], Round(), importance_of)
    assert found[Packing(3, 64)] == pytest.approx(expected, rel=1e-5)
    assert relative_errors("x", mx.zeros((4, 64)), [Packing(4, 64)], Round()) == {Packing(4, 64): 0.0}


def test_a_sample_takes_whole_rows_of_every_expert():
    stack = mx.broadcast_to(mx.arange(1024)[None, :, None], (4, 1024, 512))
    rows = sample(stack)
    assert rows.shape[0] == 4
    assert rows.shape[2] == 512
    assert rows.size <= 2 << 18
    assert sample(mx.zeros((8, 64))).shape == (8, 64)


def test_alpha_lies_between_those_that_were_taken():
    alpha = Alpha(((2, 4.0), (4, 1.0)))
    assert [alpha.loss(bits) for bits in (2, 4, 8, None)] == [4.0, 1.0, 1.0, 1.0]
    assert alpha.loss(3) == pytest.approx(2.0)
    assert alpha.at_least(2.0).taken == ((2, 4.0), (4, 2.0))


def test_references_are_the_nearest_there_are():
    every = tuple(Packing(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128))
    assert references((*every, None)) == (Packing(2, 64), Packing(4, 64))
    assert references((Packing(8, 32), None)) == (Packing(8, 32),)
    assert references((None,)) == ()


# Moments: means of squares, by channel and by expert, and that a streamed model gives those of the whole one.

TABLE = [[1.0, 2.0], [3.0, -4.0], [0.0, 1.0]]  # of token 0, 1 and 2


class Block(nn.Module):
    """A linear layer, and a stack of four experts of which each token takes two: 0 and its own."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(2, 2, bias=False)
        self.stack = SwitchLinear(2, 2, 4, bias=False)

    def __call__(self, x, ids):
        own = mx.where(ids == 0, 1, 2)
        self.stack(mx.expand_dims(self.plain(x), (-2, -3)), mx.stack([mx.zeros_like(own), own], axis=-1))
        return x


class Toy(nn.Module):
    """The embedding's rows, seen by a layer that passes them on to the experts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = [Block()]

    def __call__(self, ids):
        return self.layers[0](self.embedding(ids), ids)


def toy():
    weights = {
        "embedding.weight": TABLE,
        "layers.0.plain.weight": [[1.0, 0.0], [0.0, 2.0]],
        "layers.0.stack.weight": np.ones((4, 2, 2)).tolist(),
    }
    return Streamed(Streamable(Toy(), lambda: {name: mx.array(value) for name, value in weights.items()}))


def test_moments_worked_by_hand():
    found = activation_statistics(toy(), [[0, 1, 1]])
    assert set(found) == {"layers.0.plain", "layers.0.stack"}
    # 1² + 3² + 3² over 3, 2² + 4² + 4² over 3
    np.testing.assert_allclose(found["layers.0.plain"], [19 / 3, 12], rtol=1e-6)
    # The second channel was doubled. Expert 0 saw all three tokens, expert 1 token 0, expert 2 token 1 twice, and expert 3 none:
    # it gets the mean over all rows, of which every token makes two.
    np.testing.assert_allclose(found["layers.0.stack"], [[19 / 3, 48], [1, 16], [9, 64], [19 / 3, 48]], rtol=1e-6)
    assert {each.dtype for each in found.values()} == {np.dtype(np.float32)}


def test_sequences_side_by_side_are_one_text():
    together, apart = activation_statistics(toy(), [[0, 1], [2, 1]]), activation_statistics(toy(), [[0, 1, 2, 1]])
    for path, found in together.items():
        np.testing.assert_allclose(found, apart[path], rtol=1e-6)


def whole_moments(kind, ids):
    """From mlx-lm's own model in float32, whole: every call's input, added up one row after the other."""
    model, _ = build(kind)
    model.set_dtype(mx.float32)
    rows = {}

    def kept(path, x, indices=None, **_):
        x = np.asarray(x)
        chosen = np.zeros(x.shape[:-1], int) if indices is None else np.asarray(indices)[..., None]
        shape = np.broadcast_shapes(x.shape[:-1], chosen.shape)
        flat, experts = np.broadcast_to(x, (*shape, x.shape[-1])), np.broadcast_to(chosen, shape)
        rows[path] = (flat.reshape(-1, x.shape[-1]), experts.reshape(-1))

    paths = {id(module): path for path, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        for kind_, name in ((nn.Linear, "__call__"), (SwitchLinear, "__call__"), (nn.Embedding, "as_linear")):
            own = getattr(kind_, name)

            def call(self, x, *args, own=own, **kwargs):
                kept(paths[id(self)], x, *args)
                return own(self, x, *args, **kwargs)

            patch.setattr(kind_, name, call)
        mx.eval(model(mx.array([ids])))
    modules = dict(model.named_modules())
    return {path: by_expert(modules[path], *seen) for path, seen in rows.items()}


def by_expert(module, rows, experts):
    squares = rows.astype(np.float64) ** 2
    if not isinstance(module, SwitchLinear):
        return squares.mean(axis=0)
    each = [squares[experts == number] for number in range(module.num_experts)]
    return np.stack([own.mean(axis=0) if len(own) else squares.mean(axis=0) for own in each])


@pytest.mark.parametrize("length", [6, 48])  # from 64 rows on, mlx-lm sorts them by expert
@pytest.mark.parametrize("kind", ["llama", "mixtral", "tied"])
def test_a_streamed_model_has_the_moments_of_the_whole_one(tmp_path, kind, length):
    ids = [(7 * i * i + 3 * i) % 320 for i in range(length)]
    expected = whole_moments(kind, ids)
    source = open_source(make_source(tmp_path, kind))
    found = activation_statistics(Streamed(streamable_source(source)), [ids])
    assert set(found) == set(expected)
    shapes = {name.removesuffix(".weight"): array.shape for name, array in tree_flatten(source.module.parameters())}
    for path, each in found.items():
        assert each.shape == (*shapes[path][:-2], shapes[path][-1])
        np.testing.assert_allclose(each, expected[path], rtol=1e-4, atol=1e-7)

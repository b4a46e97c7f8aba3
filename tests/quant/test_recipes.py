"""Recipes: the same packings as mlx-lm's builder gives, the models' own rules, and a word about what stays unpacked."""

import json
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from tests.quant.quant_models import GOLDEN, make_source
from tokamac.engine.errors import OptionError
from tokamac.engine.model.config import normalise
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.perf.config_cost import Packing
from tokamac.quant.choices import RECIPES, choose, in_spread, left_out, packable
from tokamac.quant.options import Options
from tokamac.quant.source import Source, open_source


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

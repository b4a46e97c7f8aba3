"""Architectures of our own: found like mlx-lm's, seen by the rules and the caches like mlx-lm's, and unknown to mlx-lm."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import _get_classes

from tests.limits.tables import kv_table
from tokamac.engine.architectures import PREFIX, SAME_CLASS, loads_in_mlx_lm, own_architectures
from tokamac.engine.errors import ModelError, ModelUnsupportedError
from tokamac.engine.kv import plan_caches
from tokamac.engine.model.config import model_classes, normalise
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.config_cost import Packing, cost_of_config, kv_layers, pack
from tokamac.engine.perf.cost import Cost
from tokamac.engine.perf.footprint import KVTable, weigh
from tokamac.engine.perf.workload import query_heads

GOLDEN = Path(__file__).parents[1] / "golden"
OWN = sorted(own_architectures())


def saved(case: str, **changes: Any) -> dict[str, Any]:
    return normalise({**json.loads((GOLDEN / case / "config.json").read_text()), **changes})


@pytest.mark.parametrize("kind", OWN)
def test_mlx_lm_has_none_and_is_left_as_it_was(kind: str) -> None:
    _, arguments = model_classes({"model_type": kind})
    assert arguments.__module__ == PREFIX + kind
    assert not loads_in_mlx_lm(kind)
    with pytest.raises(ValueError, match="not supported"):
        _get_classes({"model_type": kind})
    assert f"mlx_lm.models.{kind}" not in sys.modules


@pytest.mark.parametrize("kind", OWN)
def test_each_is_proved_by_golden_values(kind: str) -> None:
    kinds = {json.loads(path.read_text())["model_type"] for path in GOLDEN.glob("*/config.json")}
    assert kind in {SAME_CLASS.get(each, each) for each in kinds}


def test_what_mlx_lm_has_is_taken_from_it() -> None:
    assert model_classes({"model_type": "llama"})[1].__module__ == "mlx_lm.models.llama"
    assert loads_in_mlx_lm("llama")
    assert not loads_in_mlx_lm("olmo")


@pytest.mark.parametrize("kind", ["_layers", "__init__", "architectures"])
def test_other_files_of_the_folder_are_no_architectures(kind: str) -> None:
    with pytest.raises(ModelUnsupportedError, match="no language model of the kind"):
        model_classes({"model_type": kind})


def test_the_rules_know_what_a_class_of_ours_reads() -> None:
    config = saved("arcee")
    arguments = model_classes(config)[1]
    check_config(config, arguments)
    with pytest.raises(ModelUnsupportedError, match="residual_multiplier"):
        check_config({**config, "residual_multiplier": 0.5}, arguments)


def test_an_activation_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="xielu"):
        skeleton_model(saved("arcee", hidden_act="xielu"), 4)


@pytest.mark.parametrize("kind", ["arcee"])
def test_packed_keys_and_windows_apply(kind: str) -> None:
    config = saved(kind)
    plan = plan_caches(skeleton_model(config, 4), config, KVSpec(key_bits=8, value_bits=4, window=64))
    assert [(layer.key_bits, layer.value_bits, layer.window) for layer in plan.layers] == [(8, 4, 64)] * 3


def test_vaultgemma_slides_in_every_second_layer_though_the_file_lists_none() -> None:
    config = saved("vaultgemma", layer_types=None, sliding_window=None)
    plan = plan_caches(skeleton_model(config, 4), config, KVSpec())
    assert [layer.window for layer in plan.layers] == [4096, None, 4096]
    assert {row.window for row in kv_layers(config) or ()} == {4096, None}


def test_hunyuans_lists_of_the_same_number_count_as_that_number() -> None:
    listed = saved(
        "hunyuan_v1_moe", moe_topk=[2, 2, 2], num_shared_expert=[1, 1, 1], moe_intermediate_size=[48, 48, 48]
    )
    assert (listed["moe_topk"], listed["num_shared_expert"], listed["moe_intermediate_size"]) == (2, 1, 48)
    cost = cost_of_config(listed)
    assert isinstance(cost, Cost)
    assert cost.active_parameters is not None
    assert cost.active_parameters < cost.parameters
    model = skeleton_model(listed, 4)
    assert model.layers[0].mlp.switch_mlp.up_proj.weight.shape == (4, 48, 64)
    assert model.layers[0].mlp.shared_mlp.up_proj.weight.shape == (96, 64)


def test_keys_that_hunyuans_reference_does_not_read_decide_nothing() -> None:
    for value in (True, False):
        config = saved("hunyuan_v1_moe", norm_topk_prob=value, routed_scaling_factor=2.0)
        check_config(config, model_classes(config)[1])


def test_a_router_keeps_eight_bits() -> None:
    config = saved("hunyuan_v1_moe")
    model = skeleton_model(config, 2)
    pack(model, config, Packing(4, 32))
    assert (model.layers[0].mlp.gate.wg.bits, model.layers[0].mlp.shared_mlp.up_proj.bits) == (8, 4)


@pytest.mark.parametrize("case", ["step3p7_long", "step3p7_published_long"])
def test_both_forms_of_steps_config_say_the_same_of_each_layer(case: str) -> None:
    config = saved(case)
    text = config["text_config"]
    assert text["rope_theta"] == [10_000.0, 10_000.0, 50_000.0]
    assert text["partial_rotary_factors"] == [1.0, 1.0, 0.5]
    assert (text["moe_layers_enum"], text["num_key_value_heads"]) == ("1,2", 2)
    assert [query_heads(config, layer) for layer in range(3)] == [6, 6, 4]
    plan = plan_caches(skeleton_model(config, 4), config, KVSpec(key_bits=8, value_bits=8))
    assert [(layer.window, layer.key_bits) for layer in plan.layers] == [(16, 8), (16, 8), (None, 8)]
    assert normalise(config) == config


def test_layers_of_step_that_differ_otherwise_are_refused() -> None:
    text = json.loads((GOLDEN / "step3p7_long" / "config.json").read_text())["text_config"]
    text["per_layer_config"]["2"] = {"num_attention_heads": 8}
    config = saved("step3p7_long", text_config=text)
    with pytest.raises(ModelUnsupportedError, match="per_layer_config"):
        check_config(config, model_classes(config)[1])


CASES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/config.json")
    if not loads_in_mlx_lm(json.loads(path.read_text())["model_type"])
)


@pytest.mark.parametrize("case", [*CASES, "minimax_m3_vl_long"])
def test_what_each_costs_and_keeps_is_known_before_it_is_loaded(case: str) -> None:
    config = saved(case)
    weighed = weigh(config, "metal", 1 << 40)
    assert not isinstance(weighed, str), weighed
    assert weighed.stored.active_parameters is not None or "moe_topk" in config  # a list of them
    table = kv_table(config, KVSpec(), 64, value_bytes=2)
    assert isinstance(table, KVTable), table
    assert table.bytes_at_context


@pytest.mark.parametrize(
    ("case", "part", "known"),
    [("minimax_m3_vl_long", "minimax_m2", "minimax_m3"), ("step3p7_long", "step3p5_text", "step3p5")],
)
def test_a_language_part_is_what_it_is_by_any_name(case: str, part: str, known: str) -> None:
    config = json.loads((GOLDEN / case / "config.json").read_text())
    config["text_config"]["model_type"] = part
    assert normalise(config)["text_config"] == saved(case)["text_config"] | {"model_type": known}


def test_minimax_m3_rotates_by_the_fraction_that_transformers_reads() -> None:
    plain = saved("minimax_m3_long", rope_parameters=None, rope_theta=1e4, partial_rotary_factor=0.25, rotary_dim=16)
    assert plain["rotary_dim"] == 8
    scaled = saved("minimax_m3_long", rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0})
    assert scaled["rope_parameters"] == {"rope_theta": 5e6, "type": "linear", "rope_type": "linear", "factor": 2.0}
    assert skeleton_model(scaled, 4).layers[0].self_attn.rope.scale == 0.5

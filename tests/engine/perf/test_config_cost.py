"""What a config alone says of a model's cost is what the built, packed and saved model costs."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import quantize_model

from tests.engine.perf.test_cost import CONFIGS, GEMMA, LLAMA, QWEN3_MOE
from tests.families import crossed
from tokamac.engine.device import DeviceKind
from tokamac.engine.model.config import model_classes, normalise, read_config
from tokamac.engine.model.loader import skeleton_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.config_cost import Packing, cost_of_config, traits_of
from tokamac.engine.perf.cost import Cost, Form, cost_of_folder, cost_of_model, leaf_modules
from tokamac.engine.perf.footprint import Footprint, weigh
from tokamac.engine.perf.what_if import WhatIfCase, elsewhere, outcome

GOLDEN = Path(__file__).parents[2] / "golden"

SHARED: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": 320, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **{key: value for key, value in SHARED.items() if key != "head_dim"}, **ROUTED,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "qk_nope_head_dim": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False,
}  # fmt: skip
DELTA: dict[str, Any] = {
    **{key: value for key, value in SHARED.items() if key != "rope_theta"},
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
STATE_SPACE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
    "time_step_rank": 8, "tie_word_embeddings": True, "intermediate_size": 256,
}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "gemma3": {
        "model_type": "gemma3", "vocab_size": 320,
        "text_config": {**SHARED, "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window_pattern": 2},
    },
    "mistral3": {"model_type": "mistral3", "text_config": {**SHARED, "model_type": "mistral"}},
    "gpt_oss": {
        **SHARED, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
        "layer_types": WINDOWS,
    },
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3"},
    "glm4_moe_lite": {**LATENT, "model_type": "glm4_moe_lite", "partial_rotary_factor": 1.0},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {**DELTA, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **DELTA, "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    },
    "mamba": {**STATE_SPACE, "model_type": "mamba", "state_size": 16},
    "mamba2": {
        **STATE_SPACE, "model_type": "mamba2", "state_size": 32, "num_heads": 8, "head_dim": 32, "n_groups": 2,
        "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 1e9],
    },
    "nemotron_h": {
        **{key: value for key, value in SHARED.items() if key != "rope_theta"}, **ROUTED, "model_type": "nemotron_h",
        "attention_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 32, "mamba_proj_bias": False, "ssm_state_size": 32,
        "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "E"], "time_step_limit": [0.0, 1e9], "moe_shared_expert_intermediate_size": 64,
    },
    "rwkv7": {
        "model_type": "rwkv7", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "norm_eps": 1e-5, "head_dim": 32,
        "num_hidden_layers": 2, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
PACKINGS = (
    Packing(4), Packing(3, 32), Packing(8, 128), Packing(4, 32, "mxfp4"), Packing(8, 32, "mxfp8"),
    Packing(4, 16, "nvfp4"),
)  # fmt: skip
LARGE = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def built(config: dict[str, Any]) -> Any:
    """Return mlx-lm's model with real bfloat16 arrays, and no head where the class waits for the checkpoint to bring one."""
    make, arguments = model_classes(config)
    mx.random.seed(0)
    model = make(arguments.from_dict(config))
    names = dict(tree_flatten(model.parameters()))
    if config["model_type"].startswith("gemma3"):
        prefix = "language_model." if config["model_type"] == "gemma3" else ""
        names.pop(f"{prefix}lm_head.weight")
        model.sanitize(names)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def saved(folder: Path, model: Any, config: dict[str, Any]) -> Cost:
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return cost_of_folder(folder, config)


def said(config: dict[str, Any], **how: Any) -> Cost:
    cost = cost_of_config(config, **how)
    assert isinstance(cost, Cost), cost
    return cost


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unpacked_config_costs_what_its_model_and_its_files_cost(tmp_path: Path, family: str) -> None:
    config = normalise(FAMILIES[family])
    model = built(config)
    assert said(config) == cost_of_model(model, config) == saved(tmp_path, model, config)
    assert said(config, packing=Packing(None)) == said(config)


@pytest.mark.parametrize(("family", "packing"), crossed(FAMILIES, PACKINGS, PACKINGS[0]), ids=str)
def test_packing_costs_what_mlx_lms_conversion_makes(tmp_path: Path, family: str, packing: Packing) -> None:
    config = normalise(FAMILIES[family])
    model, converted = quantize_model(built(config), config, packing.group_size, packing.bits, mode=packing.mode)
    real = cost_of_model(model, converted)
    assert said(config, packing=packing) == real
    assert said(converted) == real  # the entries that the conversion wrote say the same
    assert saved(tmp_path, model, converted) == real


def test_entries_of_single_modules_count(tmp_path: Path) -> None:
    entries = {
        "group_size": 64, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}, "model.embed_tokens": False,
        "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 6, "mode": "affine"},
        "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "model.layers.0.mlp.up_proj": True,
    }  # fmt: skip
    config = {**normalise(LLAMA), "quantization": entries}
    model = built(normalise(LLAMA))
    nn.quantize(model, 64, 4, class_predicate=lambda path, module: entries.get(path, "to_quantized" in dir(module)))
    assert said(config) == cost_of_model(model, config) == saved(tmp_path, model, config)
    assert said(config).parts["embedding"].bits_per_weight == 16
    assert said(config).parts["head"].bits_per_weight == 9


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5"])
def test_every_form_of_a_packed_config_is_that_of_its_folder(tmp_path: Path, family: str, form: Any) -> None:
    config = {**normalise(FAMILIES[family]), "quantization": {"group_size": 64, "bits": 4}}
    model = built(normalise(FAMILIES[family]))
    nn.quantize(model, 64, 4)
    saved(tmp_path, model, config)
    assert said(config, form=form) == cost_of_folder(tmp_path, config, form=form)


def test_a_row_that_the_groups_do_not_divide_stays_unpacked() -> None:
    config = normalise({**LLAMA, "intermediate_size": 96})  # 96 = 3 x 32
    narrow = 2 * 96 * 128  # the down projections of two layers
    cost = said(config, packing=Packing(4, 64))
    mlp = cost.parts["mlp"]
    assert mlp.nbytes == 2 * narrow + 2 * narrow * 4.5 / 8
    assert said(config, packing=Packing(4, 32)).parts["mlp"].bits_per_weight == 5.0


def test_a_router_keeps_the_bits_that_its_class_asks_for() -> None:
    config = normalise(QWEN3_MOE)
    router = 2 * 8 * 128
    assert said(config, packing=Packing(4)).parts["mlp"].nbytes == router * 8.5 / 8


def test_a_head_that_waits_for_its_checkpoint_is_there_where_the_config_unties_it(tmp_path: Path) -> None:
    tied, stored = normalise(GEMMA), {**normalise(GEMMA), "tie_word_embeddings": False}
    table = 2 * 320 * 128
    assert said(tied).parts["head"].nbytes == 0
    assert said(stored).weight_bytes == said(tied).weight_bytes + table
    assert said(stored).weight_bytes_per_token == said(tied).weight_bytes_per_token
    make, arguments = model_classes(stored)
    both = make(arguments.from_dict(stored))
    both.set_dtype(mx.bfloat16)
    assert said(stored) == cost_of_model(both, stored) == saved(tmp_path, both, {**stored, "tie_word_embeddings": True})


def test_microscaled_experts_of_another_packer_are_taken_as_they_are() -> None:
    method = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]}  # fmt: skip
    config = normalise({**FAMILIES["gpt_oss"], "quantization_config": method})
    cost, plain = said(config), said(normalise(FAMILIES["gpt_oss"]))
    experts = 4 * 4 * 3 * 256 * 128  # layers, experts, matrices
    biases = 2 * 4 * 4 * (2 * 256 + 128)
    assert cost.parts["experts"].nbytes == experts * 4.25 / 8 + biases
    for part in ("embedding", "attention", "mlp", "head", "norms and other"):
        assert cost.parts[part] == plain.parts[part]


def test_four_ternary_weights_lie_in_a_byte() -> None:
    config = normalise({**SHARED, "model_type": "llama", "quantization_config": {"quant_method": "bitnet"}})
    plain = said(normalise({**SHARED, "model_type": "llama"}))
    cost = said(config)
    assert cost.parts["mlp"].parameters == plain.parts["mlp"].parameters
    assert (
        cost.parts["mlp"].nbytes == plain.parts["mlp"].nbytes / 8 + 4 * 3 * 4
    )  # a scale of four bytes for each matrix


@pytest.mark.parametrize(
    ("changes", "packing", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, "packed by gptq"),
        ({"quantization": {"group_size": 64}}, None, "can't be packed like this: 'bits'"),
        ({}, Packing(7), "7 is not supported"),
        ({}, Packing(4, 64, "mxfp4"), "group size"),
        ({"model_type": "nonesuch"}, None, "nonesuch"),
        ({"hidden_size": None}, None, "does not make a model"),
    ],
)
def test_what_can_not_be_said_has_a_reason(changes: dict[str, Any], packing: Packing | None, reason: str) -> None:
    cost = cost_of_config(normalise({**LLAMA, **changes}), packing=packing)
    assert isinstance(cost, str)
    assert reason in cost


def test_another_packers_config_costs_what_is_asked_for_instead() -> None:
    foreign = normalise({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert said(foreign, packing=Packing(4)) == said(normalise(LLAMA), packing=Packing(4))


@pytest.mark.usefixtures("settled_memory")
def test_a_large_model_takes_no_memory() -> None:
    config = normalise(LARGE)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cost = said(config, packing=Packing(4))
    assert mx.get_peak_memory() - before < 1_000_000
    assert cost.parameters == 70_553_706_496
    assert cost.weight_bytes > 39e9


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_the_config_is_left_as_it_was(family: str) -> None:
    config = normalise(FAMILIES[family])
    before = json.dumps(config)
    said(config, packing=Packing(4))
    assert json.dumps(config) == before


def test_every_parameter_of_a_skeleton_is_a_zero_of_its_shape() -> None:
    for value_bytes, dtype in ((2, mx.bfloat16), (4, mx.float32)):
        model = skeleton_model(normalise(LLAMA), value_bytes)
        real = dict(tree_flatten(built(normalise(LLAMA)).parameters()))
        skeleton = dict(tree_flatten(model.parameters()))
        assert {name: array.shape for name, array in skeleton.items()} == {
            name: array.shape for name, array in real.items()
        }
        assert {array.dtype for array in skeleton.values()} == {dtype}
        assert not any(mx.any(array).item() for array in skeleton.values())


def test_what_a_text_model_leaves_out_of_a_checkpoint_is_not_counted(tmp_path: Path) -> None:
    config = normalise(FAMILIES["deepseek_v3"])
    tensors = dict(tree_flatten(built(config).parameters()))
    extra = mx.zeros((8, 8))
    for name in ("vision_tower.a.weight", "vision_embedder.weight", "mtp.fc.weight", "language_model.mtp.fc.weight",
                 "model.layers.4.mlp.gate_proj.weight"):  # fmt: skip  # there are layers 0 to 3
        tensors[name] = extra
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    assert cost_of_folder(tmp_path, config) == said(config)


# Configs are told apart by the names the field uses: one case a family, from its published config or a tiny one.

PUBLISHED = {
    "Llama-3.1-8B": ("dense",),
    "Qwen2.5-7B": ("dense",),
    "Qwen3-8B": ("dense",),
    "phi-4": ("dense",),
    "Mistral-7B-v0.3": ("dense",),
    "gemma-3-1b": ("dense", "sliding window"),
    "gemma-3-27b": ("dense", "sliding window"),
    "gemma-4-e2b": ("dense", "sliding window"),
    "gemma-4-26b-a4b": ("mixture", "sliding window"),
    "Qwen3-30B-A3B": ("mixture",),
    "GLM-4.5-Air": ("mixture",),
    "gpt-oss-20b": ("mixture", "sliding window"),
    "Qwen3.5-9B": ("dense", "hybrid"),
    "Qwen3.6-35B-A3B": ("mixture", "hybrid"),
    "Qwen3-Next-80B-A3B": ("mixture", "hybrid"),
    "LFM2.5-1.2B": ("dense", "hybrid"),
}
TINY = {
    "llama": ("dense",),
    "mixtral": ("mixture",),
    "gemma3": ("dense", "sliding window"),
    "deepseek_v3": ("mixture", "latent attention"),
    "qwen3_5_moe": ("mixture", "hybrid"),
    "mamba": ("dense", "state space"),
    "mamba2": ("dense", "state space"),
    "rwkv7": ("dense", "state space"),
    "nemotron_h": ("mixture", "hybrid"),
}


@pytest.mark.parametrize(("name", "traits"), PUBLISHED.items())
def test_a_published_model_is_of_its_kinds(name, traits):
    entry = find(name)
    assert traits_of(entry.config) == traits


@pytest.mark.parametrize(("family", "traits"), TINY.items())
def test_a_family_is_of_its_kinds(family, traits):
    assert traits_of(normalise(FAMILIES[family])) == traits


@pytest.mark.parametrize(
    ("changes", "traits"),
    [
        ({"num_experts": 1}, ("dense",)),
        ({"num_experts": 8, "enable_moe_block": False}, ("dense",)),  # gemma4's dense sizes name experts too
        ({"sliding_window": 4096}, ("dense", "sliding window")),
        ({"sliding_window": 4096, "use_sliding_window": False}, ("dense",)),
        ({"sliding_window": None}, ("dense",)),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, ("dense",)),  # the list of layers goes first
        ({"layer_types": ["chunked_attention"]}, ("dense", "sliding window")),
        ({"attention_chunk_size": 8192}, ("dense", "sliding window")),
        ({"full_attn_idxs": [2, 5]}, ("dense", "hybrid")),
        ({"full_attention_interval": 4, "layer_types": ["full_attention"]}, ("dense",)),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, ("dense", "hybrid")),
        ({"kv_lora_rank": 512}, ("dense", "latent attention")),
        ({"kv_lora_rank": None}, ("dense",)),
        ({"text_config": {"num_local_experts": 8}}, ("mixture",)),
    ],
)
def test_a_key_decides(changes, traits):
    assert traits_of({"model_type": "llama", **changes}) == traits


def test_every_model_of_the_catalogue_is_dense_or_a_mixture_first():
    known = [entry for entry in catalogue() if entry.config is not None]
    assert len(known) > 30
    for entry in known:
        first, *others = traits_of(entry.config)
        assert first in ("dense", "mixture")
        assert not {"dense", "mixture"} & set(others)
        assert len(others) == len(set(others))


# Leaves are those of MLX; and what was weighed once is not weighed again, unless something else is asked.


def test_a_module_among_plain_values_is_found_and_one_without_modules_below_is_a_leaf() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = [1, 2]
            self.named = {"inner": [nn.Linear(2, 2), nn.RMSNorm(2)], "empty": {}}
            self.bare = nn.Module()

    model = Odd()
    theirs = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    assert [path for path, _ in leaf_modules(model)] == [path for path, _ in theirs]
    assert {path for path, _ in theirs} == {"named.inner.0", "named.inner.1", "bare"}
    assert leaf_modules(nn.Linear(2, 2)) == []


def test_a_module_that_was_found_goes_at_once_with_its_last_owner() -> None:
    """Or the weights that a load replaces would stay until the next full search for garbage: twice the memory."""
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        held = weakref.ref(leaf_modules(model)[0][1])
        assert held() is not None
        del model
        assert held() is None
    finally:
        gc.enable()


@pytest.fixture
def config() -> Any:
    return read_config(GOLDEN / "llama")


@pytest.mark.parametrize(("device", "packing"), [("cpu", None), ("metal", Packing(8)), ("metal", Packing(8, 32))])
def test_what_was_weighed_stays_until_it_differs(config: Any, device: DeviceKind, packing: Packing | None) -> None:
    first = weigh(config, "metal")
    assert isinstance(first, Footprint)
    assert weigh(dict(config), "metal") is first
    assert weigh(config, device, packing=packing) is not first
    assert weigh({**config, "vocab_size": config["vocab_size"] * 2}, "metal") is not first


def test_what_is_said_of_a_case_does_not_depend_on_what_was_asked_before(config: Any) -> None:
    place = elsewhere("Apple M4 Max", 40, 64)
    case = WhatIfCase(context=512, prompt=512)
    before = outcome(config, case, place)
    packed = outcome(config, replace(case, kv=KVSpec(key_bits=8, value_bits=8)), place)
    assert packed.kv_bytes != before.kv_bytes
    assert outcome(config, case, place) == before
    assert outcome(config, replace(case, context=1024), place).kv_bytes != before.kv_bytes

"""Architectures of our own, DeepSeek V4 above all: found, packed, cached and costed like mlx-lm's."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.utils import _get_classes

from tests.engine.kv.models import kv_table, offset, trim, work_of_config
from tests.families import build, golden, walked
from tests.golden.weights import tensor
from tests.quant.models import write_source
from tokamac.engine import Engine, Finished, Message, PromptCacheSpec, Sampling, TemplateOptions, ToolCall, ToolSpec
from tokamac.engine.architectures import PREFIX, SAME_CLASS, loads_in_mlx_lm, own_architectures
from tokamac.engine.errors import ModelError, ModelUnsupportedError, OptionError
from tokamac.engine.kv.cache import rewindable
from tokamac.engine.kv.layout import SPARE
from tokamac.engine.kv.plan import plan_caches
from tokamac.engine.kv.snapshot import freeze, thaw
from tokamac.engine.lab.scoring import log_probabilities
from tokamac.engine.model.config import model_classes, normalise, read_config
from tokamac.engine.model.config_rules import check_config
from tokamac.engine.model.loader import build_model, skeleton_model
from tokamac.engine.model.safetensors import find_shards, read_header
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.config_cost import Packing, cost_of_config, kv_layers, pack, query_heads
from tokamac.engine.perf.cost import cost_of_folder
from tokamac.engine.perf.footprint import weigh
from tokamac.engine.perf.roofline import Attention
from tokamac.engine.text.template import ChatTemplate, template_of
from tokamac.engine.text.tokenizer import load_tokenizer
from tokamac.quant import convert

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
    kinds |= {each.stem for each in (GOLDEN / "vision").glob("*.npz")}
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
    weighed = weigh(config, "metal")
    assert not isinstance(weighed, str), weighed
    assert weighed.stored.active_parameters is not None or "moe_topk" in config  # a list of them
    table = kv_table(config, KVSpec(), 64, value_bytes=2)
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


# DeepSeek V4: as it is published, packed in fp8 and fp4, its caches taken back and kept, and what it costs.

CASE = "deepseek_v4_published"
# Sizes that fill more than one fp8 tile of 128 and whole fp4 groups of 32.
SIZES = {"head_dim": 64, "moe_intermediate_size": 64, "hidden_size": 96, "vocab_size": 128}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PUBLISHED = (
    # What mlx-like names are called in the published files.
    (r"^model\.(?=layers|norm)", ""),
    (r"^model\.embed_tokens", "embed"),
    (r"^lm_head", "head"),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.([qo])_([ab])_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)
EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def config_of(**more: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / CASE / "config.json").read_text())
    return {**config, **SIZES, **more}


def published(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of a model by the names under which DeepSeek publishes them."""
    normal = normalise(config)
    make, arguments = model_classes(normal)
    found = {}
    for name, array in tree_flatten(make(arguments.from_dict(normal)).parameters()):
        other = name
        for pattern, theirs in PUBLISHED:
            other = re.sub(pattern, theirs, other)
        value = tensor(3, name, tuple(array.shape), config)
        if (stack := re.fullmatch(r"(.*)\.switch_mlp\.(\w+)\.weight", other)) is not None:
            found |= {f"{stack[1]}.{index}.{EXPERTS[stack[2]]}.weight": part for index, part in enumerate(value)}
        else:
            found[other] = value.reshape(-1, value.shape[-1]) if name.endswith("o_a_proj.weight") else value
    return found


def fp8(value: Any) -> tuple[Any, Any, Any]:
    """Return a matrix in fp8, its scales' exponents by tiles of 128, and what it stands for."""
    rows, columns = (-(-size // 128) for size in value.shape)
    exponents = np.random.default_rng(value.shape[0]).integers(-4, 3, (rows, columns))
    spread = np.repeat(np.repeat(np.exp2(exponents, dtype=np.float32), 128, 0), 128, 1)[
        : value.shape[0], : value.shape[1]
    ]
    codes = mx.to_fp8(mx.array(value / spread))
    return np.array(codes), exponents, np.array(mx.from_fp8(codes, mx.float32)) * spread


def fp4(value: Any, group: int) -> tuple[Any, Any, Any]:
    """Return a matrix in fp4, two numbers a byte, the exponent of each group, and what it stands for."""
    exponents = np.random.default_rng(value.shape[0]).integers(-5, -2, (value.shape[0], value.shape[1] // group))
    spread = np.repeat(np.exp2(exponents, dtype=np.float32), group, axis=1)
    codes = np.abs(value[..., None] / spread[..., None] - FP4_VALUES).argmin(-1).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, exponents, FP4_VALUES[codes] * spread


def packed_folders(folder: Path, experts: str) -> tuple[Path, Path]:
    """Write a model as it is published, and the same in floats; return both folders."""
    settings = {**FP8, "group_size": 16} if experts == "nvfp4" else FP8
    config = config_of(quantization_config=settings) | ({"expert_dtype": "fp4"} if experts != "fp8" else {})
    stored, types, meant = {}, {}, {}
    for name, value in published(config).items():
        stem = name.removesuffix(".weight")
        if re.search(r"\.experts\.", name) and experts != "fp8":
            codes, exponents, meant[name] = fp4(value, 16 if experts == "nvfp4" else 32)
            stored[name] = codes.view(np.uint8)
            if experts == "nvfp4":
                whole = np.float32(2.0**-3)
                stored[f"{stem}.weight_scale"] = np.array(mx.to_fp8(mx.array(np.exp2(exponents + 3.0))))
                stored[f"{stem}.weight_scale_2"], stored[f"{stem}.input_scale"] = whole, np.float32(1)
                types[f"{stem}.weight_scale"] = "F8_E4M3"
                continue
            types[name] = "I8"
        elif re.search(r"\.w[qo]_[ab]\.|attn\.wkv\.|\.w[123]\.", name):
            stored[name], exponents, meant[name] = fp8(value)
            types[name] = "F8_E4M3"
        else:
            stored[name] = meant[name] = value
            continue
        stored[f"{stem}.scale"] = (exponents + 127).astype(np.uint8)
        types[f"{stem}.scale"] = "F8_E8M0"
    stored["mtp.0.norm.weight"] = np.ones(96, np.float32)
    (folder / "floats").mkdir()
    packed = write_source(folder, stored, config, types=types)
    floats = write_source(folder / "floats", meant, config_of())
    for file in (GOLDEN / "tokenizer").iterdir():
        shutil.copy(file, packed)
        shutil.copy(file, floats)
    return packed, floats


def answer(folder: Path, tokens: list[int]) -> Any:
    """Return the log-probabilities of a folder's model, its words packed as they are."""
    module, _ = build_model(folder, read_config(folder))
    return np.array(log_probabilities(module, module.make_cache(), tokens))


TOKENS = np.random.default_rng(1).integers(5, 128, 150).tolist()


def modes_of(folder: Path) -> tuple[set[str], set[str]]:
    """Return how MLX packs a folder's experts, and all else that is packed."""
    module, _ = build_model(folder, read_config(folder))
    modes = {path: leaf.mode for path, leaf in module.named_modules() if "scales" in leaf}
    experts = {path for path in modes if "switch_mlp" in path}
    return {modes[path] for path in experts}, {mode for path, mode in modes.items() if path not in experts}


@pytest.mark.parametrize(("experts", "mode"), [("fp4", "mxfp4"), ("fp8", "mxfp8")])
def test_published_words_are_computed_with_as_they_are(tmp_path: Path, experts: str, mode: str) -> None:
    packed, floats = packed_folders(tmp_path, experts)
    assert modes_of(packed) == ({mode}, {"mxfp8"})
    assert np.abs(answer(packed, TOKENS) - answer(floats, TOKENS)).max() < 1e-3


def test_scales_that_are_no_powers_of_two_are_multiplied_by(tmp_path: Path) -> None:
    stored, types, meant = {}, {}, {}
    for name, value in published(config_of()).items():
        stored[name] = meant[name] = value
        if re.search(r"\.w[qo]_[ab]\.|attn\.wkv\.|\.w[123]\.", name):
            codes, exponents, worth = fp8(value)
            stored[name], types[name] = codes, "F8_E4M3"
            stored[name.replace(".weight", ".scale")] = (1.5 * np.exp2(exponents)).astype(np.float32)
            meant[name] = 1.5 * worth
    (tmp_path / "floats").mkdir()
    settings = {key: value for key, value in FP8.items() if key != "scale_fmt"}
    packed = write_source(tmp_path, stored, config_of(quantization_config=settings), types=types)
    floats = write_source(tmp_path / "floats", meant, config_of())
    assert modes_of(packed) == (set(), set())
    assert np.abs(answer(packed, TOKENS) - answer(floats, TOKENS)).max() < 1e-3


@pytest.mark.parametrize("prompts", [1, 3])
def test_sequences_side_by_side_are_as_each_alone(tmp_path: Path, prompts: int) -> None:
    build(CASE, tmp_path)
    module = build_model(tmp_path, read_config(tmp_path))[0]
    rng = np.random.default_rng(5)
    ids = mx.array(rng.integers(5, 128, (prompts, 150)))
    caches = module.make_cache()
    together = mx.concatenate([module(ids[:, :100], cache=caches), module(ids[:, 100:], cache=caches)], axis=1)
    alone = mx.concatenate([module(each[None]) for each in ids])
    assert mx.abs(together - alone).max().item() < 1e-3


def test_nvfp4_experts_are_converted_anywhere_and_run_on_a_gpu_alone(tmp_path: Path) -> None:
    packed, floats = packed_folders(tmp_path, "nvfp4")
    assert modes_of(packed) == ({"nvfp4"}, {"mxfp8"})
    with pytest.raises(ModelError, match="nvfp4") as caught:
        Engine.load(packed)
    assert "tokamac convert" in caught.value.hint
    convert(packed, tmp_path / "plain", dequantize=True, dtype="float32", verify=False)
    assert np.abs(answer(tmp_path / "plain", TOKENS) - answer(floats, TOKENS)).max() < 1e-3


def test_published_names_are_those_of_the_golden_values(tmp_path: Path) -> None:
    build(CASE, tmp_path)
    tokens, expected = golden(CASE)
    plain = mx.load(str(tmp_path / "model.safetensors"))
    names = {name: re.sub(r"^model\.", "", name) for name in plain}
    names |= {name: names[name].replace("attn.norm.", "attn.kv_norm.") for name in plain if ".attn.norm." in name}
    names |= {name: "embed.weight" for name in plain if "embed_tokens" in name}
    names |= {name: names[name].replace("hc_head.hc_", "hc_head_") for name in plain if "hc_head" in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {names[name]: value for name, value in plain.items()})
    assert np.abs(answer(tmp_path, tokens) - expected).max() < 1e-4


def test_names_that_transformers_has_in_memory_are_read_too(tmp_path: Path) -> None:
    build(CASE, tmp_path)
    tokens, expected = golden(CASE)
    made = build_model(tmp_path, read_config(tmp_path))[0]
    found: dict[str, mx.array] = {}
    for name, value in tree_flatten(made.parameters()):
        if name.endswith("switch_mlp.gate_proj.weight"):
            up = made.layers[int(name.split(".")[2])].mlp.experts.switch_mlp.up_proj.weight
            found[name.replace("switch_mlp.gate_proj.weight", "gate_up_proj")] = mx.concatenate([value, up], axis=1)
        elif name.endswith("switch_mlp.down_proj.weight"):
            found[name.replace("switch_mlp.down_proj.weight", "down_proj")] = value
        elif "switch_mlp" not in name:
            theirs = re.sub(r"\.indexer\.(?:compressor\.)?", ".compressor.indexer.", name)
            theirs = theirs.replace("indexer.weights_proj", "indexer.scorer.weights_proj")
            found[theirs] = value.reshape(-1, value.shape[-1]) if name.endswith("o_a_proj.weight") else value
    mx.save_safetensors(str(tmp_path / "model.safetensors"), found)
    assert np.abs(answer(tmp_path, tokens) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        (KVSpec(key_bits=8, value_bits=8), "can't be quantized.*compressed by the model itself"),
        (KVSpec(window=64), "can't have a window.*compressed by the model itself"),
    ],
)
def test_flags_that_its_caches_can_not_take_are_errors_that_say_why(kv: KVSpec, named: str) -> None:
    config = normalise(config_of())
    with pytest.raises(OptionError, match=named):
        plan_caches(skeleton_model(config, 4), config, kv)


@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratios": [0, 4, 16, 4]}, {"scoring_func": "tanh"}, {"norm_topk_prob": False},
        {"mlp_layer_types": ["dense"] * 4}, {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"compress_ratios": [0, 4]}, {"num_key_value_heads": 2},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_no_deepseek_v4_is_known_to_have_is_refused_by_name(change: dict[str, Any]) -> None:
    named = (
        "layer_types"
        if "compress_ratios" in change
        else "rope_type"
        if "rope_scaling" in change
        else next(iter(change))
    )
    with pytest.raises(ModelUnsupportedError, match=named):
        skeleton_model(normalise({**config_of(), **change}), 4)


# Chat

MARKS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>")
BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
TALKS = (
    [("user", "hi")],
    [("system", "be brief"), ("user", "hi")],
    [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "why?")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
)


def deepseek_tokenizer(folder: Path, **settings: Any) -> None:
    """Write a tokenizer that has DeepSeek's marks and, as its published one, no chat template."""
    for file in (GOLDEN / "tokenizer").iterdir():
        shutil.copy(file, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max(vocabulary["model"]["vocab"].values())
    vocabulary["added_tokens"] += [
        {
            "id": first + number,
            "content": mark,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, mark in enumerate((*MARKS, BOS, EOS))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v32"])
@pytest.mark.parametrize("talk", TALKS, ids=len)
def test_without_a_template_it_is_chatted_with_in_deepseeks_format(tmp_path: Path, talk: Any, kind: str) -> None:
    deepseek_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, {"model_type": kind}, "it")
    messages = [{"role": role, "content": content} for role, content in talk]
    # mlx-lm has DeepSeek's own program for V3.2, which V4's equals without tools.
    wanted = deepseek_v32.apply_chat_template(messages, add_generation_prompt=True)
    rendered = tokenizer.render([Message(role, content) for role, content in talk])
    assert rendered == wanted
    assert tokenizer.opens_thinking(rendered)
    template = template_of({"model_type": kind})
    assert template is not None
    off = ChatTemplate(template, {"bos_token": BOS, "thinking": False}).render(messages, reply=True)
    assert off == deepseek_v32.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)


def test_deepseek_v32_is_given_tools_and_results_as_its_own_program_writes_them(tmp_path: Path) -> None:
    deepseek_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, {"model_type": "deepseek_v32"}, "it")
    tool, call = ToolSpec("add", "Adds.", {"type": "object"}), ToolCall("add", '{"a": 1, "b": "c", "d": [2]}', "1")
    talk = [Message("system", "Be brief."), Message("user", "Add."), Message("assistant", "", "Hm.", (call, replace(call, id="2"))),
            Message("tool", "3", tool_call_id="1"), Message("tool", "4", tool_call_id="2")]  # fmt: skip
    function = {"function": {"name": call.name, "arguments": call.arguments}}
    messages: list[dict[str, Any]] = [{"role": each.role, "content": each.content} for each in talk]
    messages[2] |= {"reasoning_content": "Hm.", "tool_calls": [function, function]}
    model = tokenizer.using(TemplateOptions(tools=(tool,)))
    assert model.render(talk) == deepseek_v32.apply_chat_template(
        messages, tools=[tool.as_dict], add_generation_prompt=True
    )
    more = [*talk, Message("assistant", "Seven.", "Well."), Message("user", "Thanks.")]
    messages += [
        {"role": "assistant", "content": "Seven.", "reasoning_content": "Well."},
        {"role": "user", "content": "Thanks."},
    ]
    assert model.render(more) == deepseek_v32.apply_chat_template(
        messages, tools=[tool.as_dict], add_generation_prompt=True
    )


def test_deepseek_v4_is_given_tools_and_results_as_turns_of_the_user(tmp_path: Path) -> None:
    deepseek_tokenizer(tmp_path)
    made = load_tokenizer(tmp_path, {"model_type": "deepseek_v4"}, "it")
    model = made.using(TemplateOptions(tools=(ToolSpec("look"),)))
    calls = tuple(ToolCall("look", arguments, id) for id, arguments in (("a", '{"at": "x"}'), ("b", '{"n": 2}')))
    results = [Message("tool", text, tool_call_id=id) for id, text in (("a", "1"), ("b", "2"))]
    talk = [Message("user", "q"), Message("assistant", "So.", "Hm.", calls), *results]
    said = model.render(talk)
    assert said.endswith("<｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result><｜Assistant｜><think>")
    called = said[said.index("<think>Hm.</think>So.\n\n") :].partition("So.")[2].partition("<｜end▁of▁sentence｜>")[0]
    reader = model.call_reader(0)
    assert reader.dialect.name == "deepseek_v4"
    found = reader.read(called.strip().removeprefix(reader.dialect.start))
    assert [(each.name, each.values) for each in found] == [(each.name, each.values) for each in calls]
    assert "<tool_result>2</tool_result>\n\nAnd?<｜Assistant｜>" in model.render([*talk, Message("user", "And?")])


def test_a_reply_is_gone_on_with_in_its_thoughts_or_after_them(tmp_path: Path) -> None:
    deepseek_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, {"model_type": "deepseek_v4"}, "it")
    user, assistant, begins, ends = MARKS
    said = [Message("user", "why?"), Message("assistant", "so it is", thinking="hm")]
    assert tokenizer.render_cut(said, "answer") == f"{BOS}{user}why?{assistant}{begins}hm{ends}so it is"
    assert tokenizer.render_cut([said[0], Message("assistant", "", thinking="hm")], "thinking").endswith(f"{begins}hm")


def test_a_template_of_its_own_goes_before_ours_and_other_models_get_none(tmp_path: Path) -> None:
    deepseek_tokenizer(tmp_path, chat_template="{{ messages[0].content }}!")
    assert load_tokenizer(tmp_path, {"model_type": "deepseek_v4"}, "it").render([Message("user", "hi")]) == "hi!"
    deepseek_tokenizer(tmp_path)
    assert not load_tokenizer(tmp_path, {"model_type": "llama"}, "it").has_chat_template


# Caches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    build(CASE, folder)
    return build_model(folder, read_config(folder))[0]


def rows(model: Any, caches: list[Any], tokens: list[int]) -> Any:
    return np.array(log_probabilities(model, caches, tokens))


@pytest.mark.parametrize("seed", walked(range(8), range(3)))
def test_tokens_that_are_taken_back_and_read_again_leave_no_trace(model: Any, seed: int) -> None:
    tokens, expected = golden(CASE)
    rng, caches, held = np.random.default_rng(seed), model.make_cache(), 0
    while held < len(tokens):
        count = min(int(rng.choice([1, 1, 2, 5, 9, 40])), len(tokens) - held)
        found = rows(model, caches, tokens[held : held + count])
        assert np.abs(found - expected[held : held + count]).max() < 1e-4
        held += count
        if held < len(tokens) and rng.random() < 0.5:
            back = int(rng.integers(0, rewindable(caches) + 1))
            assert trim(caches, back) == back
            held -= back
            assert offset(caches) == held


def test_as_many_tokens_as_are_spare_can_be_taken_back_and_no_more(model: Any) -> None:
    tokens, expected = golden(CASE)
    for count in (10, SPARE, SPARE + 1, 130, len(tokens)):
        caches = model.make_cache()
        rows(model, caches, tokens[:count])
        assert rewindable(caches) >= min(count, SPARE)
        assert trim(caches, rewindable(caches) + 1) == 0
        assert trim(caches, min(count, SPARE)) == min(count, SPARE)
        again = rows(model, caches, tokens[offset(caches) or 0 : count])
        assert np.abs(again - expected[count - len(again) : count]).max() < 1e-4


def test_a_frozen_state_is_gone_back_to_while_the_caches_go_on(model: Any) -> None:
    tokens, expected = golden(CASE)
    caches = model.make_cache()
    rows(model, caches, tokens[:70])
    frozen = freeze(caches)
    for other in (tokens[70:], [9, 8, 7] * 30, tokens[70:]):
        found = rows(model, caches, other)
        if other == tokens[70:]:
            assert np.abs(found - expected[70:]).max() < 1e-4
        thaw(caches, frozen)
        assert offset(caches) == 70


def test_what_is_cut_off_a_long_prompt_does_not_keep_its_memory(model: Any) -> None:
    caches = model.make_cache()
    model(mx.array([[7] * 200]), cache=caches)
    mx.eval([cache.state for cache in caches])
    held = [cache.recent.shape[1] for cache in caches]
    assert held == [24 - 1 + SPARE] * 4
    assert all(cache.nbytes < 200 * 1024 for cache in caches)


def test_a_conversation_goes_on_from_a_cache_in_memory_or_on_disk_as_if_it_were_new(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    build(CASE, folder)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "max_position_embeddings": 2048})
    )
    first = [(7 * number + number // 9) % 120 + 5 for number in range(400)]
    # Goes on, takes a few tokens back, and takes back more than can be: to where the first prompt ended.
    then = ([*first, 9, 9, 8], [*first[:-20], 6, 6, 5], [*first, 7, 6, 5], first)
    stored = PromptCacheSpec(folder=tmp_path / "cache")
    greedy = Sampling(temperature=0.0, max_tokens=8)
    with Engine.load(folder, prompt_cache=None) as engine:
        cold = [said(engine, prompt, greedy).text for prompt in then]
    with Engine.load(folder, prompt_cache=stored) as engine:
        said(engine, first, greedy)
        warm = [said(engine, prompt, greedy) for prompt in then]
    assert [each.text for each in warm] == cold
    assert all(each.metrics.cached_tokens > 300 for each in warm)
    with Engine.load(folder, prompt_cache=stored) as engine:
        again = said(engine, then[0], greedy)
    assert again.text == cold[0]
    assert again.metrics.cached_tokens > 300


def said(engine: Engine, prompt: list[int], sampling: Sampling) -> Finished:
    *_, end = engine.generate(prompt, sampling)
    assert isinstance(end, Finished)
    return end


# Costs


@pytest.mark.parametrize("held", [0, 3, 100, 5000])
@pytest.mark.parametrize(("every", "most"), [(4, 512), (4, 6), (128, None)])
def test_pairs_of_queries_and_entries_are_counted(held: int, every: int, most: int | None) -> None:
    counted = sum(min(token // every, most or token) for token in range(held + 1, held + 301))
    assert Attention(3, most, every=every).operations(300, held) == 2 * 3 * counted


def published_config(name: str, layers: int | None = None) -> dict[str, Any]:
    configs = json.loads((Path(__file__).parent / "model" / "published_configs.json").read_text())
    config = configs[name]
    if layers is not None:
        period = config["compress_ratios"][2:4]
        config = {
            **config,
            "num_hidden_layers": layers,
            "compress_ratios": [*config["compress_ratios"][:2], *period * layers],
        }
    return normalise(config)


@pytest.mark.parametrize(
    ("name", "layers", "billions", "active"),
    [
        # What DeepSeek says of them: 284B weights, 13B a token; 1.6T and 49B.
        ("deepseek-ai/DeepSeek-V4-Flash.maxtext", 43, 284, 13),
        ("nvidia/DeepSeek-V4-Pro-NVFP4", 61, 1573, 49),
    ],
)
def test_published_models_have_as_many_weights_as_said(name: str, layers: int, billions: int, active: int) -> None:
    cost = cost_of_config(published_config(name, layers))
    assert not isinstance(cost, str)
    assert (round(cost.parameters / 1e9), round(cost.active_parameters / 1e9)) == (billions, active)
    assert 4.25 < cost.bits_per_weight < 4.7


def test_keys_and_values_cost_by_the_entry_and_a_step_reads_what_is_chosen() -> None:
    config = published_config("deepseek-ai/DeepSeek-V4-Flash.maxtext")
    table = kv_table(config, KVSpec(), 1 << 20, value_bytes=2)
    assert not isinstance(table, str)
    assert [row.kind for row in table.rows] == ["window", "compressed", "compressed"]
    # An entry of 512 numbers and a key of 128 for every 4 tokens; an entry for every 128.
    assert [row.bytes_per_token for row in table.rows] == [0, 3 * 2 * (512 + 128) // 4, 3 * 2 * 512 // 128]
    work = work_of_config(config)
    assert not isinstance(work, str)
    grown = work.kv_bytes(1 << 20) - work.kv_bytes(1 << 19)
    assert grown == (1 << 19) * 3 * (2 * 128 // 4 + 2 * 512 // 128)
    more = (work.prefill_operations(1, 1 << 20) or 0) - (work.prefill_operations(1, 1 << 19) or 0)
    # Of far tokens, the keys that choose grow, and the heavily compressed entries, key and value at once.
    assert abs(more - 3 * (1 << 19) * (2 * 64 * 128 // 4 + 2 * 2 * 64 * 512 // 128)) < 1e-3 * more


def test_what_the_caches_hold_is_what_was_planned(model: Any) -> None:
    config = normalise(json.loads((GOLDEN / CASE / "config.json").read_text()))
    plan = plan_caches(model, config, KVSpec())
    caches = model.make_cache()
    rows(model, caches, [7] * 250)
    used = [cache.nbytes - sum(_unused(cache, entries) for entries in cache.entries) for cache in caches]
    for layer, held in zip(plan.layers, used, strict=True):
        assert held <= layer.bytes_at(250) <= 1.6 * held, layer


def _unused(cache: Any, entries: Any) -> int:
    """Return the bytes of room to grow; nothing where there is no entry yet."""
    return 0 if entries is None else entries[:, cache.groups :].nbytes


def test_headers_of_published_words_count_what_they_stand_for(tmp_path: Path) -> None:
    for experts in ("fp4", "fp8", "nvfp4"):
        folder = tmp_path / experts
        folder.mkdir()
        packed, _ = packed_folders(folder, experts)
        config = read_config(packed)
        cost, said = cost_of_folder(packed, config), cost_of_config(config)
        assert not isinstance(said, str)
        assert cost.parameters == said.parameters
        assert {part: each.parameters for part, each in cost.parts.items()} == {
            part: each.parameters for part, each in said.parts.items()
        }


def test_a_conversion_keeps_the_compressors_finer_and_runs(tmp_path: Path) -> None:
    packed, _ = packed_folders(tmp_path, "fp4")
    report = convert(packed, tmp_path / "out", bits=4, group_size=32, method="search", dtype="bfloat16")
    assert report.quality is not None  # measured layer by layer, streamed
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert written["bits"] == 4
    floats = set(FLOAT32.findall(" ".join(kinds(tmp_path / "out", "F32"))))
    assert floats == {"hc", "hc_head", "sinks", "position_bias", "e_score_correction_bias"}
    with Engine.load(tmp_path / "out") as engine:
        found = np.array(engine.logprobs(TOKENS))
        assert said(engine, TOKENS, Sampling(temperature=0.0, max_tokens=4)).metrics.generated_tokens == 4
    off = np.abs(found - answer(packed, TOKENS)).mean()
    assert off < 1.0  # a model of noise


FLOAT32 = re.compile(r"hc_head|hc(?=\.)|sinks|position_bias|e_score_correction_bias")


def kinds(folder: Path, kind: str) -> list[str]:
    """Return the names of a folder's tensors of one type."""
    return [
        name for shard in find_shards(folder) for name, entry in read_header(shard).items() if entry["dtype"] == kind
    ]

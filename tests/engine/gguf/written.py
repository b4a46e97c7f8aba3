"""GGUF files as llama.cpp's converter writes them, from a golden case: names by the `gguf` package's table, not by ours."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from tests.engine.kv.models import built
from tests.families import GOLDEN
from tests.golden.weights import tensor, write_weights

Array = np.ndarray[Any, np.dtype[Any]]
Kind = GGMLQuantizationType
F32 = Kind.F32
# Where a block has its float16 numbers, from its start or its end; any other bytes are valid codes.
SCALES = {
    **dict.fromkeys((Kind.Q4_K, Kind.Q5_K), (0, 2)),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS), (0,)),
    **dict.fromkeys((Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S), (0,)),
    **dict.fromkeys((Kind.Q6_K, Kind.Q3_K), (-2,)),
    Kind.Q2_K: (-4, -2),
}
ARCHITECTURES = {name: number for number, name in MODEL_ARCH_NAMES.items()}
# Whose rotation works on neighbours, unlike the original's.
INTERLEAVED = {"llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3"}
ADDED_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
STATE_SPACE = {"falcon-h1", "nemotron_h_moe"}
EXPERT = re.compile(
    r"(.*)\.(?:block_sparse_moe|mlp|mixer|feed_forward)\.experts\.(\d+)\.(w\d|gate_proj|up_proj|down_proj)\.weight"
)
# config.json's key: GGUF's, as far as all architectures share them
SHARED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts_per_tok": "expert_used_count",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SCALING = {"factor": "rope.scaling.factor", "original_max_position_embeddings": "rope.scaling.original_context_length"}


def packed(kind: Kind, values: Array) -> Array:
    """Return what the package's quantizer makes of values (…, n); random valid blocks of types that it has none for."""
    noise = np.random.default_rng(int(kind))
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = noise.integers(0, 256, (values.size // block, nbytes), np.uint8)
    numbers = np.abs(noise.normal(0.01, 0.004, len(blocks))).astype(np.float16)
    for at in SCALES.get(kind, ()):
        blocks[:, at % nbytes : at % nbytes + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if kind == Kind.NVFP4:
        blocks[:, :4] &= 0x7F  # its scales have no sign
    if kind == Kind.IQ1_M:  # its scale is in the upper nibbles of four words
        words = blocks[:, -8:].copy().view(np.uint16)
        words = words & 0x0FFF | (numbers.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
        blocks[:, -8:] = words.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def case_of(row: Mapping[str, Any]) -> tuple[dict[str, Any], int, dict[str, tuple[int, ...]]]:
    """Return config, changed to what a GGUF file can say, seed and shapes: a golden case's, or those of mlx-lm's class."""
    if "stored" in row:
        return row["stored"]  # type: ignore[no-any-return]
    folder, changes = GOLDEN / row["case"], row.get("config", {})
    if not folder.exists():
        module, config = built(row["case"], **changes)
        return config, 3, {name: array.shape for name, array in tree_flatten(module.parameters())}
    config, stored = (json.loads((folder / name).read_text()) for name in ("config.json", "case.json"))
    for name, value in changes.items():
        if isinstance(value, dict):
            config[name] |= value
        else:
            config[name] = value
    return config, stored["seed"], stored["shapes"]


def build(row: Mapping[str, Any], folder: Path) -> None:
    config, seed, shapes = case_of(row)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, seed, shapes, config)


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_array)(key, value)


def write(path: Path, row: Mapping[str, Any], kind: GGMLQuantizationType = F32, *, unpacked: bool = False) -> None:
    """Write the case with the keys of ``row``, its matrices packed; ``unpacked``: as the float32 that these stand for."""
    config, seed, shapes = case_of(row)
    weights = {name: tensor(seed, name, tuple(shape), config) for name, shape in shapes.items()}
    config = config.get("text_config", config)
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    writer = GGUFWriter(path, row["architecture"])
    for key, value in {"block_count": layers, **_keys(config), **row.get("keys", {})}.items():
        add_key(writer, f"{row['architecture']}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = row.get("vocabulary") or {"tokens": ["a", "b", "ab"], "merges": ["a b"]}
    writer.add_token_list(
        [*words["tokens"], *(f"t{index}" for index in range(len(words["tokens"]), config["vocab_size"]))]
    )
    writer.add_token_merges(words["merges"])
    if "template" in words:
        writer.add_token_types(words["types"])
        writer.add_eos_token_id(words["eos"])
        writer.add_chat_template(words["template"])
    names = get_tensor_name_map(ARCHITECTURES[row["architecture"]], layers)
    for name, values in _changed(row["architecture"], config, weights):
        known = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        values = np.atleast_1d(values.squeeze())
        if row["architecture"] in STATE_SPACE and "ssm_" in known and values.ndim == 1 and "bias" not in known:
            values = values.reshape(-1, 1)  # A, D, and norms by groups
        values = np.ascontiguousarray(values)
        if values.ndim == 1 or values.shape[-1] % GGML_QUANT_SIZES[kind][0] or kind == F32 or "ffn_gate_inp" in known:
            writer.add_tensor(known, values)
        elif unpacked:
            writer.add_tensor(known, dequantize(packed(kind, values), kind))
        else:
            writer.add_tensor(known, packed(kind, values), raw_dtype=kind)
    for name, values in _factors(config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.get("rope_parameters") or {"rope_theta": 1e4, "rope_type": "default"}
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    keys = {key: config[name] for name, key in SHARED.items() if config.get(name) is not None}
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn", "longrope"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys |= {key: rope[name] for name, key in SCALING.items() if name in rope}
    return keys


def _changed(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    experts: dict[str, list[Array]] = {}
    named = {re.sub(r"(language_model|text_model)\.", "", name, count=1): values for name, values in weights.items()}
    for name, values in sorted(named.items(), key=_by_number):
        if (found := re.fullmatch(r"model\.(altup\w+)\.\d\.weight", name)) is not None:
            experts.setdefault(f"model.{found[1]}.weight", []).append(values)
        elif "linear_attn." in name:
            yield from _linear(architecture, config, name, values)
        elif found := EXPERT.fullmatch(name):
            part = "feed_forward" if found[3][0] == "w" else "mlp"
            stem = f"{found[1].replace('backbone', 'model')}.{part}.experts.{found[3]}.weight"
            experts.setdefault(stem.removeprefix("model.") if part == "feed_forward" else stem, []).append(values)
        elif found := re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.input_linear\.weight", name):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"blk.{found[1]}.ffn_{part}_exps.weight", half
        elif architecture == "gpt-oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, values)
        elif name.endswith("kv_b_proj.weight") and config["model_type"] == "deepseek_v3":
            both = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            yield name.replace("kv_b", "k_b"), both[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), both[:, config["qk_nope_head_dim"] :]
        else:
            yield _plain(architecture, config, name, values)
    for stem, each in experts.items():
        yield stem, np.stack(each)


def _by_number(named: tuple[str, Array]) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", named[0])]


def _plain(architecture: str, config: Mapping[str, Any], name: str, values: Array) -> tuple[str, Array]:
    part = re.search(r"\.([qk])_proj\.", name)
    if architecture in INTERLEAVED and part:
        heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if architecture in ADDED_ONE and name.endswith("norm.weight"):
        values = values + 1
    if architecture == "falcon-h1":
        values = (values * _multiplier(config, name, len(values))).astype(np.float32)
    if name.endswith("A_log"):
        values = -np.exp(values)
    for theirs, ours in RENAMED:
        name = theirs.sub(ours, name)
    return name, values


RENAMED = [
    (re.compile("sinks$"), "sinks.weight"),
    (re.compile("e_score_correction_bias"), "e_score_correction.bias"),
    (re.compile("dt_bias"), "dt_proj.bias"),
    (re.compile("(layer_scalar|_scale|experts.*_proj)$"), r"\1.weight"),
    (re.compile(r"model\.layers\.(\d+)\.router\.scale(\.weight)?"), r"blk.\1.ffn_gate_inp.scale"),
    (re.compile(r"model\.layers\.(\d+)\.router\.per_expert_scale.weight"), r"blk.\1.ffn_down_exps.scale"),
]


def _linear(architecture: str, config: Mapping[str, Any], name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Qwen's linear attention: heads of values by turns of their head of keys, or matrices of one kind of heads each."""
    keys, key, value = (config[f"linear_{part}"] for part in ("num_key_heads", "key_head_dim", "value_head_dim"))
    each = config["linear_num_value_heads"] // keys
    if "in_proj_qkvz" in name:
        parts = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum([key, key, each * value]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name.replace("qkvz", "z"), z
        return
    if architecture != "qwen3next" and not name.endswith(".norm.weight"):
        begin = 2 * keys * key if "qkv" in name or "conv1d" in name else 0
        heads = values.T if "out_proj" in name else values
        tiled = heads[begin:].reshape(keys, each, -1, *heads.shape[1:]).swapaxes(0, 1).reshape(heads[begin:].shape)
        heads = np.concatenate([heads[:begin], tiled])
        values = heads.T if "out_proj" in name else heads
    yield _plain("", config, name, values)


def _multiplier(config: Mapping[str, Any], name: str, rows: int) -> Any:
    """What Falcon H1's converter multiplies a weight by."""
    wide, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    each = np.repeat(config["ssm_multipliers"], [wide, wide, state, state, max(rows - 2 * wide - 2 * state, 0)])
    into, gates = config["attention_in_multiplier"], config["mlp_multipliers"]
    by_part = {
        "down_proj": gates[1], "gate_proj": gates[0], "k_proj": config["key_multiplier"] * into, "q_proj": into,
        "v_proj": into, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * each[:rows, None], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return by_part.get(name.split(".")[-2], np.float32(1)) if name.endswith("weight") else np.float32(1)


def _gpt_oss_experts(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    values = values if bias else values.swapaxes(1, 2)  # (experts, out, in)
    kind = "bias" if bias else "weight"
    if "gate_up" in stem:
        yield f"{stem.replace('gate_up', 'gate')}.{kind}", values[:, ::2]
        yield f"{stem.replace('gate_up', 'up')}.{kind}", values[:, 1::2]
    else:
        yield f"{stem}.{kind}", values


def _factors(config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    rope, width = _rope(config), config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)
    if rope["rope_type"] == "proportional":
        half = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"] // 2
        turning = int(half * rope["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), np.float32)
    if rope["rope_type"] == "llama3":
        factors, length = [], rope["original_max_position_embeddings"]
        for index in range(0, width, 2):
            wave = 2 * math.pi * rope["rope_theta"] ** (index / width)
            smooth = (length / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            smooth = min(max(smooth, 0), 1)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        yield "rope_freqs.weight", np.array(factors, np.float32)

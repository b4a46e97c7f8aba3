"""DeepSeek V4: as it is published, packed in fp8 and fp4, its caches taken back and kept, and what it costs.

That it computes what transformers does is held by its golden values (test_golden.py).
"""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.engine.test_golden import GOLDEN, build, golden
from tests.golden.weights import tensor
from tests.quant.packed_models import write_source
from tokamac.engine import Engine
from tokamac.engine.config import model_classes, normalise, read_config
from tokamac.engine.errors import ModelError
from tokamac.engine.kv_trial import log_probabilities
from tokamac.engine.model import build_model
from tokamac.quant import convert

CASE = "deepseek_v4_published"
SIZES = {"head_dim": 64, "moe_intermediate_size": 64, "hidden_size": 96, "vocab_size": 128}
"""Sizes that fill more than one fp8 tile of 128 and whole fp4 groups of 32."""
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
    return write_source(folder, stored, config, types=types), write_source(folder / "floats", meant, config_of())


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

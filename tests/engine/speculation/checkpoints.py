"""Tiny checkpoints with heads for further tokens, under the names that published ones have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.engine.helpers import CONFIG, write_model, write_tokenizer
from tests.engine.kv.models import BASE, ROWS, seeded
from tokamac.engine.model.config import model_classes, normalise
from tokamac.engine.model.weights import MEDUSA_FILE

Weights = dict[str, mx.array]

WORDS = CONFIG["vocab_size"]
FAMILIES = (
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NESTED = ("qwen3_5", "qwen3_5_moe")
# What ends each block of a layer: at zero, a model's next token depends on the last one alone.
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight")

OTHER_CLASSES = ("norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
# Keys that these classes have no use for.
OTHER_ROUTERS = (
    "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "n_routed_experts", "norm_topk_prob",
)  # fmt: skip

_FUSED = {
    False: {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    True: {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
}


def write_mtp(folder: Path, family: str, *, knowing: bool = False, seed: int = 3) -> Path:
    """Write a model with one layer for further tokens, and return the folder.

    knowing: its next token is a function of the last one, and the head knows that function; else all is at random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, made, fused = mtp_parts(family, knowing=knowing, seed=seed)
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"] - 1
    weights = dict(tree_flatten(made.parameters()))
    prefix = next(name for name in weights if ".layers.0." in name).partition("layers.0.")[0]
    head = {
        name.removeprefix(f"{prefix}layers.{layers}."): array
        for name, array in weights.items()
        if f"layers.{layers}." in name
    }
    weights = {name: array for name, array in weights.items() if f"layers.{layers}." not in name}
    place = "mtp." if family in QWEN else f"model.layers.{layers}."
    layer = f"{place}layers.0." if family in QWEN else place
    written = {f"{layer}{name}": array for name, array in _published(head, text).items()}
    weights = _one_by_one(weights)
    for part, array in fused.items():
        written[f"{place}{_FUSED[family in QWEN][part]}.weight"] = array
    if family in QWEN:
        weights, written = _less_one(weights), _less_one(written)
    else:
        written[f"{place}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        written[f"{place}shared_head.head.weight"] = weights["lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights | written, {"format": "pt"})
    text["num_hidden_layers"] = layers
    text["mtp_num_hidden_layers" if family in QWEN else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def mtp_parts(family: str, *, knowing: bool = False, seed: int = 3) -> tuple[dict[str, Any], Any, Weights]:
    """Return what ``write_mtp`` writes: the config and the model with that layer as its last one, and what fuses its input."""
    config = _config(family)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 4 if family in QWEN else 3
    make, arguments = model_classes(normalise(config))
    made = seeded(make(arguments.from_dict(normalise(config))), seed)
    if knowing:
        _silence(made)
    fused = _fused(text["hidden_size"], knowing=knowing, seed=seed)
    if knowing:
        (fused["norm"],) = (
            array for name, array in tree_flatten(made.parameters()) if name.endswith("model.norm.weight")
        )
    return config, made, fused


def write_medusa(folder: Path, *, heads: int = 3, knowing: bool = False, **changes: Any) -> Path:
    """Write a llama with Medusa heads beside it, and return the folder. knowing: as of ``write_mtp``."""
    width = 288 if knowing else changes.get("hidden_size", CONFIG["hidden_size"])
    shape = {"hidden_size": width, "num_attention_heads": 9, "num_key_value_heads": 3} if knowing else {}
    write_model(folder, tie_word_embeddings=False, medusa_num_heads=heads, medusa_num_layers=1, **shape, **changes)
    mx.random.seed(5)
    tensors: Weights = {}
    if knowing:
        weights: Weights = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
        weights = {name: mx.zeros_like(array) if name.endswith(SILENT) else array for name, array in weights.items()}
        weights["model.embed_tokens.weight"] = mx.eye(WORDS, width)
        weights["lm_head.weight"] = _knows(1, width)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for head in range(heads):
        block, matrix = mx.random.normal((width, width)) * 0.1, mx.random.normal((WORDS, width))
        tensors[f"{head}.0.linear.weight"] = mx.zeros_like(block) if knowing else block
        tensors[f"{head}.0.linear.bias"] = mx.zeros(width)
        tensors[f"{head}.1.weight"] = _knows(head + 2, width) if knowing else matrix
    mx.save_safetensors(str(folder / MEDUSA_FILE), tensors)
    return folder


def follows(token: int, steps: int = 1) -> int:
    """Return the token that a knowing model writes so many steps after one: a walk over all that are no special ones."""
    return 7 + (token - 7 + 59 * steps) % (WORDS - 7) if token >= 7 else 7 + (token + 59 * (steps - 1)) % (WORDS - 7)


def _knows(steps: int, width: int) -> mx.array:
    rows = mx.zeros((WORDS, width))
    for token in range(WORDS):
        rows[follows(token, steps), token] = 20.0
    return rows


def _config(family: str) -> dict[str, Any]:
    others = (*OTHER_CLASSES, *(OTHER_ROUTERS if family in QWEN else ()))
    given = {key: value for key, value in BASE.items() if key not in others}
    row = {**given, **ROWS[family], "vocab_size": WORDS, "tie_word_embeddings": False, "eos_token_id": 1}
    if family not in NESTED:
        return {**row, "model_type": family}
    nested = {**row, "model_type": f"{family}_text"}
    return {"model_type": family, "vocab_size": WORDS, "eos_token_id": 1, "text_config": nested}


def _silence(model: Any) -> None:
    """Make the next token a function of the last: every block adds nothing to what was embedded."""
    quiet = [(name, mx.zeros_like(array)) for name, array in tree_flatten(model.parameters()) if name.endswith(SILENT)]
    model.load_weights(quiet, strict=False)


def _fused(width: int, *, knowing: bool, seed: int) -> Weights:
    """Return what fuses a token and a hidden state; where it knows, the token passes as the model's own layers pass it."""
    mx.random.seed(seed + 1)
    ones = {name: mx.ones(width) for name in ("enorm", "hnorm", "norm")}
    if knowing:
        return ones | {"eh_proj": mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)}
    return ones | {"eh_proj": mx.random.normal((width, 2 * width)) / width**0.5}


def _published(layer: Weights, text: dict[str, Any]) -> Weights:
    """Return a layer's weights as they are published: experts one by one, and latent attention's matrix whole."""
    written: Weights = {}
    for name, array in _one_by_one(layer).items():
        if name == "self_attn.embed_q.weight":
            keys, values = array.swapaxes(-1, -2), layer["self_attn.unembed_out.weight"]
            written["self_attn.kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).reshape(
                -1, text["kv_lora_rank"]
            )
        elif name != "self_attn.unembed_out.weight":
            written[name] = array
    return written


def _one_by_one(weights: Weights) -> Weights:
    """Return weights with each expert's apart."""
    written: Weights = {}
    for name, array in weights.items():
        if ".switch_mlp." not in name:
            written[name] = array
            continue
        for index in range(array.shape[0]):
            written[name.replace(".switch_mlp.", f".experts.{index}.")] = array[index]
    return written


def _less_one(weights: Weights) -> Weights:
    """Return weights as Qwen publishes them: norms less one, and convolutions in torch's order."""
    turned: dict[str, Callable[[mx.array], mx.array]] = {
        **dict.fromkeys(("layernorm.weight", "q_norm.weight", "k_norm.weight"), lambda array: array - 1.0),
        **dict.fromkeys(
            ("model.norm.weight", "pre_fc_norm_embedding.weight", "mtp.norm.weight"), lambda array: array - 1.0
        ),
        "pre_fc_norm_hidden.weight": lambda array: array - 1.0,
        "conv1d.weight": lambda array: array.moveaxis(2, 1),
    }
    return {
        name: next((turn(array) for end, turn in turned.items() if name.endswith(end)), array)
        for name, array in weights.items()
    }

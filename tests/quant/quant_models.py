"""Tiny seeded models for the conversion tests."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 10000.0},
    "gemma3": {
        **BASE, "model_type": "gemma3_text", "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window_pattern": 2,
        "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "mixtral": {
        **BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
GRANITE = {
    **BASE, "model_type": "granite", "tie_word_embeddings": True, "rope_theta": 10000.0, "logits_scaling": 1.0,
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip


def build(kind, **changes):
    """Return a bfloat16 model with seeded weights, and its config."""
    config = {**({**CONFIGS, "granite": GRANITE}[kind]), **changes}
    model_class, arguments_class = _get_classes(config)
    mx.random.seed(3)
    model = model_class(arguments_class.from_dict(config))
    if kind == "gemma3":  # tied, as its published checkpoints are: that is what a missing head means to mlx-lm
        model.sanitize({})
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model, config


def make_source(folder, kind, *, shards=1, tokenizer=True, **changes):
    """Write a source folder and return it."""
    source = Path(folder) / "source"
    source.mkdir()
    model, config = build(kind, **changes)
    arrays = tree_flatten(model.parameters())
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    where = {}
    for i, name in enumerate(names):
        part = dict(arrays[i::shards])
        mx.save_safetensors(str(source / name), part)
        where.update(dict.fromkeys(part, name))
    if shards > 1:
        (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (source / "config.json").write_text(json.dumps(config))
    if tokenizer:
        for file in (GOLDEN / "tokenizer").iterdir():
            shutil.copy(file, source)
    return source


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}

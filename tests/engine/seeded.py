"""A seeded llama folder made with MLX: packed if wanted, a tokenizer whose every token is a byte, thinking marks if wanted."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 272,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(thinking: bool = False, marks: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer whose every token is a byte, so that any text splits inside its characters. marks: more special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = (SPECIAL if thinking else SPECIAL[:5]) + marks
    vocabulary = {text: i for i, text in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, thinking: bool = False, marks: tuple[str, ...] = ()
) -> None:
    byte_tokenizer(thinking, marks).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    *,
    bits: int | None = None,
    seed: int = 0,
    template: str | None = TEMPLATE,
    thinking: bool = False,
    **changes: Any,
) -> Path:
    """Write a seeded llama with these changes to its config; ``bits`` packs it in groups of 32. Return the folder."""
    from mlx_lm.models.llama import Model, ModelArgs

    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.2 if a.ndim > 1 else a, model.parameters()))
    if bits is not None:
        nn.quantize(model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, template=template, thinking=thinking)
    return folder

"""A tiny seeded model folder, written with NumPy and the standard library alone: whole, chattable, and it writes nonsense.

Llama, two layers, head size 64 so that every KV group size up to 64 fits; a token a byte, so any text goes in and out.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, INNER, LAYERS = 128, 2, 256, 2
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny(folder: Path, *, seed: int = 0, context: int = 512, head_size: int = 64, never_ends: bool = True) -> Path:
    """Write the model into ``folder`` and return it. ``never_ends``: it never says its end token, so lengths are exact."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    }
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", {"eos_token_id": 256})
    _tokenizer(folder)
    _weights(folder / "model.safetensors", seed, HEADS * head_size, never_ends=never_ends)
    return folder


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _tokenizer(folder: Path) -> None:
    vocabulary = {char: index for index, char in enumerate(_alphabet())}
    added = [
        {
            "id": 256 + i,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, text in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "ignore_merges": False, "byte_fallback": False}
    empty = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    parts = {"version": "1.0", **empty, "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    _json(folder / "tokenizer.json", parts)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    _json(folder / "tokenizer_config.json", {**named, "clean_up_tokenization_spaces": False})


def _weights(path: Path, seed: int, width: int, *, never_ends: bool) -> None:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN) * 8,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = normal(width, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, width)
        tensors[f"{prefix}mlp.gate_proj.weight"] = normal(INNER, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = normal(INNER, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    head = normal(VOCABULARY, HIDDEN) * 4
    if never_ends:
        head[256:] = 0  # special tokens get a logit of 0, far below the likeliest letter's
    tensors["lm_head.weight"] = head
    write_safetensors(path, tensors)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays as a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(np.ascontiguousarray(array).tobytes() for array in tensors.values())

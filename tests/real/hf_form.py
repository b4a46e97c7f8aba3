"""A GGUF file as the Hugging Face folder that it was made of: bfloat16 weights, config, tokenizer, template.

It knows two architectures and two tokenizers, those of the models here, and refuses others by name.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
SPACE = "▁"
BLANK = f"{SPACE}\t\n"

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Gguf:
    """The keys of a file, by the names of its architecture."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        self.architecture: str = self["general.architecture"]
        if self.architecture not in NORMS:
            raise ValueError(f"{path}: the architecture {self.architecture} is not one of {', '.join(NORMS)}")

    def __getitem__(self, key: str) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            raise KeyError(key)
        return field.contents()

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def size(self, key: str, default: Any = None) -> Any:
        """Return ``llama.KEY``; a float as the shortest decimal that its 32 bits stand for."""
        value = self.get(f"{self.architecture}.{key}", default)
        return float(str(np.float32(value))) if isinstance(value, float) else value


def write_hf_form(path: Path, folder: Path) -> None:
    """Write the model of the GGUF file ``path`` into ``folder``, which exists and is empty."""
    gguf = Gguf(path)
    tensors = dict(_tensors(gguf))
    config = _config(gguf, tied="lm_head.weight" not in tensors)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", ends)
    _json(folder / "tokenizer.json", _tokenizer(gguf))
    _json(folder / "tokenizer_config.json", _tokenizer_config(gguf))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _tensors(gguf: Gguf) -> Iterator[tuple[str, mx.array]]:
    heads, kv_heads = gguf.size("attention.head_count"), gguf.size("attention.head_count_kv")
    for tensor in gguf.reader.tensors:
        name = _name(gguf.architecture, tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if gguf.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves(values, heads if "q_proj" in name else kv_heads)
        if gguf.architecture == "gemma3" and name.endswith("norm.weight"):
            values = values - 1  # llama.cpp's converter adds the 1 that Gemma's norm adds when it runs
        yield name, mx.array(values).astype(mx.bfloat16)


def _name(architecture: str, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{(NAMES | NORMS[architecture])[part]}.{kind}"


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order: it interleaves the two halves of a head that rotary embedding turns against each other."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _config(gguf: Gguf, *, tied: bool) -> dict[str, Any]:
    hidden, heads = gguf.size("embedding_length"), gguf.size("attention.head_count")
    config = {
        "hidden_size": hidden,
        "intermediate_size": gguf.size("feed_forward_length"),
        "num_hidden_layers": gguf.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.size("attention.head_count_kv"),
        "head_dim": gguf.size("attention.key_length", hidden // heads),
        "vocab_size": len(gguf["tokenizer.ggml.tokens"]),
        "max_position_embeddings": gguf.size("context_length"),
        "rms_norm_eps": gguf.size("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.size("rope.freq_base"),
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        if (token := gguf.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    if gguf.architecture == "llama":
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "mlp_bias": False,
        }
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": gguf.size("attention.sliding_window"),
        # Not in the file, and the same in every Gemma 3 but the 27B, whose scalar differs.
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": config["head_dim"],
    }


def _tokenizer(gguf: Gguf) -> dict[str, Any]:
    model, pre = gguf["tokenizer.ggml.model"], gguf.get("tokenizer.ggml.pre", "default")
    kinds = {("gpt2", "smollm"): _byte_level, ("llama", "default"): _sentence_pieces}
    if (model, pre) not in kinds:
        raise ValueError(f"a tokenizer of the kind {model} that splits text as {pre} is not known here")
    parts = kinds[model, pre](gguf)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(gguf), **parts}


def _added(gguf: Gguf) -> list[dict[str, Any]]:
    kinds = zip(gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"], strict=True)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        # Gemma's thousands of spare tokens are control tokens too, but text may name them.
        {"id": index, "content": token, **plain, "special": kind == CONTROL and not token.startswith("<unused")}
        for index, (token, kind) in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED) and token.strip()
    ]


def _byte_level(gguf: Gguf) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}  # each by itself, before GPT-2's pattern sees it
    vocabulary = {token: index for index, token in enumerate(gguf["tokenizer.ggml.tokens"])}
    merges = [merge.split(" ") for merge in gguf["tokenizer.ggml.merges"]]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False, "ignore_merges": False},
    }


def _sentence_pieces(gguf: Gguf) -> dict[str, Any]:
    tokens = [token.replace(" ", SPACE) for token in gguf["tokenizer.ggml.tokens"]]
    bos = {"SpecialToken": {"id": tokens[gguf["tokenizer.ggml.bos_token_id"]], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    name, token = bos["SpecialToken"]["id"], gguf["tokenizer.ggml.bos_token_id"]
    begins = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, bos, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }
    backward = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": begins if gguf.get("tokenizer.ggml.add_bos_token") else None,
        "decoder": {"type": "Sequence", "decoders": [backward, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(gguf, tokens),
            "unk_token": tokens[gguf["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }


def _merges(gguf: Gguf, tokens: list[str]) -> list[tuple[str, str]]:
    """Return every pair that makes a piece, the likeliest piece first, as SentencePiece joins them."""
    kinds, scores = gguf["tokenizer.ggml.token_type"], gguf["tokenizer.ggml.scores"]
    # Runs of spaces, tabs and line ends are found before anything is joined: so their pairs come first, the shortest run's first.
    runs = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and not token.strip(BLANK)]
    scored = sorted((-score, token) for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == NORMAL)
    pieces = [*sorted(runs, key=len), *(token for _, token in scored)]
    known = set(pieces)
    pairs = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    return [pair for pair in pairs if known.issuperset(pair)]


def _tokenizer_config(gguf: Gguf) -> dict[str, Any]:
    tokens = gguf["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {
        f"{name}_token": tokens[token]
        for name, key in named.items()
        if (token := gguf.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    if (template := gguf.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    # The class's own reader would build another tokenizer than the one in tokenizer.json.
    return config | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.size("context_length"),
    }

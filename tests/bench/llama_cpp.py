"""llama.cpp as a peer: a llama of a model's shapes in Q4_0 (4.5 bits a weight, as 4-bit groups of 64 take), random numbers in it.

It is driven by its own C interface, and chooses the likeliest token: no sampler, no text, no other thread. So what is compared with
it, the engine as a program meets it, does more.
"""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.plan import Timing
from tokamac.engine.device import usable_cores

CONTEXT, BATCH = 1024, 512


def can_be_measured() -> bool:
    """Whether ``make peers`` was run."""
    return all(find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def write_gguf(file: Path, config: dict[str, Any]) -> None:
    """Write a llama of the shapes in an MLX model's config."""
    import gguf
    import numpy as np

    packing = gguf.GGMLQuantizationType.Q4_0
    dims, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    kv_heads, size = config.get("num_key_value_heads") or heads, config.get("head_dim") or dims // heads
    made = gguf.GGUFWriter(file, "llama")
    made.add_context_length(CONTEXT)
    made.add_embedding_length(dims)
    made.add_block_count(layers)
    made.add_feed_forward_length(inner)
    made.add_head_count(heads)
    made.add_head_count_kv(kv_heads)
    made.add_key_length(size)
    made.add_value_length(size)
    made.add_rope_dimension_count(size)
    made.add_layer_norm_rms_eps(1e-5)
    made.add_vocab_size(vocabulary)
    made.add_tokenizer_model("llama")
    made.add_token_list(["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(3, vocabulary))])
    made.add_token_scores([0.0] * vocabulary)
    made.add_token_types([2, 3, 3, *[1] * (vocabulary - 3)])
    random = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        weights = (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        made.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, packing), raw_dtype=packing)

    add("token_embd", vocabulary, dims)
    made.add_tensor("output_norm.weight", np.ones(dims, np.float32))
    if not config.get("tie_word_embeddings"):
        add("output", vocabulary, dims)
    for layer in range(layers):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            made.add_tensor(f"{block}.{norm}.weight", np.ones(dims, np.float32))
        for name, rows, columns in (
            ("attn_q", heads * size, dims),
            ("attn_k", kv_heads * size, dims),
            ("attn_v", kv_heads * size, dims),
            ("attn_output", dims, heads * size),
            ("ffn_gate", inner, dims),
            ("ffn_up", inner, dims),
            ("ffn_down", dims, inner),
        ):
            add(f"{block}.{name}", rows, columns)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


class LlamaCppLab:
    """A model of the shapes of the MLX one in ``folder``."""

    def __init__(self, folder: str) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = config["vocab_size"]
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # kept: it is called from C
        self._api.llama_log_set(self._silent, None)
        self._api.llama_backend_init()
        with TemporaryDirectory(prefix="tokamac-gguf-") as place:
            file = Path(place) / "model.gguf"
            write_gguf(file, config)
            how = self._api.llama_model_default_params()
            how.use_mmap = False
            self._model = self._api.llama_model_load_from_file(str(file).encode(), how)
        if not self._model:
            raise RuntimeError("llama.cpp can't load what was written for it")
        options = self._api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, BATCH, BATCH
        options.n_threads = options.n_threads_batch = usable_cores()
        self._context = self._api.llama_init_from_model(self._model, options)

    def reply(self, prompt: int, new: int) -> Timing:
        """Read a prompt of so many tokens, and write ``new``."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        began = time.perf_counter()
        token = self._step([5 + number * number % (self._vocabulary - 5) for number in range(prompt)])
        first = time.perf_counter()
        for _ in range(new - 1):
            token = self._step([token])
        return Timing(new, prompt / (first - began), (new - 1) / (time.perf_counter() - first), 0)

    def _step(self, ids: list[int]) -> int:
        import numpy as np

        array = (self._api.llama_token * len(ids))(*ids)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama.cpp failed")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocabulary,))))

    def close(self) -> None:
        """Free the model."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

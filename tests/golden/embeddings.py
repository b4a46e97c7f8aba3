"""Make the golden embeddings: vectors of texts as Hugging Face transformers and sentence-transformers' rules give them.

    pip install -e '.[golden]' && python -m tests.golden.embeddings

For each case it writes ``embeddings/<case>/``: config.json, the small files that name the pooling, and ``case.json`` with seed,
shapes (under the names of a model without a head, as such models are published), texts, token ids and vectors.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, processors

from tests.golden.families import SMALL
from tests.golden.weights import tensor, write_weights

HERE = Path(__file__).parent
PREFIX = "sentence_transformers.models."
WINDOW = 16
TEXTS = (
    "the", "why is decode slow?", "A table of the words that are in it, and of their places.",
    "One more sentence, longer than the window of the layers that slide, so that it shows whether they do so both ways. " * 2,
)  # fmt: skip
PER_LAYER = {
    "full_attention": {"rope_theta": 200_000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 5_000.0, "rope_type": "default"},
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "kind": "Qwen3Config", "pooling": "lasttoken", "dense": (), "before": (),
        "config": {"head_dim": 32, "tie_word_embeddings": True},
        "prompts": {"query": "Instruct: find it\nQuery:", "document": ""},
    },
    "gemma3": {
        "kind": "Gemma3TextConfig", "pooling": "mean_tokens", "dense": ((128, 64), (64, 128)), "before": ("<|system|>",),
        "config": {
            "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": KINDS,
            "rope_parameters": PER_LAYER, "use_bidirectional_attention": True,
        },
        "prompts": {"query": "task: search result | query: ", "document": "title: none | text: "},
    },
}  # fmt: skip


def write_files(folder: Path, case: dict[str, Any]) -> None:
    """Write what names the pooling, as sentence-transformers saves it, and the tokenizer with its marks around a text."""
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((f"{at}_Dense", "Dense") for at in range(2, 2 + len(case["dense"]))),
    ]
    modules.append((f"{2 + len(case['dense'])}_Normalize", "Normalize"))
    told = [
        {"idx": at, "name": str(at), "path": path, "type": PREFIX + kind} for at, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(told))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name == case["pooling"] for name in names}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, **modes, "include_prompt": True})
    )
    prompts = {"prompts": case["prompts"], "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for at, (rows, columns) in enumerate(case["dense"], 2):
        (folder / f"{at}_Dense").mkdir(exist_ok=True)
        linear = {"in_features": columns, "out_features": rows, "bias": False}
        linear["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / f"{at}_Dense" / "config.json").write_text(json.dumps(linear))
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer" / "tokenizer.json"))
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in (*case["before"], "<|end|>")]
    template = " ".join([*case["before"], "$A", "<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def vector(model: Any, ids: list[int], case: dict[str, Any], seed: int, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return a text's vector: the states of one pass, pooled, through the dense layers, of length 1."""
    states = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    pooled = states[-1] if case["pooling"] == "lasttoken" else states.mean(axis=0)
    for at, shape in enumerate(case["dense"], 2):
        pooled = tensor(seed, f"{at}_Dense.linear.weight", shape, config).astype(np.float64) @ pooled
    return np.asarray(pooled / np.linalg.norm(pooled))


def make(name: str) -> None:
    case, seed = CASES[name], 1
    target = HERE / "embeddings" / name
    target.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, case["kind"])(**{**SMALL, **case["config"]})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        read = json.loads((folder / "config.json").read_text())
        write_weights(folder, seed, shapes, read)
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        write_files(target, case)
        (target / "config.json").write_text(json.dumps(read, indent=1) + "\n")
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"))
        ids = [tokenizer.encode(text) for text in TEXTS]
        vectors = [[round(float(x), 7) for x in vector(model, each, case, seed, read)] for each in ids]
    dense = {f"{at}_Dense": shape for at, shape in enumerate(case["dense"], 2)}
    told = {"seed": seed, "shapes": shapes, "dense": dense, "texts": TEXTS, "ids": ids, "vectors": vectors}
    (target / "case.json").write_text(json.dumps(told) + "\n")
    print(f"{name}: {[len(each) for each in ids]} tokens, {len(vectors[0])} dimensions")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in CASES:
        make(name)

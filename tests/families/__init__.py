"""The model families that tests walk: a few of each kind of layers in every run, all of them in ``make test-all``."""

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.weights import write_weights

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))

KINDS = frozenset({
    # A golden case of each kind of layers, and of each architecture that is ours alone; capped scores, multipliers, partial
    # rotary positions and state space alone are among TOYS.
    "llama",  # grouped queries, a head of its own, scaled rotary positions; chats
    "gemma3_window",  # layers that slide beside layers that don't, each with a rotary base of its own
    "gemma4_window",  # layers that attend to the keys of others; embeddings for each layer
    "gpt_oss_window",  # sinks; experts with biases
    "qwen3_moe",  # experts; YaRN
    "gpt2",  # a table of learned positions
    "phi3",  # LongRoPE
    "deepseek_v3",  # latent attention; grouped experts
    "glm_moe_dsa_shared",  # indexed attention, an indexer for several layers
    "qwen3_next",  # linear attention; gates
    "falcon_h1",  # attention and state space side by side
    "recurrent_gemma",  # a linear recurrence
    "lfm2",  # convolutions
    "nemotron_h",  # a layer is one of: state space, attention, experts
    "llava",  # a language part among parts that see
    "arcee", "hunyuan_v1_moe", "vaultgemma_window", "minimax_m3_long", "step3p7_published_long", "deepseek_v4_window",
})  # fmt: skip

TOYS = frozenset({
    # The same of mlx-lm's classes, as tiny as they go (tests/engine/kv/models.py), with what only these have. Layers that
    # slide beside others, and attention beside state space, are among KINDS.
    "llama", "gemma2", "gemma4", "gpt_oss", "qwen3_moe", "granite", "gpt_neox", "gpt2", "deepseek_v3", "glm_moe_dsa",
    "qwen3_next", "mamba2", "recurrent_gemma", "lfm2", "nemotron_h",
    "afm7",  # layers that reuse keys, and can't be bounded
    "gemma3n",  # caches that other layers read too
    "llama4",  # attention in chunks
    "minimax_m3_vl",  # sparse blocks
    "mistral4",  # latent attention that gets sharper
    "plamo",  # attention that passes a cache by
    "plamo3",  # a window that mlx-lm counts in two ways
    "rwkv7",  # no attention at all
})  # fmt: skip

# Toys that stand for growing and sliding, shared, recurrent and latent caches: each layout and each KV width is tried.
LAYOUTS = frozenset({"llama", "gemma4", "qwen3_next", "deepseek_v3"})

# Heads of each form: beside the model, as a layer of its own, latent, and in a model with recurrent state.
HEADS = frozenset({"medusa", "glm4_moe", "deepseek_v3", "qwen3_next"})


def walked(names: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Return parameters for all names, or other values; what is not ``always`` walked is marked exhaustive."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.exhaustive) for name in names]


def crossed(first: Iterable[Any], second: Iterable[Any], *always: Any) -> list[Any]:
    """Return parameters for all pairs: each run has each of ``first`` beside ``always`` and one more of ``second`` by turns."""
    seconds = list(second)
    return [
        pytest.param(one, other, marks=() if other in always or place % len(seconds) == at else pytest.mark.exhaustive)
        for place, one in enumerate(first)
        for at, other in enumerate(seconds)
    ]


def build(case: str, folder: Path) -> dict[str, Any]:
    """Make a golden case's model folder as a user would have it; return its case.json."""
    folder.mkdir(exist_ok=True)
    stored: dict[str, Any] = json.loads((GOLDEN / case / "case.json").read_text())
    shutil.copy(GOLDEN / case / "config.json", folder)
    for file in (GOLDEN / "tokenizer").iterdir():
        shutil.copy(file, folder)
    write_weights(folder, stored["seed"], stored["shapes"], json.loads((folder / "config.json").read_text()))
    return stored


def golden(case: str) -> tuple[list[int], Any]:
    """Return a case's token ids, and the log-probabilities of transformers."""
    with np.load(GOLDEN / case / "golden.npz") as stored:
        return stored["tokens"].tolist(), stored["logprobs"]

"""Configs are told apart by the names the field uses: one case a family, from its published config or a tiny one."""

import pytest

from tests.limits.test_limits_config_cost import FAMILIES
from tokamac.engine.model.config import normalise
from tokamac.engine.perf.catalogue import catalogue, find
from tokamac.engine.perf.workload import traits_of

PUBLISHED = {
    "Llama-3.1-8B": ("dense",),
    "Qwen2.5-7B": ("dense",),
    "Qwen3-8B": ("dense",),
    "phi-4": ("dense",),
    "Mistral-7B-v0.3": ("dense",),
    "gemma-3-1b": ("dense", "sliding window"),
    "gemma-3-27b": ("dense", "sliding window"),
    "gemma-4-e2b": ("dense", "sliding window"),
    "gemma-4-26b-a4b": ("mixture", "sliding window"),
    "Qwen3-30B-A3B": ("mixture",),
    "GLM-4.5-Air": ("mixture",),
    "gpt-oss-20b": ("mixture", "sliding window"),
    "Qwen3.5-9B": ("dense", "hybrid"),
    "Qwen3.6-35B-A3B": ("mixture", "hybrid"),
    "Qwen3-Next-80B-A3B": ("mixture", "hybrid"),
    "LFM2.5-1.2B": ("dense", "hybrid"),
}
TINY = {
    "llama": ("dense",),
    "mixtral": ("mixture",),
    "gemma3": ("dense", "sliding window"),
    "deepseek_v3": ("mixture", "latent attention"),
    "qwen3_5_moe": ("mixture", "hybrid"),
    "mamba": ("dense", "state space"),
    "mamba2": ("dense", "state space"),
    "rwkv7": ("dense", "state space"),
    "nemotron_h": ("mixture", "hybrid"),
}


@pytest.mark.parametrize(("name", "traits"), PUBLISHED.items())
def test_a_published_model_is_of_its_kinds(name, traits):
    entry = find(name)
    assert entry is not None
    assert traits_of(entry.config) == traits


@pytest.mark.parametrize(("family", "traits"), TINY.items())
def test_a_family_is_of_its_kinds(family, traits):
    assert traits_of(normalise(FAMILIES[family])) == traits


@pytest.mark.parametrize(
    ("changes", "traits"),
    [
        ({"num_experts": 1}, ("dense",)),
        ({"num_experts": 8, "enable_moe_block": False}, ("dense",)),  # gemma4's dense sizes name experts too
        ({"sliding_window": 4096}, ("dense", "sliding window")),
        ({"sliding_window": 4096, "use_sliding_window": False}, ("dense",)),
        ({"sliding_window": None}, ("dense",)),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, ("dense",)),  # the list of layers goes first
        ({"layer_types": ["chunked_attention"]}, ("dense", "sliding window")),
        ({"attention_chunk_size": 8192}, ("dense", "sliding window")),
        ({"full_attn_idxs": [2, 5]}, ("dense", "hybrid")),
        ({"full_attention_interval": 4, "layer_types": ["full_attention"]}, ("dense",)),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, ("dense", "hybrid")),
        ({"kv_lora_rank": 512}, ("dense", "latent attention")),
        ({"kv_lora_rank": None}, ("dense",)),
        ({"text_config": {"num_local_experts": 8}}, ("mixture",)),
    ],
)
def test_a_key_decides(changes, traits):
    assert traits_of({"model_type": "llama", **changes}) == traits


def test_every_model_of_the_catalogue_is_dense_or_a_mixture_first():
    known = [entry for entry in catalogue() if entry.config is not None]
    assert len(known) > 30
    for entry in known:
        first, *others = traits_of(entry.config)
        assert first in ("dense", "mixture")
        assert not {"dense", "mixture"} & set(others)
        assert len(others) == len(set(others))

"""The golden cases: which transformers configuration each one is, and what it is there to catch.

Every value that transformers would default is set to something else where the family allows it, so that a key nobody
reads shows. Prompts are short, except those of the cases named ``…_window``: they run to six of the model's own sliding windows,
so that what a layer may no longer see, and the rings that hold the rest, are measured against transformers too.
"""

from typing import Any

VOCABULARY = 128
PROMPT = 24
"""Tokens of a prompt, shorter than every sliding window."""
WINDOW = 16
BEYOND = 6 * WINDOW
"""Tokens of a prompt that leaves the window behind, and the ring too, which holds 64 tokens more than the window."""
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WIDE = {"head_dim": 32}  # not hidden_size / num_attention_heads
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}


def rope(theta: float = 50_000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    """Return rotary parameters as transformers 5 takes them."""
    return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **more}}


LLAMA3 = rope(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope(kind="yarn", factor=4.0, original_max_position_embeddings=64)
UNUSUAL_YARN = rope(
    kind="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, attention_factor=1.3, beta_fast=8.0
)
LINEAR = rope(kind="linear", factor=2.0)
MIXED_LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 64}
PER_LAYER = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 200_000.0, "rope_type": "linear", "factor": 4.0},
        "sliding_attention": {"rope_theta": 5_000.0, "rope_type": "default"},
    }
}
SAME_PER_LAYER = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 50_000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 50_000.0, "rope_type": "default"},
    }
}
LONGROPE = rope(
    kind="longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.7 * i for i in range(8)],
    original_max_position_embeddings=64,
)
PHIMOE_ROPE = {"rope_parameters": {**LONGROPE["rope_parameters"], "short_mscale": 1.2, "long_mscale": 1.4}}
GRANITE = {
    "attention_multiplier": 0.09,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
# A few words only, so that 96 rows of log-probabilities stay a few kB.
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "vocab_size": 12}
SHALLOW = {"num_hidden_layers": 2}
SWITCHED_ON = {"use_sliding_window": True}
GEMMA4 = {
    # The upper two layers attend to the keys and values of the lower two.
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SLIDING["vocab_size"],
    "final_logit_softcapping": 4.0,
}

# case: (transformers configuration class, its arguments over SMALL)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**WIDE, **UNTIED, **LLAMA3}),
    "llama_biased": ("LlamaConfig", {**TIED, **UNUSUAL_YARN, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("LlamaConfig", {**UNTIED, **LINEAR}),
    "llama_dynamic": ("LlamaConfig", {**UNTIED, **rope(kind="dynamic", factor=2.0)}),
    "qwen2": ("Qwen2Config", {**UNTIED, **rope()}),
    "qwen2_yarn": ("Qwen2Config", {**TIED, **YARN}),
    "qwen3": ("Qwen3Config", {**WIDE, **TIED, **rope()}),
    "gemma3": (
        "Gemma3TextConfig",
        {**WIDE, **TIED, **PER_LAYER, **MIXED_LAYERS, "query_pre_attn_scalar": 24},
    ),
    "granite": ("GraniteConfig", {**TIED, **rope(), **GRANITE}),
    "granite_biased": ("GraniteConfig", {**UNTIED, **LINEAR, **GRANITE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**WIDE, **UNTIED, **rope(), "sliding_window": 64}),
    "phi3": ("Phi3Config", {**UNTIED, **LONGROPE, "original_max_position_embeddings": 64}),
    "phi3_partial": ("Phi3Config", {**TIED, **rope(partial_rotary_factor=0.5), "sliding_window": 64}),
    "mixtral": ("MixtralConfig", {**UNTIED, **rope(), **EXPERTS}),
    # Families beyond the ones that must work.
    "apertus": ("ApertusConfig", {**UNTIED, **LLAMA3}),
    "cohere": ("CohereConfig", {**TIED, **rope(), "logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {**TIED, **rope(), **MIXED_LAYERS, "logit_scale": 0.5}),
    "ernie4_5": ("Ernie4_5Config", {**WIDE, **TIED, **rope(), "use_bias": True}),
    "exaone4": ("Exaone4Config", {**UNTIED, **rope(), **MIXED_LAYERS, "sliding_window_pattern": 3}),
    "gemma": ("GemmaConfig", {**WIDE, **TIED, **rope()}),
    "gemma2": (
        "Gemma2Config",
        {
            **WIDE,
            **TIED,
            **rope(),
            "sliding_window": 64,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "glm": ("GlmConfig", {**WIDE, **UNTIED, **rope(partial_rotary_factor=0.5)}),
    "glm4": ("Glm4Config", {**WIDE, **UNTIED, **rope(partial_rotary_factor=0.25)}),
    "gpt_neox": (
        "GPTNeoXConfig",
        {**UNTIED, **rope(partial_rotary_factor=0.5), "use_parallel_residual": False, "intermediate_size": 256},
    ),
    "helium": ("HeliumConfig", {**UNTIED, **rope(), "head_dim": 16}),
    "ministral3": (
        "Ministral3Config",
        {
            **WIDE,
            **TIED,
            **rope(
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                llama_4_scaling_beta=0.1,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "nemotron": ("NemotronConfig", {**UNTIED, **rope(partial_rotary_factor=0.25), "hidden_act": "relu2"}),
    "olmo2": ("Olmo2Config", {**UNTIED, **LINEAR}),
    "olmo3": ("Olmo3Config", {**UNTIED, **SAME_PER_LAYER, **MIXED_LAYERS}),
    "olmoe": ("OlmoeConfig", {**UNTIED, **rope(), "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "phi": ("PhiConfig", {**UNTIED, **rope(partial_rotary_factor=0.5)}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **UNTIED,
            **rope(),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **WIDE,
            **UNTIED,
            **YARN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "seed_oss": ("SeedOssConfig", {**WIDE, **UNTIED, **rope(), "attention_bias": True, "attention_out_bias": True}),
    "smollm3": ("SmolLM3Config", {**TIED, **rope(), "no_rope_layer_interval": 2}),
    "stablelm": ("StableLmConfig", {**UNTIED, **rope(partial_rotary_factor=0.5), "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", {**TIED, **LINEAR, "sliding_window": 64}),
    "afmoe": ("AfmoeConfig", {**UNTIED, **rope(), **MIXED_LAYERS, **FEW_EXPERTS, "global_attn_every_n_layers": 3}),
    "deepseek_v2": ("DeepseekV2Config", {**UNTIED, **rope(), **LATENT, **ROUTED}),
    "deepseek_v3": ("DeepseekV3Config", {**UNTIED, **YARN, **LATENT, **ROUTED}),
    "dots1": ("Dots1Config", {**WIDE, **UNTIED, **rope(), **ROUTED, "n_shared_experts": 1}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **UNTIED,
            **rope(),
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**WIDE, **UNTIED, **rope(partial_rotary_factor=0.5), **ROUTED, "use_qk_norm": True},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "granitemoe": ("GraniteMoeConfig", {**UNTIED, **rope(), **GRANITE, **EXPERTS}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **UNTIED,
            **rope(),
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**WIDE, **UNTIED, **rope()}),
    "internlm3": ("InternLM3Config", {"head_dim": 16, **UNTIED, **LINEAR}),
    "lfm2": ("Lfm2Config", {**TIED, **rope(), "layer_types": ["conv", "full_attention", "conv"]}),
    "minicpm3": ("MiniCPM3Config", {**UNTIED, **rope(), **LATENT}),
    "phimoe": ("PhimoeConfig", {**UNTIED, **PHIMOE_ROPE, **EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **WIDE,
            **UNTIED,
            **rope(partial_rotary_factor=0.25),
            **FEW_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}
CASES |= {
    "mistral_window": ("MistralConfig", {**WIDE, **UNTIED, **rope(), **SLIDING, **SHALLOW}),
    "phi3_window": ("Phi3Config", {**UNTIED, **rope(), **SLIDING, **SHALLOW}),
    "starcoder2_window": ("Starcoder2Config", {**TIED, **rope(), **SLIDING, **SHALLOW}),
    "gemma2_window": ("Gemma2Config", {**CASES["gemma2"][1], **SLIDING}),
    "gemma3_window": ("Gemma3TextConfig", {**CASES["gemma3"][1], **SLIDING}),
    "cohere2_window": ("Cohere2Config", {**CASES["cohere2"][1], **SLIDING}),
    "exaone4_window": ("Exaone4Config", {**CASES["exaone4"][1], **SLIDING}),
    "olmo3_window": ("Olmo3Config", {**CASES["olmo3"][1], **SLIDING}),
    "qwen2_window": ("Qwen2Config", {**CASES["qwen2"][1], **SLIDING, **SWITCHED_ON, "max_window_layers": 1}),
    "smollm3_window": ("SmolLM3Config", {**CASES["smollm3"][1], **SLIDING, **SWITCHED_ON}),
    "ministral3_window": ("Ministral3Config", {**CASES["ministral3"][1], **SLIDING, **SHALLOW}),
    "gemma4_window": ("Gemma4TextConfig", {**WIDE, **TIED, **SLIDING, **GEMMA4}),
    "gpt_oss_window": ("GptOssConfig", {**WIDE, **UNTIED, **YARN, **SLIDING, **EXPERTS}),
}
CHATS = ("llama", "qwen3", "gemma3")
"""The cases that also hold three greedy chat turns."""


def is_windowed(case: str) -> bool:
    """Return whether the case's prompt runs beyond the model's window."""
    return case.endswith("_window")


def prompt_tokens(case: str) -> int:
    """Return how many tokens the case's prompt has."""
    return BEYOND if is_windowed(case) else PROMPT

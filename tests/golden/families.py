"""The golden cases: which transformers configuration each one is, what it is there to catch, and its changes in one
scalar."""

import copy
from collections.abc import Iterator
from typing import Any

VOCABULARY = 128
PROMPT = 24  # tokens of a prompt, shorter than every sliding window
WINDOW = 16
# Tokens of a prompt that leaves the window behind, and the ring too, which holds 64 tokens more than the window.
BEYOND = 6 * WINDOW
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
GRANITE = {"attention_multiplier": 0.09, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0}
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
ALL_ROUTED = {key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"}
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
    "gemma3": ("Gemma3TextConfig", {**WIDE, **TIED, **PER_LAYER, **MIXED_LAYERS, "query_pre_attn_scalar": 24}),
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
    "glm4_moe": ("Glm4MoeConfig", {**WIDE, **UNTIED, **rope(partial_rotary_factor=0.5), **ROUTED, "use_qk_norm": True}),
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
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "chunk_size": 8}
EXPERTS_48 = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SEES: dict[str, Any] = {
    # The least of a part that sees: its weights are in the checkpoint, and have to be left out.
    **{"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_hidden_layers": 1, "num_heads": 2},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64},
}
# With few index heads many scores are exactly zero, and which of them are chosen is an accident.
INDEXED = {**LATENT, **ROUTED, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 16}
RECURRENT = {"num_key_value_heads": 4, "state_size": 16, "expand": 2}
LINEAR_LAYERS = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def sees(**text: Any) -> dict[str, Any]:
    """Return the configuration of a model whose language part has these values over SMALL."""
    outer = {key: text[key] for key in ("tie_word_embeddings",) if key in text}
    return {"text_config": {**SMALL, **text}, "vision_config": SEES, **outer}


LLAMA4: dict[str, Any] = {
    **{**UNTIED, **rope(), "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 4},
    **{"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "attention_chunk_size": 64},
}
MROPE = {"mrope_section": [4, 2, 2]}
CASES |= {
    # Published models whose keys were once refused or misread, and families that transformers has come to know.
    "phi3_long": ("Phi3Config", CASES["phi3"][1]),
    "minicpm3_tied": ("MiniCPM3Config", {**TIED, **rope(), **LATENT, "dim_model_base": 16}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**UNTIED, **rope(), **LATENT, **ROUTED}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**UNTIED, **rope(), "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**WIDE, **UNTIED, **rope(), **MIXED_LAYERS, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_shared_experts": 1, "n_group": 1},
    ),
    "falcon_h1_multiplied": (
        "FalconH1Config",
        {**CASES["falcon_h1"][1], "key_multiplier": 0.4, "attention_out_multiplier": 0.9, "embedding_multiplier": 5.0}
        | {"lm_head_multiplier": 0.2, "mlp_multipliers": [0.8, 0.6], "ssm_in_multiplier": 1.25}
        | {"ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3], "ssm_out_multiplier": 0.25, "mamba_rms_norm": True},
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {**WIDE, **TIED, **MIXED_LAYERS, "global_head_dim": 64, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 48, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    ),
    "gpt_oss": ("GptOssConfig", {**WIDE, **UNTIED, **YARN, **EXPERTS, "sliding_window": 64}),
    "granitemoehybrid_mamba": (
        "GraniteMoeHybridConfig",
        {**TIED, **rope(), **GRANITE, **EXPERTS, **MAMBA, "shared_intermediate_size": 96, "mamba_n_groups": 1}
        | {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"},
    ),
    "iquestcoder": ("IQuestCoderConfig", {**WIDE, **UNTIED, **rope()}),
    "jamba": (
        "JambaConfig",
        {**UNTIED, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1, "attn_layer_period": 3}
        | {"expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    "lfm2_moe": ("Lfm2MoeConfig", {**TIED, **rope(), **FEW_EXPERTS, "layer_types": ["conv", "full_attention", "conv"]}),
    "mellum": ("MellumConfig", {**WIDE, **UNTIED, "num_experts": 4, "num_experts_per_tok": 2}),
    "nemotron_h": (
        "NemotronHConfig",
        {**UNTIED, **ALL_ROUTED, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
        | {"n_groups": 2, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "chunk_size": 8}
        | {"num_hidden_layers": 4},
    ),
    "olmo": ("OlmoConfig", {**UNTIED, **rope(), "clip_qkv": 0.8}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**WIDE, **UNTIED, **LINEAR_LAYERS}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {**WIDE, **UNTIED, **LINEAR_LAYERS, **FEW_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "recurrent_gemma": ("RecurrentGemmaConfig", {**TIED, "num_key_value_heads": 1, "lru_width": 64}),
    "solar_open": ("SolarOpenConfig", {**WIDE, **UNTIED, **YARN, **ALL_ROUTED, "n_shared_experts": 1}),
    "deepseek_v32": ("DeepseekV32Config", {**UNTIED, **YARN, **INDEXED}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**UNTIED, **rope(), **INDEXED}),
    "glm_moe_dsa_shared": (
        "GlmMoeDsaConfig",
        {**UNTIED, **rope(), **INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "num_key_value_heads": 4}),
    "gptj": (
        "GPTJConfig",
        {**UNTIED, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_inner": None, "num_key_value_heads": 4},
    ),
    "falcon_mamba": ("FalconMambaConfig", {**UNTIED, **RECURRENT}),
    "mamba": ("MambaConfig", {**TIED, **RECURRENT}),
    "mamba2": ("Mamba2Config", {**UNTIED, **RECURRENT, **MAMBA2, "n_groups": 1}),
    "mamba2_groups": ("Mamba2Config", {**TIED, **RECURRENT, **MAMBA2, "n_groups": 4}),
    "laguna": ("LagunaConfig", {**WIDE, **UNTIED, **EXPERTS_48}),
    "minimax_m2": ("MiniMaxM2Config", {**WIDE, **UNTIED, **EXPERTS, **rope(partial_rotary_factor=0.5)}),
    "kimi_linear": (
        "KimiLinearConfig",
        {**UNTIED, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"num_key_value_heads": 4, "q_lora_rank": None, "head_dim": 16, "num_experts": 4, "num_experts_per_token": 2}
        | {"num_shared_experts": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "moe_layer_freq": 1}
        | {"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
        | {"num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.4, "mla_use_nope": True}
        | {"rope_theta": 10_000.0, "model_max_length": 256, "rms_norm_eps": 1e-5}
        | {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            }
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**UNTIED, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window": 15}
        | {"sliding_window_size": 15, "n_shared_experts": None, "routed_scaling_factor": None}
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "layernorm_epsilon": 1e-5}
        | {"rope_theta": 5_000_000.0, "swa_rope_theta": 10_000.0, "swa_num_attention_heads": 4}
        | {"swa_num_key_value_heads": 4, "head_dim": 32, "v_head_dim": 16, "swa_head_dim": 32, "swa_v_head_dim": 16}
        | {"partial_rotary_factor": 0.334, "attention_value_scale": 0.707},
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        {**WIDE, **TIED, **MIXED_LAYERS, "global_head_dim": 64, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "final_logit_softcapping": 4.0},
    ),
    # Models that see: their language part.
    "gemma3_vision": ("Gemma3Config", sees(**CASES["gemma3"][1])),
    "gemma4_vision": (
        "Gemma4Config",
        sees(
            **CASES["gemma4_window"][1] | {"vocab_size": 128, "vocab_size_per_layer_input": 128, "sliding_window": 64}
        ),
    ),
    "mistral3": ("Mistral3Config", sees(**CASES["mistral"][1], model_type="mistral")),
    "mistral3_ministral": ("Mistral3Config", sees(**CASES["ministral3"][1], model_type="ministral3")),
    "llava": ("LlavaConfig", sees(**CASES["mistral"][1], model_type="mistral")),
    "lfm2_vl": ("Lfm2VlConfig", sees(**CASES["lfm2"][1])),
    "qwen2_vl": ("Qwen2VLConfig", sees(**UNTIED, **rope(**MROPE))),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", sees(**UNTIED, **rope(**MROPE))),
    "qwen3_vl": ("Qwen3VLConfig", sees(**WIDE, **UNTIED, **rope(**MROPE))),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", sees(**WIDE, **UNTIED, **rope(**MROPE), **FEW_EXPERTS)),
    "qwen3_5": ("Qwen3_5Config", sees(**WIDE, **UNTIED, **LINEAR_LAYERS)),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        sees(**WIDE, **UNTIED, **LINEAR_LAYERS, **FEW_EXPERTS, shared_expert_intermediate_size=48),
    ),
    "llama4": ("Llama4Config", sees(**LLAMA4)),
}
HUNYUAN = {"num_experts": 4, "moe_topk": 2, "head_dim": 16}
STEP: dict[str, Any] = {
    **{
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "share_expert_dim": 80,
    },
    **{"layer_types": MIXED_LAYERS["layer_types"], "sliding_window": WINDOW, "num_sliding_attention_heads": 6},
    **{"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_router_scaling_factor": 3.0, "vocab_size": 12},
    **{"swiglu_limits": [0.0, 0.5, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.7]},
    "rope_parameters": {
        "full_attention": {**LLAMA3["rope_parameters"], "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}
STEP_PUBLISHED: dict[str, Any] = {
    "model_type": "step3p5",
    **{"head_dim": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 48, "share_expert_dim": 80},
    **{"layer_types": [*MIXED_LAYERS["layer_types"], "sliding_attention"], "sliding_window": WINDOW, "vocab_size": 12},
    **{"num_nextn_predict_layers": 1, "moe_layers_enum": "1,2", "moe_router_scaling_factor": 3.0},
    **{"swiglu_limits": [0.0, 0.5, 0.0, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.7, 0.0]},
    **{"rope_theta": [10_000.0, 10_000.0, 50_000.0, 10_000.0], "partial_rotary_factors": [1.0, 1.0, 0.5, 1.0]},
    **{"rope_scaling": {k: v for k, v in LLAMA3["rope_parameters"].items() if k != "rope_theta"}},
    **{"yarn_only_types": ["full_attention"], "use_head_wise_attn_gate": True, "norm_expert_weight": True},
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32,
    },
}  # fmt: skip
MINIMAX_M3 = {
    **{**WIDE, **UNTIED, **rope(partial_rotary_factor=0.5), **EXPERTS, "rotary_dim": 16, "vocab_size": 12},
    **{"dense_intermediate_size": 80, "shared_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    **{"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2},
    **{"index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 3},
}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
CASES |= {
    # Architectures that mlx-lm lacks: engine/architectures.
    "arcee": ("ArceeConfig", {**WIDE, **UNTIED, **YARN, "mlp_bias": True}),
    "vaultgemma": ("VaultGemmaConfig", {**CASES["gemma2"][1], **LINEAR}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**TIED, **HUNYUAN, **rope(kind="dynamic", factor=1.0, alpha=1000.0)}),
    "hunyuan_v1_moe_linear": ("HunYuanMoEV1Config", {**UNTIED, **HUNYUAN, **LINEAR, "moe_topk": [1, 3, 2]}),
    "minimax_m3_long": ("MiniMaxM3VLTextConfig", MINIMAX_M3),
    "minimax_m3_vl_long": ("MiniMaxM3VLConfig", sees(**MINIMAX_M3)),
    "step3p7_long": ("Step3p7Config", sees(**STEP)),
    "step3p7_published_long": ("Step3p7Config", sees(**STEP_PUBLISHED)),
    "vaultgemma_window": ("VaultGemmaConfig", {**CASES["gemma2"][1], **SLIDING, **UNCAPPED}),
}
V4_KINDS = ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse")
DEEPSEEK_V4 = {
    **UNTIED,
    **{"num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16},
    **{"intermediate_size": 48, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "qk_rope_head_dim": 8, "num_hidden_layers": 4},
    **{"hc_sinkhorn_iters": 3, "hc_eps": 1e-2, "swiglu_limit": 0.7, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-4},
    **{"rope_theta": 5_000.0, "compress_rope_theta": 50_000.0, "num_hash_layers": 1},
}
CASES |= {
    "deepseek_v4_window": (
        "DeepseekV4Config",
        {**DEEPSEEK_V4, **YARN, "sliding_window": WINDOW}
        | {
            "layer_types": [f"{kind}_attention" for kind in V4_KINDS],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
    ),
    # Spelled as published, where a heavily compressed entry is of 128 tokens.
    "deepseek_v4_published": (
        "DeepseekV4Config",
        {**DEEPSEEK_V4, "sliding_window": 24, "compress_ratios": [0, 4, 128, 4, 0], "num_nextn_predict_layers": 1}
        | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
}
CASES |= {
    # Families that mlx-lm has and transformers has come to know.
    "longcat_flash": (
        "LongcatFlashConfig",
        {**UNTIED, **rope(), **LATENT, "num_layers": 2, "num_hidden_layers": 4, "head_dim": 16, "ffn_hidden_size": 80}
        | {"expert_ffn_hidden_size": 48, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        # As many heads of keys as of values: transformers saves their convolutions in three equal parts.
        {**UNTIED, **rope(), **LINEAR_LAYERS, "linear_num_key_heads": 4},
    ),
    "kimi_k25": ("Kimi_K25Config", sees(**CASES["deepseek_v3"][1], model_type="deepseek_v3")),
}
# Cases whose config is written as their makers spell it, not as transformers saves it.
AS_PUBLISHED = frozenset({"deepseek_v4_published", "kimi_linear", "mimo_v2_flash", "step3p7_published_long"})
CHATS = ("llama", "qwen3", "gemma3")  # the cases that also hold three greedy chat turns


# Tokens of prompts that need more, so that what a config says of them shows.
LONG_PROMPTS = {"deepseek_v4_published": 160}


def is_windowed(case: str) -> bool:
    """Return whether the case's prompt runs beyond the model's window."""
    return case.endswith(("_window", "_long"))


def prompt_tokens(case: str) -> int:
    """Return how many tokens the case's prompt has."""
    return LONG_PROMPTS.get(case, BEYOND if is_windowed(case) else PROMPT)


# Configs changed in one scalar: which there are, and where the reference's answers to them are looked at.

MOVES = 1e-3  # a change counts as seen where a log-probability of the reference moves by more than this

CHANGED_TOKENS = [0, 3, 5, 7, 9, 11]  # the tokens whose log-probabilities are kept; the smallest vocabulary has twelve

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
NEVER = {"transformers_version", "dtype", "torch_dtype", "model_type", "initializer_range", "use_cache", "pad_token_id"}
NEVER |= {"bos_token_id", "eos_token_id", "rescale_prenorm_residual"}


def changed_rows(tokens: int) -> list[int]:
    """Return the positions of a prompt of so many tokens that are kept."""
    return [tokens // 2, tokens - 1]


def scalars(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every scalar, and list of fractions, of a config with its path, but what says nothing of what a text model computes."""
    for key, value in config.items():
        if isinstance(value, dict):
            if key not in ("vision_config", "audio_config", "id2label", "label2id", "per_layer_config"):
                yield from scalars(value, (*path, key))
        elif key not in NEVER and not key.endswith("_token_id") and (not isinstance(value, list) or _numbers(value)):
            yield (*path, key), value


def _numbers(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(each, float) for each in value)


def others(key: str, value: Any) -> Iterator[Any]:
    """Yield values to try in place of a scalar's own."""
    if key in ACTIVATIONS:
        yield "relu" if value != "relu" else "silu"
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (other for other in (value + 1, value * 2, value // 2) if other > 0)
    elif key == "partial_rotary_factor":
        yield 0.5 if value != 0.5 else 0.75
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.1, value * 0.5 + 0.01)
    elif isinstance(value, list):
        yield [each * 1.5 for each in value]
    elif value is None:
        yield from (0.5, 2, True)


def replaced(config: dict[str, Any], path: tuple[str, ...] | list[str], value: Any) -> dict[str, Any]:
    """Return a copy of a config with another value at a path."""
    changed = copy.deepcopy(config)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed

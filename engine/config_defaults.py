"""What a key means that a config does not have: what transformers takes for it, where mlx-lm's class would take something else.

A checkpoint is made to be read by transformers, or by code that came with it, so its absent keys mean their defaults there. A test
compares both libraries' defaults for every model type that both know.
"""

from typing import Any

INFINITY = float("inf")

ABSENT: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts_per_tok": 6, "num_dense_layers": 1, "route_scale": 1.0, "sliding_window": 1024}
    | {"mup_enabled": False},
    # Keys that older checkpoints had and mlx-lm requires; transformers now takes them as given.
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "arcee": {"rms_norm_eps": 1e-5},
    "bitnet": {"tie_word_embeddings": False, "rope_theta": 500_000.0},
    "cohere": {"rope_theta": 500_000.0},
    "cohere2": {"rope_theta": 10_000.0},
    "deepseek_v3": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
    "deepseek_v32": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
    "ernie4_5_moe": {"moe_k": 6, "moe_layer_start_index": 1},
    "exaone_moe": {"rope_theta": 10_000.0},
    "falcon_h1": {
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_norm_before_gate": True,
        "mlp_multipliers": [1.0, 1.0],
        "rope_theta": 10_000.0,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_out_multiplier": 1.0,
        "tie_word_embeddings": False,
    },
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma3_text": {"sliding_window": 4096},
    "gemma4_text": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    | {"hidden_size_per_layer_input": 0},
    "glm": {"tie_word_embeddings": False, "attention_bias": True},
    "glm4_moe_lite": {"rope_theta": 10_000.0},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "granite": {"tie_word_embeddings": False, "rope_theta": 10_000.0},
    "granitemoe": {"tie_word_embeddings": False},
    "granitemoehybrid": {"tie_word_embeddings": False, "time_step_limit": [0.0, INFINITY]},
    "iquestcoder": {"tie_word_embeddings": False},
    "jamba": {"tie_word_embeddings": False},
    "kimi_linear": {"num_experts_per_token": 8, "routed_scaling_factor": 2.446},
    "llama": {"tie_word_embeddings": False},
    # transformers knows no other attention, experts that pass through alone, and always scales.
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mimo_v2_flash": {"attention_value_scale": 0.707},
    # MiniCPM's first file has no base: its own code, which transformers lacks, takes 10,000.
    "minicpm": {"rope_theta": 10_000.0},
    "minicpm3": {"rope_theta": 10_000.0, "tie_word_embeddings": True},
    "minimax_m2": {"shared_intermediate_size": 0},
    "ministral3": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "num_attention_heads": 32},
    "olmo": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},  # OLMo's norms have this by nature
    "olmo2": {"tie_word_embeddings": False},
    "olmoe": {"tie_word_embeddings": False},
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "qwen2": {"tie_word_embeddings": False, "rope_theta": 10_000.0},
    "qwen2_moe": {"rope_theta": 10_000.0},
    "qwen3": {"rope_theta": 10_000.0},
    "qwen3_moe": {"rope_theta": 10_000.0},
    "qwen3_next": {"norm_topk_prob": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "seed_oss": {"tie_word_embeddings": False, "attention_bias": True},
    "smollm3": {"rope_theta": 2_000_000.0},
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
    "starcoder2": {"rope_theta": 10_000.0},
    "step3p5": {"moe_router_scaling_factor": 1.0},
    "vaultgemma": {"rms_norm_eps": 1e-6, "sliding_window": 4096},
}

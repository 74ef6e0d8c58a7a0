"""mlx-lm's model files, each with a tiny configuration."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "max_position_embeddings": 1000,
}
_GATED_DELTA = {
    **_SIZES,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "baichuan_m1": {**_SIZES, "sliding_window": 12, "sliding_window_layers": [0, 2], "conv_window": 2},
    "falcon_h1": {
        **_SIZES,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "jamba": {
        **_SIZES,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {
        **_SIZES,
        "norm_eps": 1e-5,
        "full_attn_idxs": [0, 2],
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_ffn_dim_multiplier": 1.5,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 32,
        "conv_bias": True,
        "conv_L_cache": 3,
    },
    "mamba2": {
        **_SIZES,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 32,
        "layer_norm_epsilon": 1e-4,
        "conv_kernel": 3,
        "n_groups": 4,
        "use_bias": False,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
        "time_step_limit": (0.01, 10),
        "time_step_rank": "auto",
    },
    "nemotron_h": {
        **_SIZES,
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 3,
        "n_groups": 4,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-4,
        "use_bias": True,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["*", "M", "-", "*", "M"],
        "num_hidden_layers": 5,
    },
    "qwen3_5": _GATED_DELTA,
    "qwen3_next": {
        **_GATED_DELTA,
        **_MOE,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [0],
    },
}

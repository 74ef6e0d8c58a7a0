"""Models with layers that keep a state instead of keys and values."""

from __future__ import annotations

from tests.models.mlx_lm_files.model_file import ModelFile

RECURRENT: dict[str, ModelFile] = {
    "baichuan_m1": ModelFile({"sliding_window_layers": [0, 2], "conv_window": 2}),
    "bailing_hybrid": ModelFile({"layer_group_size": 2, "group_norm_size": 1}),
    "bailing_moe_linear": ModelFile({"layer_group_size": 2, "group_norm_size": 1}),
    "bailing_moe_v3": ModelFile(),
    "falcon_h1": ModelFile({"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}),
    "gear": ModelFile({"layer_types": ["full_attention", "conv_mixer", "sliding_attention", "conv_mixer"]}),
    "granitemoehybrid": ModelFile(
        {
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "mamba_n_heads": 16,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
        }
    ),
    "jamba": ModelFile(
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
        }
    ),
    "kimi_k3": ModelFile(
        {
            "text_config": {
                "vocab_size": 200,
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000.0,
                "max_position_embeddings": 1000,
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "qk_rope_head_dim": 32,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
                "linear_attn_config": {
                    "num_heads": 4,
                    "head_dim": 32,
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2, 4],
                    "short_conv_kernel_size": 4,
                },
                "num_experts": 4,
                "num_experts_per_token": 2,
                "moe_intermediate_size": 64,
                "num_shared_experts": 1,
                "attn_res_block_size": 2,
                "routed_expert_hidden_size": 64,
                "activation_situ_beta": 1.0,
                "activation_situ_linear_beta": 1.0,
            }
        }
    ),
    "kimi_linear": ModelFile(
        {"linear_attn_config": {"num_heads": 8, "head_dim": 32, "kda_layers": [1]}, "model_max_length": 1000}
    ),
    "lfm2": ModelFile(
        {
            "full_attn_idxs": [0, 2],
            "block_dim": 128,
            "block_ffn_dim_multiplier": 1.5,
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "conv_bias": True,
            "conv_L_cache": 3,
        }
    ),
    "lfm2-vl": ModelFile(
        {
            "text_config": {
                "vocab_size": 200,
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000.0,
                "max_position_embeddings": 1000,
                "model_type": "lfm2",
                "norm_eps": 1e-05,
                "conv_bias": False,
                "conv_L_cache": 3,
                "block_dim": 128,
                "block_ff_dim": 128,
                "block_multiple_of": 4,
                "block_ffn_dim_multiplier": 2,
                "block_auto_adjust_ff_dim": True,
                "layer_types": ["full_attention", "", "full_attention", ""],
            }
        }
    ),
    "lfm2_moe": ModelFile(
        {
            "full_attn_idxs": [0, 1, 2],
            "conv_bias": True,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "use_expert_bias": True,
        }
    ),
    "longcat_flash_ngram": ModelFile(
        {
            "zero_expert_type": "identity",
            "ffn_hidden_size": 64,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 64,
            "zero_expert_num": 2,
            "num_layers": 2,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        }
    ),
    "mamba": ModelFile(
        {
            "use_conv_bias": True,
            "conv_kernel": 4,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "time_step_rank": 48,
        }
    ),
    "mamba2": ModelFile(
        {
            "num_heads": 8,
            "state_size": 32,
            "conv_kernel": 3,
            "n_groups": 4,
            "use_conv_bias": False,
            "time_step_limit": [0.01, 10],
            "time_step_rank": "auto",
        }
    ),
    "nemotron_h": ModelFile(
        {
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 32,
            "conv_kernel": 3,
            "n_groups": 4,
            "time_step_limit": [1.0, 2.0],
            "use_conv_bias": True,
            "hybrid_override_pattern": ["*", "M", "-", "*", "M"],
        }
    ),
    "olmo_hybrid": ModelFile({"linear_allow_neg_eigval": True}),
    "qwen3_5": ModelFile(),
    "qwen3_5_moe": ModelFile(),
    "qwen3_next": ModelFile({"decoder_sparse_step": 1, "mlp_only_layers": [0], "partial_rotary_factor": 0.5}),
    "recurrent_gemma": ModelFile(
        {
            "conv1d_width": 3,
            "logits_soft_cap": 1.0,
            "attention_window_size": 12,
            "block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 128,
        }
    ),
    "rwkv7": ModelFile({"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16}),
}

"""mlx-lm's model files, each with a tiny configuration and what becomes of it on the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Entries that a file's arguments do not know are left out by mlx-lm.
COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-05,
    "layer_norm_eps": 1e-05,
    "layer_norm_epsilon": 1e-05,
    "norm_eps": 1e-05,
    "rope_theta": 1000.0,
    "max_position_embeddings": 1000,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "sliding_window": 12,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "moe_shared_expert_intermediate_size": 64,
    "max_seq_len": 1000,
}


@dataclass(frozen=True)
class ModelFile:
    """A file of mlx-lm.

    Args:
        entries: of config.json, besides `COMMON`.
        refused: what the refusal says; None for a model that is served.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {**COMMON, **self.entries}


# Not models, or not to be built of a configuration alone.
NOT_BUILT = {
    "olmo": "ends the process where its package is not installed",
    "prism_hadamard_qwen35": "a manifest of packed modules",
}

MODEL_FILES: dict[str, ModelFile] = {
    "Klear": ModelFile({"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "afm7": ModelFile(
        {
            "hidden_dim": 128,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "hidden_dim_scale_factor": 1.0,
        },
        refused="'Handle' object has no attribute 'shape'",
    ),  # reads the shape of cached keys
    "afmoe": ModelFile({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    "apertus": ModelFile({"post_norm": True, "qk_norm": True}),
    "baichuan_m1": ModelFile({"sliding_window_layers": [0, 2], "conv_window": 2}),
    "bailing_hybrid": ModelFile({"layer_group_size": 2, "group_norm_size": 1}),
    "bailing_moe": ModelFile(),
    "bailing_moe_linear": ModelFile({"layer_group_size": 2, "group_norm_size": 1}),
    "bailing_moe_v3": ModelFile(),
    "bitnet": ModelFile(refused="No Metal back-end"),  # kernels for Metal only
    "cohere": ModelFile(),
    "cohere2": ModelFile({"sliding_window_pattern": 4}),
    "dbrx": ModelFile(
        {
            "d_model": 128,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1000},
            "n_layers": 2,
            "n_heads": 4,
        }
    ),
    "deepseek": ModelFile(),
    "deepseek_v2": ModelFile(
        {
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            }
        }
    ),
    "deepseek_v3": ModelFile(
        {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_scaling": None}
    ),
    "deepseek_v32": ModelFile(
        {
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            }
        },
        refused="has no attribute 'keys'",
    ),  # a sparse indexer reads cached keys
    "deepseek_v41": ModelFile(
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 64,
            "o_groups": 2,
            "o_lora_rank": 32,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 4,
            "compress_ratios": [0, 0],
            "kv_source_layer_ids": [0, 1],
            "index_source_layer_ids": [0, 1],
        },
        refused="layer 0 keeps a LayerCache",
    ),  # caches of its own
    "dots1": ModelFile(),
    "ernie4_5": ModelFile(),
    "ernie4_5_moe": ModelFile({"moe_num_experts": 4}),
    "exaone": ModelFile({"num_layers": 4}),
    "exaone4": ModelFile({"rope_scaling": None, "sliding_window_pattern": "LLGL"}),
    "exaone_moe": ModelFile(
        {
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "is_moe_layer": [False, True, True, True],
        }
    ),
    "falcon_h1": ModelFile({"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}),
    "gear": ModelFile({"layer_types": ["full_attention", "conv_mixer", "sliding_attention", "conv_mixer"]}),
    "gemma": ModelFile(),
    "gemma2": ModelFile(),
    "gemma3": ModelFile(
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
                "model_type": "gemma3_text",
                "sliding_window": 12,
                "sliding_window_pattern": 2,
            }
        }
    ),
    "gemma3_text": ModelFile({"sliding_window_pattern": 2}),
    "gemma3n": ModelFile(
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
                "model_type": "gemma3n",
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 200,
                "sliding_window": 8,
                "rope_local_base_freq": 100.0,
                "final_logit_softcapping": 1.0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "activation_sparsity_pattern": [0.5, 0.5, 0.5, 0.5],
                "hidden_size_per_layer_input": 32,
                "altup_num_inputs": 4,
                "altup_coef_clip": 1.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            }
        }
    ),
    "gemma4": ModelFile(
        {
            "text_config": {
                "vocab_size": 200,
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000.0,
                "max_position_embeddings": 1000,
                "model_type": "gemma4_text",
                "global_head_dim": 64,
                "vocab_size_per_layer_input": 200,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 32,
                "sliding_window": 8,
                "sliding_window_pattern": 3,
                "final_logit_softcapping": 30.0,
                "layer_types": [
                    "sliding_attention",
                    "sliding_attention",
                    "full_attention",
                    "sliding_attention",
                    "sliding_attention",
                    "full_attention",
                ],
                "rope_parameters": {
                    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_theta": 10000.0},
                },
            }
        }
    ),
    "gemma4_text": ModelFile(
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": 200,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 30.0,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_theta": 10000.0},
            },
        }
    ),
    "glm": ModelFile(),
    "glm4": ModelFile({"partial_rotary_factor": 0.5}),
    "glm4_moe": ModelFile({"rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": ModelFile(
        {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_scaling": None,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 1,
        }
    ),
    "glm_moe_dsa": ModelFile(
        {
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 8,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": {"rope_theta": 1000.0},
        },
        refused="has no attribute 'keys'",
    ),  # a sparse indexer
    "gpt2": ModelFile({"n_ctx": 1000, "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 1000}),
    "gpt_bigcode": ModelFile(
        {"n_embd": 128, "n_layer": 2, "n_inner": 128, "n_head": 4, "n_positions": 1000},
        refused="Only length-1 arrays can be converted",
    ),  # one position for all rows of a batch
    "gpt_neox": ModelFile({"rotary_emb_base": 1000, "rotary_pct": 0.5}),
    "gpt_oss": ModelFile(
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
    ),
    "gptj": ModelFile({"n_embd": 128, "n_head": 4, "rotary_dim": 16, "n_layer": 2}),
    "granite": ModelFile(
        {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    ),
    "granitemoe": ModelFile(
        {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    ),
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
    "helium": ModelFile(),
    "hunyuan": ModelFile(
        {
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
            "use_cla": True,
            "cla_share_factor": 2,
        }
    ),
    "hunyuan_v1_dense": ModelFile(
        {
            "use_qk_norm": True,
            "rope_scaling": {
                "alpha": 1000.0,
                "factor": 1.0,
                "type": "dynamic",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "original_max_position_embeddings": 8192,
            },
        }
    ),
    "internlm2": ModelFile(),
    "internlm3": ModelFile(),
    "iquestloopcoder": ModelFile({"num_hidden_layers": 2, "loop_num": 2, "loop_window_size": 12}),
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
    "kimi_k25": ModelFile(
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
                "moe_intermediate_size": 64,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "moe_layer_freq": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "rope_scaling": None,
                "model_type": "kimi_k2",
            }
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
    "kimi_vl": ModelFile(
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
                "moe_intermediate_size": 64,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "moe_layer_freq": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "rope_scaling": None,
            }
        }
    ),
    "laguna": ModelFile(
        {
            "partial_rotary_factor": 0.5,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_score_func": "sqrtsoftplus",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_attention_heads_per_layer": [4, 4, 4, 4],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 4096,
                    "beta_slow": 1.0,
                    "beta_fast": 32.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        }
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
    "lille-130m": ModelFile({"block_size": 128, "n_layer": 4, "n_head": 4, "n_kv_heads": 4, "n_embd": 128}),
    "llama": ModelFile({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    "llama4": ModelFile(
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
                "model_type": "llama4",
                "attention_bias": False,
                "attention_chunk_size": 8,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
                "num_local_experts": 2,
                "rope_scaling": None,
                "use_qk_norm": True,
            }
        },
        refused="layer 0 keeps a ChunkedKVCache",
    ),  # attention in chunks
    "llama4_text": ModelFile({"intermediate_size_mlp": 128, "no_rope_layers": [0, 0, 1, 1], "use_qk_norm": True}),
    "longcat_flash": ModelFile(
        {
            "attention_method": "MLA",
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
    "mellum": ModelFile(
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            },
        }
    ),
    "mimo": ModelFile(),
    "mimo_v2_flash": ModelFile(
        {
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": 12,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-05,
            "swa_rope_theta": 1000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "partial_rotary_factor": 0.5,
        }
    ),
    "minicpm": ModelFile({"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}),
    "minicpm3": ModelFile(
        {
            "dim_model_base": 64,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "rope_scaling": {
                "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                "original_max_position_embeddings": 1000,
            },
        }
    ),
    "minimax": ModelFile({"rotary_dim": 16}),
    "minimax_m3_vl": ModelFile(
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
                "dense_intermediate_size": 64,
                "shared_intermediate_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rotary_dim": 16,
                "sparse_attention_freq": [0, 1, 1, 1],
                "index_n_heads": 2,
                "index_head_dim": 32,
                "index_block_size": 8,
                "index_topk_blocks": 2,
            }
        },
        refused="has no attribute 'keys'",
    ),  # a sparse indexer
    "ministral3": ModelFile(
        {
            "rope_parameters": {
                "rope_theta": 1000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
                "type": "default",
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        }
    ),
    "mistral3": ModelFile(
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
                "model_type": "llama",
            }
        }
    ),
    "mistral4": ModelFile(
        {
            "rope_parameters": {
                "rope_theta": 1000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
                "type": "default",
            }
        }
    ),
    "mixtral": ModelFile(),
    "muse_glimmer": ModelFile(),
    "muse_spark": ModelFile(
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
                "post_norm_eps": 1e-05,
                "rope_parameters": {"rope_theta": 1000.0},
                "layer_rope_theta": [1000.0, 0, 1000.0, 0],
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 12,
                "final_logit_softcapping": 20.0,
                "output_multiplier": 0.2,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 64,
                "moe_intermediate_size": 64,
            }
        },
        refused="No Metal back-end",
    ),  # kernels for Metal only
    "nanbeige": ModelFile({"num_loops": 2}),
    "nanochat": ModelFile({"num_hidden_layers": 2}),
    "nemotron": ModelFile({"hidden_act": "gelu"}),
    "nemotron-nas": ModelFile(
        {
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            ]
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
    "olmo2": ModelFile(),
    "olmo3": ModelFile(),
    "olmo_hybrid": ModelFile({"linear_allow_neg_eigval": True}),
    "olmoe": ModelFile(),
    "openelm": ModelFile(
        {
            "ffn_dim_divisor": 32,
            "ffn_multipliers": [1.0, 2.0],
            "model_dim": 128,
            "normalize_qk_projections": True,
            "num_kv_heads": [2, 2],
            "num_query_heads": [4, 4],
            "num_transformer_layers": 2,
        }
    ),
    "phi": ModelFile({"partial_rotary_factor": 0.5}),
    "phi3": ModelFile(),
    "phi3small": ModelFile(
        {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 256, "gegelu_limit": 1.0, "num_hidden_layers": 2},
        refused="expand_dims",
    ),  # block-sparse attention
    "phimoe": ModelFile(
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                "short_mscale": 1.0,
                "long_mscale": 1.1,
                "original_max_position_embeddings": 512,
            }
        }
    ),
    "phixtral": ModelFile({"num_vocab": 200, "model_dim": 128, "num_heads": 4, "num_layers": 2, "rotary_dim": 16}),
    "pixtral": ModelFile(
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
                "model_type": "llama",
            }
        }
    ),
    "plamo": ModelFile({"n_shared_head": 2}, refused="tile"),  # repeats cached keys
    "plamo2": ModelFile(refused="incompatible function arguments"),  # calls MLX's attention itself
    "plamo3": ModelFile(
        {"window_size": 12, "sliding_window_pattern": 2}, refused="window is 12, the model asks for 13"
    ),  # its mask's window is not its cache's
    "qwen": ModelFile({"kv_channels": 32}),
    "qwen2": ModelFile(),
    "qwen2_moe": ModelFile(),
    "qwen2_vl": ModelFile(
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
                "model_type": "qwen2",
            }
        }
    ),
    "qwen3": ModelFile(),
    "qwen3_5": ModelFile(),
    "qwen3_5_moe": ModelFile(),
    "qwen3_moe": ModelFile({"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3_next": ModelFile({"decoder_sparse_step": 1, "mlp_only_layers": [0], "partial_rotary_factor": 0.5}),
    "qwen3_vl": ModelFile(
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
                "model_type": "qwen3",
                "tie_word_embeddings": False,
            }
        }
    ),
    "qwen3_vl_moe": ModelFile(
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
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [0],
                "norm_topk_prob": True,
                "tie_word_embeddings": False,
            }
        }
    ),
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
    "seed_oss": ModelFile(),
    "smollm3": ModelFile(),
    "spark2_5": ModelFile(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            }
        }
    ),
    "stablelm": ModelFile({"partial_rotary_factor": 1.0}),
    "starcoder2": ModelFile(),
    "step3p5": ModelFile(
        {
            "num_attention_groups": 2,
            "rope_theta": [1000.0, 1000.0, 1000.0, 1000.0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
            "use_head_wise_attn_gate": True,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 64,
            "moe_layers_enum": "1,2,3",
        }
    ),
    "talkie": ModelFile(),
    "telechat3": ModelFile(),
    "youtu_llm": ModelFile({"num_hidden_layers": 2}),
}

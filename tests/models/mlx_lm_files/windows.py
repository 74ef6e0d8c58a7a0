"""Models with layers that see a window of the last tokens."""

from __future__ import annotations

from tests.models.mlx_lm_files.model_file import ModelFile

WINDOWS: dict[str, ModelFile] = {
    "afmoe": ModelFile({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    "cohere2": ModelFile({"sliding_window_pattern": 4}),
    "exaone4": ModelFile({"rope_scaling": None, "sliding_window_pattern": "LLGL"}),
    "exaone_moe": ModelFile(
        {
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "is_moe_layer": [False, True, True, True],
        }
    ),
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
    "gpt_oss": ModelFile(
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
    ),
    "iquestloopcoder": ModelFile({"num_hidden_layers": 2, "loop_num": 2, "loop_window_size": 12}),
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
    "llama": ModelFile({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    "mellum": ModelFile(
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            },
        }
    ),
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
    "muse_glimmer": ModelFile(),
    "olmo3": ModelFile(),
    "spark2_5": ModelFile(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            }
        }
    ),
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
}

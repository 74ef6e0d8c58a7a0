"""Models that cache latents (MLA)."""

from __future__ import annotations

from tests.models.mlx_lm_files.model_file import ModelFile

LATENTS: dict[str, ModelFile] = {
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
    "youtu_llm": ModelFile({"num_hidden_layers": 2}),
}

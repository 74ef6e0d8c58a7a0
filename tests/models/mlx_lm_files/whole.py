"""Models whose layers cache the keys and values of all tokens."""

from __future__ import annotations

from tests.models.mlx_lm_files.model_file import ModelFile

WHOLE: dict[str, ModelFile] = {
    "Klear": ModelFile({"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "apertus": ModelFile({"post_norm": True, "qk_norm": True}),
    "bailing_moe": ModelFile(),
    "cohere": ModelFile(),
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
    "dots1": ModelFile(),
    "ernie4_5": ModelFile(),
    "ernie4_5_moe": ModelFile({"moe_num_experts": 4}),
    "exaone": ModelFile({"num_layers": 4}),
    "gemma": ModelFile(),
    "gemma2": ModelFile(),
    "glm": ModelFile(),
    "glm4": ModelFile({"partial_rotary_factor": 0.5}),
    "glm4_moe": ModelFile({"rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "gpt2": ModelFile({"n_ctx": 1000, "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 1000}),
    "gpt_neox": ModelFile({"rotary_emb_base": 1000, "rotary_pct": 0.5}),
    "gptj": ModelFile({"n_embd": 128, "n_head": 4, "rotary_dim": 16, "n_layer": 2}),
    "granite": ModelFile(
        {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    ),
    "granitemoe": ModelFile(
        {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
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
    "lille-130m": ModelFile({"block_size": 128, "n_layer": 4, "n_head": 4, "n_kv_heads": 4, "n_embd": 128}),
    "llama4_text": ModelFile({"intermediate_size_mlp": 128, "no_rope_layers": [0, 0, 1, 1], "use_qk_norm": True}),
    "mimo": ModelFile(),
    "minicpm": ModelFile({"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}),
    "minimax": ModelFile({"rotary_dim": 16}),
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
    "mixtral": ModelFile(),
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
    "olmo2": ModelFile(),
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
    "qwen3_moe": ModelFile({"decoder_sparse_step": 1, "mlp_only_layers": []}),
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
    "seed_oss": ModelFile(),
    "smollm3": ModelFile(),
    "stablelm": ModelFile({"partial_rotary_factor": 1.0}),
    "starcoder2": ModelFile(),
    "talkie": ModelFile(),
    "telechat3": ModelFile(),
}

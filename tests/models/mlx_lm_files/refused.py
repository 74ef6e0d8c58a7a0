"""Models that are refused, and what the refusal says."""

from __future__ import annotations

from tests.models.mlx_lm_files.model_file import ModelFile

REFUSED: dict[str, ModelFile] = {
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
    "bitnet": ModelFile(refused="No Metal back-end"),  # kernels for Metal only
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
    "gpt_bigcode": ModelFile(
        {"n_embd": 128, "n_layer": 2, "n_inner": 128, "n_head": 4, "n_positions": 1000},
        refused="Only length-1 arrays can be converted",
    ),  # one position for all rows of a batch
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
    "phi3small": ModelFile(
        {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 256, "gegelu_limit": 1.0, "num_hidden_layers": 2},
        refused="expand_dims",
    ),  # block-sparse attention
    "plamo": ModelFile({"n_shared_head": 2}, refused="tile"),  # repeats cached keys
    "plamo2": ModelFile(refused="incompatible function arguments"),  # calls MLX's attention itself
    "plamo3": ModelFile(
        {"window_size": 12, "sliding_window_pattern": 2}, refused="window is 12, the model asks for 13"
    ),  # its mask's window is not its cache's
}

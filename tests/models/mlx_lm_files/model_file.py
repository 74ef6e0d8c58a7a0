"""What the tables of this folder are made of."""

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

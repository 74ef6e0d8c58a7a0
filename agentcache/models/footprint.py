"""What a step takes beside weights and cache, and what there is: on a Mac, a command buffer that runs out of memory
ends the process, so a step that would not fit must not be started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.spec import CacheSpec, LayerSpec
from agentcache.sizes import total_ram

_FLOAT = 4  # bytes; half-precision models take less
_HIDDEN_COPIES = 8  # of the hidden state alive at a time: residual, norm, projections
_LOGIT_COPIES = 3  # as given, in float32, normalised
_SCORE_COPIES = 4  # raw, masked, with sinks, normalised


@dataclass(frozen=True)
class Footprint:
    """Upper estimate of a step's temporaries, those of the largest layer at a time.

    Args:
        fused: scores of a chunk are never all in memory (flash attention).
    """

    spec: CacheSpec
    hidden: int
    intermediate: int
    vocab: int
    fused: bool

    @classmethod
    def of(cls, spec: CacheSpec, config: dict[str, Any]) -> Footprint:
        """From a model's config.json."""
        sizes = config | (config.get("text_config") or {})
        wide = max(sizes.get(name) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
        experts = max(sizes.get(name) or 1 for name in ("num_experts_per_tok", "num_experts_per_token"))
        return cls(spec, sizes["hidden_size"], wide * experts, sizes["vocab_size"], mx.default_device() == mx.gpu)

    def step_bytes(self, contexts: Sequence[int], num_tokens: int, *, all_logits: bool = False) -> int:
        """Bytes for a step of `num_tokens` tokens in rows that hold `contexts` tokens."""
        rows = len(contexts)
        activations = rows * num_tokens * (_HIDDEN_COPIES * self.hidden + 3 * self.intermediate) * _FLOAT
        logits = rows * (num_tokens if all_logits else 1) * self.vocab * _LOGIT_COPIES * _FLOAT
        return activations + logits + max(self._attention_bytes(layer, contexts, num_tokens) for layer in self._kinds)

    @cached_property
    def _kinds(self) -> set[LayerSpec]:
        """The layers, those that differ in nothing but their place taken as one."""
        return {replace(layer, index=0) for group in self.spec.groups for layer in group.layers}

    def _attention_bytes(self, layer: LayerSpec, contexts: Sequence[int], num_tokens: int) -> int:
        keys = sum(context if layer.window is None else min(context, layer.window) for context in contexts)
        keys += len(contexts) * (num_tokens + BLOCK_SIZE)
        unpacked = keys * layer.num_kv_heads * (layer.key_dim + layer.value_dim) * 2 * _FLOAT
        scores = self.spec.num_attention_heads * num_tokens * keys * _SCORE_COPIES * _FLOAT
        return unpacked + (0 if self.fused and num_tokens > 1 else scores)


def free_memory() -> int:
    """Bytes that the device can still allocate."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        limit = info.get("max_recommended_working_set_size") or info.get("total_memory") or total_ram()
        return int(limit) - mx.get_active_memory()
    return _available_ram() + mx.get_cache_memory()


def _available_ram() -> int:
    """What the machine, and the container where there is one, still have."""
    free = total_ram() - mx.get_active_memory()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return free
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), free // 1024)
    return min(free, kilobytes * 1024)

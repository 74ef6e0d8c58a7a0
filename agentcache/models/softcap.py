"""Attention with capped scores (Gemma 2), which mlx-lm computes inside the module, from keys as arrays.

The module cannot take handles, so with a step cache its parts are computed here.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.kv.step_cache import StepCache
from agentcache.models.attention import AttentionOptions, paged_attention
from agentcache.models.observation import observe
from agentcache.models.residual.attention import overlaid_attention

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rope")
_SIZES = ("n_heads", "n_kv_heads", "scale", "attn_logit_softcapping")


def is_capped(module: nn.Module) -> bool:
    """Whether a module is Gemma 2's attention, or has exactly its parts."""
    has_parts = all(part in module for part in _PARTS) and set(module.children()) == set(_PARTS)
    return has_parts and all(getattr(module, size, None) for size in _SIZES)


@functools.cache
def _on_step_caches(kind: Any) -> Any:
    class CappedAttention(kind):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            if not isinstance(cache, StepCache):
                return observe(super().__call__(x, mask, cache))
            options = AttentionOptions(self.scale, self.attn_logit_softcapping)
            queries, keys, values = (
                projected.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
                for projected, heads in (
                    (self.q_proj(x), self.n_heads),
                    (self.k_proj(x), self.n_kv_heads),
                    (self.v_proj(x), self.n_kv_heads),
                )
            )
            queries, keys = (self.rope(each, offset=cache.offset) for each in (queries, keys))
            kv = cache.update(keys, values)
            if kv.residual_kv is None:
                out = paged_attention(queries, kv, options)
            else:
                out = overlaid_attention(queries, kv.arena, kv.residual_kv, options)
            return observe(self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)))

    return CappedAttention


def adapt(layer: nn.Module) -> None:
    """Make a layer's capped attention accept step caches; other caches stay usable."""
    for module in layer.modules():
        if is_capped(module):
            kind: Any = type(module)
            module.__class__ = _on_step_caches(kind)

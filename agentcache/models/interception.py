"""mlx-lm's attention on the paged cache. Modules stay; the function that they call is replaced.

`StepCache.update_and_fetch` returns handles, which modules pass to `attention`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import replace_attention, scaled_dot_product_attention
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_cache import Handle
from agentcache.models.attention import AttentionOptions, paged_attention
from agentcache.models.mla import latent_attention
from agentcache.models.observation import observe
from agentcache.models.residual.attention import overlaid_attention


def intercept(model: nn.Module) -> None:
    """Replace mlx-lm's attention in the files of the model's modules."""
    replace_attention(model, attention)


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
    **others: Any,
) -> mx.array:
    """`mlx_lm.models.base.scaled_dot_product_attention` that also takes handles; returns [B, H_q, n, D_v].

    Args:
        queries: [B, H_q, n, D_k].
        keys, values: arrays, or handles of a step's cache.
        mask: None with handles, which have their own; for MLA see `latent_attention`.
    """
    return observe(_attention(queries, keys, values, cache, scale, mask, sinks, others))


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    others: dict[str, Any],
) -> mx.array:
    if not isinstance(values, Handle):
        if isinstance(keys, Handle):
            raise BrokenInvariant("cached keys with values that are not")
        given = {"scale": scale, "mask": mask, "sinks": sinks, **others}
        return scaled_dot_product_attention(queries, keys, values, cache=cache, **given)
    if others:
        raise BrokenInvariant(f"paged attention knows nothing of {', '.join(others)}")
    if values.kv.arena.values is None:
        if sinks is not None:
            raise BrokenInvariant("latent attention knows nothing of sinks")
        return latent_attention(queries, keys, values, scale, mask)
    if keys is not values:
        raise BrokenInvariant("keys of one layer with values of another")
    if mask is not None:
        raise BrokenInvariant("the model masks by itself, beside what its cache says")
    options = AttentionOptions(scale, None, sinks)
    if values.kv.residual_kv is not None:
        return overlaid_attention(queries, values.kv.arena, values.kv.residual_kv, options)
    return paged_attention(queries, values.kv, options)

"""The function that replaces mlx-lm's attention: modules pass it `StepCache`'s handles.

Define no class in this file: `replace_attention` would replace mlx-lm's function here, too.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import replace_attention, scaled_dot_product_attention
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_cache import Handle, PagedKV
from agentcache.models.attention import AttentionOptions, paged_attention
from agentcache.models.layers import observe
from agentcache.models.mla import latent_attention
from agentcache.models.residual.attention import overlaid_attention


def intercept(model: nn.Module) -> None:
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
    """`mlx_lm.models.base.scaled_dot_product_attention`, also of handles; [B, H_q, n, D_v].

    With handles `mask` is None, but for MLA (`latent_attention`).
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
            raise BrokenInvariant("cached keys with values that are not cached")
        given = {"scale": scale, "mask": mask, "sinks": sinks, **others}
        return scaled_dot_product_attention(queries, keys, values, cache=cache, **given)
    if others:
        raise BrokenInvariant(f"paged attention does not support {', '.join(others)}")
    if values.kv.arena.values is None:
        if sinks is not None:
            raise BrokenInvariant("latent attention does not support sinks")
        return latent_attention(queries, keys, values, scale, mask)
    if keys is not values:
        raise BrokenInvariant("keys of one layer with values of another")
    if mask is not None:
        raise BrokenInvariant("the model passes a mask of its own")
    return attend(queries, values.kv, AttentionOptions(scale, None, sinks))


def attend(queries: mx.array, kv: PagedKV, options: AttentionOptions) -> mx.array:
    """`paged_attention`, also of rows with residuals."""
    if kv.residual_kv is not None:
        return overlaid_attention(queries, kv.arena, kv.residual_kv, options)
    return paged_attention(queries, kv, options)

"""mlx-lm's attention on the paged cache: its modules stay as they are, the function that they call is replaced.

A model's caches (`StepCache`) answer `update_and_fetch` with handles instead of arrays. mlx-lm's modules hand these to
`scaled_dot_product_attention`, a name that each of its files has imported; there it is replaced by `attention`, which
answers handles with `paged_attention` and passes everything else on. Nothing else changes for anybody in the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from agentcache.errors import BrokenInvariant
from agentcache.kv.step_cache import Handle
from agentcache.models.attention import AttentionOptions, paged_attention
from agentcache.models.mla import latent_attention
from agentcache.models.observation import observe
from agentcache.models.residual_attention import overlaid_attention

_NAME = "scaled_dot_product_attention"
_ORIGINAL = base.scaled_dot_product_attention


def intercept(model: nn.Module) -> None:
    """Replace the function in the files that the model's modules come from, where that is not done yet.

    Setting a module's attribute is atomic and `attention` does for arrays what the original does, so that a thread that
    runs another model meanwhile sees no difference.
    """
    for file in _files(model):
        if getattr(file, _NAME, None) is _ORIGINAL:
            setattr(file, _NAME, attention)


def _files(model: nn.Module) -> Iterator[ModuleType]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds} - {base.__name__}
    return (sys.modules[name] for name in sorted(names) if name in sys.modules)


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
    """`mlx_lm.models.base.scaled_dot_product_attention`, which also takes handles.

    Args:
        queries: [B, H_q, n, D_k].
        keys, values: arrays, or the handles of a step's cache.
        mask: none with handles, which know what the step's rows attend to; with MLA's, see `latent_attention`.

    Returns:
        [B, H_q, n, D_v].
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
        return _ORIGINAL(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **others)
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
    if values.kv.overlay is not None:
        return overlaid_attention(queries, values.kv.arena, values.kv.overlay, options)
    return paged_attention(queries, values.kv, options)

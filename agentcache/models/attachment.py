"""Put a model on the paged cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.kv.packing import LayerBits, Precision
from agentcache.kv.spec import CacheSpec
from agentcache.kv.step_cache import StepCache
from agentcache.models import mla
from agentcache.models.attention import AttentionOptions
from agentcache.models.inspection import Inspection, inspect_model
from agentcache.models.interception import attend, intercept
from agentcache.models.layers import observe
from agentcache.models.proof import Proof

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rope")
_SIZES = ("n_heads", "n_kv_heads", "scale", "attn_logit_softcapping")


@dataclass(frozen=True)
class Hosted:
    """A model on the paged cache."""

    inspection: Inspection
    spec: CacheSpec


ChoosePrecision = Callable[[nn.Module, Inspection], Precision]


@dataclass(frozen=True)
class Everywhere:
    """The same bits in all layers."""

    bits: LayerBits = LayerBits()

    def __call__(self, model: nn.Module, inspection: Inspection) -> Precision:
        return Precision((self.bits,) * len(inspection.layers))


IN_FOUR_BITS = Everywhere()


def host(
    model: nn.Module,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool = True,
    choose: ChoosePrecision = IN_FOUR_BITS,
    within: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext(),
    adapted: Inspection | None = None,
) -> Hosted:
    """Make a model run on step caches, or one that does (`adapted`) in another precision.

    `choose` and proof run `within` a context. Raises UnsupportedModel, with `check` also if numbers are not mlx-lm's.
    """
    seen = _adapted(model) if adapted is None else adapted
    with within(model):
        *_, hosted = _in_pieces(model, seen, model_type, config, check=check, choose=choose)
    assert hosted is not None
    return hosted


def host_in_pieces(
    model: nn.Module,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool = True,
    choose: ChoosePrecision = IN_FOUR_BITS,
) -> Iterator[Hosted | None]:
    """`host` in pieces: yields None after each, then the result."""
    return _in_pieces(model, _adapted(model), model_type, config, check=check, choose=choose)


def _adapted(model: nn.Module) -> Inspection:
    seen = inspect_model(model)
    for layer in model.layers:
        mla.adapt(layer)
        _adapt_capped(layer)
    intercept(model)
    return seen


def _in_pieces(
    model: nn.Module,
    seen: Inspection,
    model_type: str,
    config: dict[str, Any],
    *,
    check: bool,
    choose: ChoosePrecision,
) -> Iterator[Hosted | None]:
    seen = seen.kept_in(choose(model, seen))
    spec = seen.spec(model_type, config)
    if check:
        for _ in Proof(model, seen).pieces():
            yield None
    yield Hosted(seen, spec)


def is_capped(module: nn.Module) -> bool:
    """Whether a module has exactly the parts of Gemma 2's attention, which caps scores itself, from keys as arrays."""
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
            out = attend(queries, kv, options)
            return observe(self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)))

    return CappedAttention


def _adapt_capped(layer: nn.Module) -> None:
    for module in layer.modules():
        if is_capped(module):
            kind: Any = type(module)
            module.__class__ = _on_step_caches(kind)

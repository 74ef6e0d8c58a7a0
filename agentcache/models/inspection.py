"""Find what a model caches by running mlx-lm's own modules on a few tokens.

Only shapes are inspected, nothing is evaluated: the model's size does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import ArraysCache, CacheList, DynamicNTKScalingRoPE, RotatingKVCache
from agentcache.errors import UnsupportedModel
from agentcache.kv.packing import UNQUANTISED_BITS, LayerBits, LayerPacking, Packing, Plain, Precision, quantisation_for
from agentcache.kv.spec import CacheSpec, LayerSpec, RecurrentSpec, StateTensor, make_groups
from agentcache.models.layers import layer_lists
from agentcache.models.mla import Latent
from agentcache.models.traced_run import Run, Seen, watch_run

_HEADS = ("n_heads", "num_attention_heads", "num_heads", "n_head")


@dataclass(frozen=True)
class Paged:
    """Place of a KV cache among a model's caches; `layer` is an index into `Inspection.layers`."""

    layer: int


@dataclass(frozen=True)
class Recurrent:
    """Place of a state; `cache` is an index into `Inspection.recurrent`."""

    cache: int


# None: a cache that the model does not use. A tuple: mlx-lm's CacheList.
CacheRef = Paged | Recurrent | tuple[Any, ...] | None


@dataclass(frozen=True)
class Inspection:
    """A model's caches.

    Args:
        refs: places of caches, in the model's order.
        layers, recurrent: KV caches and states, in order of computation.
        latents: MLA's latent for each of `layers`; None for other attention.
        dtypes: type that the keys of each of `layers` are computed in.
        hidden_bytes: bytes per token between layers; 0 if layers cannot be skipped: they keep a state, do not run once
            each in order, or give more than hidden states.
        linears: whether all calls follow the layer's cache writes, by layer and path of linears called token by token.
        final_norm: owner and name of the first norm after the last layer; None without one.
    """

    refs: tuple[CacheRef, ...]
    layers: tuple[LayerSpec, ...]
    recurrent: tuple[RecurrentSpec, ...]
    latents: tuple[Latent | None, ...]
    dtypes: tuple[mx.Dtype, ...]
    num_heads: int
    hidden_bytes: int
    linears: Mapping[tuple[int, str], bool]
    final_norm: tuple[nn.Module, str] | None
    precision: Precision

    def kept_in(self, precision: Precision) -> Inspection:
        return replace(self, precision=precision)

    @cached_property
    def packings(self) -> tuple[LayerPacking, ...]:
        """Packing by layer; raises UnsupportedModel if heads cannot be quantised in groups."""
        layers = zip(self.precision.layers, self.dtypes, strict=True)
        return tuple(
            LayerPacking(self._packing(bits.keys, dtype), self._packing(bits.values, dtype)) for bits, dtype in layers
        )

    def _packing(self, bits: int, dtype: mx.Dtype) -> Packing:
        if bits == UNQUANTISED_BITS:
            return Plain("BF16" if dtype == mx.bfloat16 else "F16")
        dims = {dim for layer in self.layers for dim in (layer.key_dim, layer.value_dim) if dim}
        ranks = {latent.rank for latent in self.latents if latent is not None}
        return quantisation_for(*sorted(dims | ranks), bits=bits)

    def spec(self, model_type: str, config: dict[str, Any]) -> CacheSpec:
        groups = make_groups(self.layers, self.packings)
        return CacheSpec(model_type, self.num_heads, groups, _rope_text(config), recurrent=self.recurrent)

    def caches(self, paged: Sequence[Any], states: Sequence[ArraysCache]) -> list[Any]:
        """Caches in the model's order, from those for `layers` and `recurrent`."""
        # A recursive closure's cycle would keep a step's arrays until garbage collection.
        return [_cache_at(ref, paged, states) for ref in self.refs]


def _cache_at(ref: CacheRef, paged: Sequence[Any], states: Sequence[ArraysCache]) -> Any:
    if isinstance(ref, tuple):
        return CacheList(*[_cache_at(inner, paged, states) for inner in ref])
    if isinstance(ref, Paged):
        return paged[ref.layer]
    return None if ref is None else states[ref.cache]


def inspect_model(model: nn.Module) -> Inspection:
    """Run the model once and return what it caches, with keys and values in 4 bits.

    Raises:
        UnsupportedModel: an unknown kind of cache, or the model does not run.
    """
    _check_ropes(model)
    run = watch_run(model)
    if run.calls and [id(layer) for layer in run.calls[: len(model.layers)]] != [id(layer) for layer in model.layers]:
        raise UnsupportedModel(f"{type(model).__name__} does not compute its layers one after the other")
    paged = [seen for seen in run.used if not isinstance(seen.cache, ArraysCache)]
    states = [seen for seen in run.used if isinstance(seen.cache, ArraysCache)]
    first = {id(seen): nth for nth, seen in enumerate(paged)} | {id(seen): nth for nth, seen in enumerate(states)}
    return Inspection(
        refs=tuple(_ref(each, first) for each in run.caches),
        layers=tuple(_layer_spec(seen, paged) for seen in paged),
        recurrent=tuple(_recurrent_spec(seen) for seen in states),
        latents=tuple(seen.latent for seen in paged),
        dtypes=tuple(seen.dtype for seen in paged),
        num_heads=_num_heads(model),
        hidden_bytes=0 if states else _hidden_bytes(model, run),
        linears=run.behind,
        final_norm=next(((owner, name) for owner, name, norm in run.norms if norm.depths == [run.depth]), None),
        precision=Precision((LayerBits(),) * len(paged)),
    )


def _check_ropes(model: nn.Module) -> None:
    for index, layer in enumerate(getattr(model, "layers", None) or ()):
        if any(isinstance(module, DynamicNTKScalingRoPE) for module in layer.modules()):
            raise UnsupportedModel(f"layer {index} uses dynamic NTK rope, whose keys depend on the prompt's length")


def _ref(watched: Any, numbers: dict[int, int]) -> CacheRef:
    if isinstance(watched, tuple):
        return tuple(_ref(each, numbers) for each in watched)
    if watched.depth is None:
        return None
    kind = Recurrent if isinstance(watched.cache, ArraysCache) else Paged
    return kind(numbers[id(watched)])


def _layer_spec(seen: Seen, paged: Sequence[Seen]) -> LayerSpec:
    assert seen.depth is not None
    nth = [other for other in paged if other.depth == seen.depth].index(seen)
    window = seen.cache.max_size if isinstance(seen.cache, RotatingKVCache) else None
    if seen.latent is not None:
        return LayerSpec(seen.depth, 1, seen.latent.rank + seen.latent.rope, 0, window, nth)
    (_, heads, _, key_dim), (_, _, _, value_dim) = seen.keys, seen.values
    return LayerSpec(seen.depth, heads, key_dim, value_dim, window, nth)


def _recurrent_spec(seen: Seen) -> RecurrentSpec:
    assert seen.depth is not None
    tensors = [
        None if array is None else StateTensor(array.shape[1:], _name(array.dtype)) for array in seen.cache.cache
    ]
    return RecurrentSpec(seen.depth, tuple(tensors))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _hidden_bytes(model: nn.Module, run: Run) -> int:
    lists = layer_lists(model)
    in_order = [id(layer) for layer in run.calls] == [id(layer) for layer in lists[0]]
    if run.x is None or run.tuples or len(lists) > 1 or not in_order:
        return 0
    return run.x.shape[-1] * run.x.dtype.size


def _num_heads(model: nn.Module) -> int:
    for layer in model.layers:
        for module in layer.modules():
            for name in _HEADS:
                if isinstance(heads := getattr(module, name, None), int):
                    return heads
    return 1  # no attention


def _rope_text(config: dict[str, Any]) -> str:
    entries = [*config.items(), *text_config(config).items()]
    of_rope = [(k, v) for k, v in entries if "rope" in k or "rotary" in k or k == "max_position_embeddings"]
    try:
        return repr(sorted(of_rope))
    except TypeError:  # equal names whose values have no order
        return repr(sorted(of_rope, key=repr))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's own config; empty if there is none."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on the paged cache.

The cache holds the normed latent and the roped key part as one head. Few queries move into the latent space and read
packed blocks; many read decompressed latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from agentcache.compat import MultiLinear, QuantizedMultiLinear
from agentcache.errors import BrokenInvariant
from agentcache.kv.packed import PackedBlocks
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.reads import BlockReads
from agentcache.kv.step_cache import Handle, PagedKV, StepCache
from agentcache.metal_kernels.decode_plan import StepRows
from agentcache.metal_kernels.kernel_text import device
from agentcache.metal_kernels.latent_decode import LatentPlan, LatentShape, PreparedLatents, prepare_latents
from agentcache.metal_kernels.unpack import unpack
from agentcache.models import fused
from agentcache.models.attention import (
    AttentionOptions,
    flash_attention,
    packed_attention,
    reads_packed,
    unpack_row,
)
from agentcache.models.fused import PACKED_BITS, Mode, checked, latent_shape, mode, row_ids, usable
from agentcache.models.layers import Stand, in_dim

_EXPANDED = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
_ABSORBED = ("embed_q", "unembed_out")
MAX_LATENT_QUERIES = 8  # per row


def is_expanded(module: nn.Module) -> bool:
    """Whether a module has DeepSeek-V2's form: it caches the expanded latent."""
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "num_heads")
    return all(part in module for part in _EXPANDED) and all(hasattr(module, size) for size in sizes)


def is_absorbed(module: nn.Module) -> bool:
    """Whether a module has the form of `mlx_lm/models/mla.py`: it caches the latent."""
    return all(isinstance(module.get(part), (MultiLinear, QuantizedMultiLinear)) for part in _ABSORBED)


@dataclass(frozen=True)
class Latent:
    """Sizes of latent, shared key part, and key made of the latent (None if `is_absorbed`)."""

    rank: int
    rope: int
    nope: int | None


def latent_of(layer: nn.Module, keys: mx.array, values: mx.array) -> Latent | None:
    """Latent that a layer's cache can keep."""
    for module in layer.modules():
        if is_absorbed(module) and keys.shape[1] == 1:
            return Latent(keys.shape[-1], values.shape[-1], None)
        if is_expanded(module) and keys.shape[1] == module.num_heads:
            return Latent(int(module.kv_lora_rank), int(module.qk_rope_head_dim), int(module.qk_nope_head_dim))
    return None


class Projections(Protocol):
    """Projections of a latent to keys (without rope) and values."""

    @property
    def rank(self) -> int:
        """Size of the latent."""

    def absorb(self, queries: mx.array) -> mx.array:
        """[B, H, n, nope] to [B, H, n, rank]."""

    def keys(self, latent: mx.array) -> mx.array:
        """[1, 1, T, rank] to [1, H, T, nope]."""

    def values(self, latent: mx.array) -> mx.array:
        """[B, 1 or H, n, rank] to [B, H, n, v]."""


def latent_attention(
    queries: mx.array, keys: mx.array | Handle, values: Handle, scale: float, mask: mx.array | None
) -> mx.array:
    """Attention over cached latents, as mlx-lm's modules call it; [B, H, n, v].

    Without projections in `values`, queries and result are in the latent space, [B, H, n, rank].

    Args:
        queries: [B, H, n, nope]; with the rope part if `mask` is None.
        mask: rope part of the queries times `scale`, [B, H, n, rope] (see `StepCache.update_and_fetch`).
    """
    kv, projections = values.kv, values.projections
    if projections is None:
        if mask is None:
            raise BrokenInvariant("latent attention without the queries' rope part")
        return _in_latent_space(queries, _RopeQueries(mask, scale), kv, scale, queries.dtype)
    nope = queries.shape[-1] - (kv.arena.keys.dim - projections.rank if mask is None else 0)
    q_nope = queries[..., :nope]
    q_rope = _RopeQueries(queries[..., nope:]) if mask is None else _RopeQueries(mask, scale)
    if reads_packed(queries.shape[2], kv.reads.batch_size):
        return projections.values(_in_latent_space(projections.absorb(q_nope), q_rope, kv, scale, queries.dtype))
    full_queries = mx.concatenate([q_nope, q_rope.plain.astype(q_nope.dtype)], axis=-1)
    full_keys, full_values = decompress(unpack_latents(queries, projections.rank, kv), projections)
    return flash_attention(full_queries, full_keys, full_values, kv.reads, AttentionOptions(scale))


def decompress(cached: mx.array, projections: Projections) -> tuple[mx.array, mx.array]:
    """Keys [1, H, T, nope + rope] and values [1, H, T, v] of latents [1, 1, T, rank + rope]."""
    latent, k_rope = mx.split(cached, [projections.rank], axis=-1)
    k_nope = projections.keys(latent)
    k_rope = mx.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))
    return mx.concatenate([k_nope, k_rope], axis=-1), projections.values(latent)


class _RopeQueries(NamedTuple):
    array: mx.array
    scale: float = 1.0

    @property
    def plain(self) -> mx.array:
        return self.array if self.scale == 1 else self.array.astype(mx.float32) / self.scale


def _in_latent_space(q_latent: mx.array, q_rope: _RopeQueries, kv: PagedKV, scale: float, dtype: mx.Dtype) -> mx.array:
    def by_operations() -> mx.array:
        return packed_latent_attention(q_latent, q_rope.plain, kv, scale).astype(dtype)

    if fused.why_none():
        return by_operations()
    return attend_latents(
        q_latent,
        q_rope.array,
        kv,
        scale=scale,
        rope_scale=1 / q_rope.scale,
        dtype=dtype,
        reference=by_operations,
    )


def packed_latent_attention(q_latent: mx.array, q_rope: mx.array, kv: PagedKV, scale: float) -> mx.array:
    queries = mx.concatenate([q_latent.astype(mx.float32), q_rope.astype(mx.float32)], axis=-1)
    side = kv.arena.keys
    packed = side.gather(kv.reads.blocks.ids)
    latent = _leading(packed, q_latent.shape[-1], kv)
    keys, values = ([PackedBlocks(each, side.quantisation)] for each in (packed, latent))
    return packed_attention(queries, keys, values, kv.reads, AttentionOptions(scale))


def _leading(packed: Packed, rank: int, kv: PagedKV) -> Packed:
    parts = kv.arena.keys.quantisation.parts(rank).values()
    leading = [part[..., :width] for part, (_, width) in zip(packed.parts, parts, strict=True)]
    # On CUDA, MLX multiplies contiguous arrays only.
    return Packed(*(map(mx.contiguous, leading) if device() == "cuda" else leading))


class AttendedLatents(NamedTuple):
    """As `fused.Attended`."""

    shape: LatentShape
    scale: float
    rope_scale: float

    def prepare(self, reads: BlockReads) -> PreparedLatents | None:
        if not usable(self.shape).right:
            return None
        return prepare_latents(_latent_plan(reads), self.shape, self.scale, self.rope_scale)


def attend_latents(
    q_latent: mx.array,
    q_rope: mx.array,
    kv: PagedKV,
    *,
    scale: float,
    rope_scale: float,
    dtype: mx.Dtype,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention in the latent space by kernels, if usable; [B, H, n, rank]. `rope_scale` is `q_rope`'s."""
    if q_latent.shape[2] > MAX_LATENT_QUERIES:
        return reference()
    side, prepared = kv.arena.keys, kv.reads.prepared
    shape = latent_shape(q_latent.shape[-1], side.dim, q_latent.shape[1], side.quantisation, dtype)
    key = AttendedLatents(shape, scale, rope_scale)
    if key not in prepared:
        prepared[key] = key.prepare(kv.reads)
    by_kernels: PreparedLatents | None = prepared[key]
    if by_kernels is None:
        return reference()
    made = by_kernels(q_latent, q_rope, side.arrays(), side.written)
    return made if mode() is Mode.ON else checked(made, reference(), "latent decode")


def unpack_latents(queries: mx.array, rank: int, kv: PagedKV) -> mx.array:
    """`unpack_row` of latents: [1, 1, T, rank + rope]."""
    side, reads, dtype = kv.arena.keys, kv.reads, queries.dtype
    reference = partial(unpack_row, side, reads, dtype)
    if fused.why_none():
        return reference()
    shape = latent_shape(rank, side.dim, queries.shape[1], side.quantisation, dtype)
    if shape.bits != PACKED_BITS or not usable(shape).right:
        return reference()
    data, scales, biases = side.arrays()
    made = unpack((data, scales, biases), row_ids(reads), reads.num_keys, dtype, side.written)
    return made if mode() is Mode.ON else checked(made, reference(), "unpack")


def _latent_plan(reads: BlockReads) -> LatentPlan:
    if "latents" not in reads.prepared:
        ids, bases, lengths = zip(*((tuple(row.block_ids), row.base, row.length) for row in reads.rows), strict=True)
        reads.prepared["latents"] = LatentPlan(StepRows(ids, bases, lengths, reads.num_tokens, reads.window))
    plan: LatentPlan = reads.prepared["latents"]
    return plan


@dataclass(frozen=True, eq=False)
class _AbsorbedProjections:
    embed_q: nn.Module
    unembed_out: nn.Module
    rank: int

    def absorb(self, queries: mx.array) -> mx.array:
        return self.embed_q(queries)

    def keys(self, latent: mx.array) -> mx.array:
        return self.embed_q(latent, transpose=False)

    def values(self, latent: mx.array) -> mx.array:
        return self.unembed_out(latent)


class _EmbedQ(Stand):
    """Makes zeros [B, H, rope, 1] of a handle: attention reads the handle in `values`."""

    def __init__(self, original: nn.Module, rank: int) -> None:
        super().__init__(original)
        self._rank = rank

    def __call__(self, x: mx.array | Handle, transpose: bool = True) -> mx.array:
        if not isinstance(x, Handle):
            return self.original(x, transpose=transpose)
        rope = x.kv.arena.keys.dim - self._rank
        return mx.zeros((x.kv.reads.batch_size, self.original.weight.shape[0], rope, 1), x.dtype)


class _UnembedOut(Stand):
    def __init__(self, original: nn.Module, projections: Projections) -> None:
        super().__init__(original)
        self._projections = projections

    def __call__(self, x: Any, transpose: bool = True) -> Any:
        if isinstance(x, Handle):
            return replace(x, projections=self._projections)
        return self.original(x, transpose=transpose)


def _adapt_absorbed(module: nn.Module) -> None:
    rank = in_dim(module.unembed_out)
    projections = _AbsorbedProjections(module.embed_q, module.unembed_out, rank)
    module.embed_q = _EmbedQ(projections.embed_q, rank)
    module.unembed_out = _UnembedOut(projections.unembed_out, projections)


def dense_weight(linear: nn.Module) -> mx.array:
    """[out, in]."""
    if "scales" not in linear:
        return linear.weight
    packing = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.dequantize(linear.weight, linear.scales, linear.get("biases"), **packing)


class ExpandedProjections:
    """Projections by a `kv_b_proj`: each head's keys, then values."""

    def __init__(self, module: nn.Module) -> None:
        self.rank = int(module.kv_lora_rank)
        self.nope = int(module.qk_nope_head_dim)
        weight = dense_weight(module.kv_b_proj).reshape(module.num_heads, -1, self.rank)
        self._key_weight, self._value_weight = weight[:, : self.nope], weight[:, self.nope :]

    def absorb(self, queries: mx.array) -> mx.array:
        return queries @ self._key_weight

    def keys(self, latent: mx.array) -> mx.array:
        return latent @ self._key_weight.swapaxes(-1, -2)

    def values(self, latent: mx.array) -> mx.array:
        return latent @ self._value_weight.swapaxes(-1, -2)


class _NotedNorm(Stand):
    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self._noted: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        self._noted[:] = [self.original(x)]
        return self._noted[0]

    def take(self) -> mx.array:
        return self._noted.pop()


class _LatentCache:
    """Stores the latent; the module's keys and values are never evaluated."""

    def __init__(self, cache: StepCache, norm: _NotedNorm, projections: ExpandedProjections) -> None:
        self.offset = cache.offset
        self.make_mask = cache.make_mask
        self._cache = cache
        self._norm = norm
        self._projections = projections

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        # The rope part is equal for all heads.
        k_rope = keys[:, :1, :, self._projections.nope :]
        kv = self._cache.update(mx.concatenate([self._norm.take()[:, None], k_rope], axis=-1), None)
        handle = Handle(kv, keys.dtype, self._projections)
        return handle, handle


@functools.cache
def _with_latent_cache(kind: Any) -> Any:

    class LatentAttention(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            swapped = {name: self._swap(value) for name, value in kwargs.items()}
            return super().__call__(*map(self._swap, args), **swapped)

        def _swap(self, value: Any) -> Any:
            if isinstance(value, StepCache):
                return _LatentCache(value, self.kv_a_layernorm, self._projections)
            return value

    return LatentAttention


def _adapt_expanded(module: nn.Module) -> None:
    module._projections = ExpandedProjections(module)
    module.kv_a_layernorm = _NotedNorm(module.kv_a_layernorm)
    # The class changes: adapters find its linears by name.
    kind: Any = type(module)
    module.__class__ = _with_latent_cache(kind)


@contextmanager
def rounded_latents(model: nn.Module, round_trips: Sequence[Callable[[mx.array], mx.array]]) -> Iterator[None]:
    """Round the latents of `is_expanded` modules, by one of `round_trips` each."""
    modules = [module for layer in model.layers for module in layer.modules() if is_expanded(module)]
    noted = [(module, module.kv_a_layernorm) for module in modules]
    try:
        for (module, norm), round_trip in zip(noted, round_trips, strict=True):
            module.kv_a_layernorm = _Rounded(norm, round_trip)
        yield
    finally:
        for module, norm in noted:
            module.kv_a_layernorm = norm


class _Rounded(Stand):
    def __init__(self, original: nn.Module, round_trip: Callable[[mx.array], mx.array]) -> None:
        super().__init__(original)
        self._round_trip = round_trip

    def __call__(self, x: mx.array) -> mx.array:
        return self._round_trip(self.original(x))


def adapt(layer: nn.Module) -> None:
    """Make a layer's latent attention accept handles."""
    for module in list(layer.modules()):
        if is_absorbed(module):
            _adapt_absorbed(module)
        elif is_expanded(module):
            _adapt_expanded(module)

"""Run latent attention (`models/mla.py`) by kernels, or by the reference; compare `fused`.

Few queries read packed latents in place; a chunk unpacks a row's latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from agentcache.kv.arena import SideArena
from agentcache.kv.step_cache import PagedKV, Reads
from agentcache.metal_kernels.decode_plan import StepRows
from agentcache.metal_kernels.latent_decode import LatentPlan, LatentShape, PreparedLatents, prepare_latents
from agentcache.metal_kernels.unpack import unpack
from agentcache.models.fused import PACKED_BITS, Mode, checked, latent_shape, mode, row_ids, usable

MAX_QUERIES = 8  # per row; each reads the row's latents by itself


class AttendedLatents(NamedTuple):
    """As `fused.Attended`."""

    shape: LatentShape
    scale: float
    rope_scale: float

    def prepare(self, reads: Reads) -> PreparedLatents | None:
        if not usable(self.shape).right:
            return None
        return prepare_latents(_plan(reads), self.shape, self.scale, self.rope_scale)


def attention(
    q_latent: mx.array,
    q_rope: mx.array,
    kv: PagedKV,
    *,
    scale: float,
    rope_scale: float,
    dtype: mx.Dtype,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention over the latents of `kv` in their space, [B, H, n, rank] in `dtype`.

    Args:
        q_latent: [B, H, n, rank].
        q_rope: [B, H, n, rope], not yet multiplied with `rope_scale`.
    """
    if q_latent.shape[2] > MAX_QUERIES:
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


def unpacked(
    side: SideArena, reads: Reads, rank: int, num_heads: int, dtype: mx.Dtype, reference: Callable[[], mx.array]
) -> mx.array:
    """Unpack one row's latents to [1, 1, T, rank + rope], T up to the end of the step; `num_heads` are query heads."""
    shape = latent_shape(rank, side.dim, num_heads, side.quantisation, dtype)
    if shape.bits != PACKED_BITS or not usable(shape).right:
        return reference()
    data, scales, biases = side.arrays()
    made = unpack((data, scales, biases), row_ids(reads), reads.num_keys, dtype, side.written)
    return made if mode() is Mode.ON else checked(made, reference(), "unpack")


def _plan(reads: Reads) -> LatentPlan:
    if "latents" not in reads.prepared:
        ids, bases, lengths = zip(*((tuple(row.block_ids), row.base, row.length) for row in reads.rows), strict=True)
        reads.prepared["latents"] = LatentPlan(StepRows(ids, bases, lengths, reads.num_tokens, reads.window))
    plan: LatentPlan = reads.prepared["latents"]
    return plan

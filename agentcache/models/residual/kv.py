"""Rows with residual KV as attention sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import TensorArena
from agentcache.kv.reads import BlockReads, Reads, Segment
from agentcache.metal_kernels.rope_tables import RopeTables, packed_b

Rope = Callable[..., mx.array]

SMALLEST_FACTOR = 6e-8  # above 0, in float16
_MOST_SCORES, _LEAST_BLOCKS, _MOST_BLOCKS = 1 << 24, 2, 16
# Copies of a piece's KV must take less than the row's keys.
_PIECES = 4


def piece_blocks(num_blocks: int, num_queries: int) -> int:
    """Blocks that a row reads at a time; `num_queries` counts all heads."""
    part = min(_MOST_BLOCKS, max(_LEAST_BLOCKS, num_blocks // _PIECES))
    return max(1, min(part, _MOST_SCORES // (num_queries * BLOCK_SIZE)))


@dataclass(frozen=True, eq=False)
class KeyNorm:
    """Norm of each head's keys: ρ(k) * k * weight, ρ(k) = 1 / sqrt(mean(k²) + eps); float32 weight [D]."""

    weight: mx.array
    eps: float

    def factor(self, keys: mx.array) -> mx.array:
        """ρ, float32 [...], of float32 keys [..., D]."""
        return mx.rsqrt(mx.square(keys).mean(axis=-1) + self.eps)


@dataclass(frozen=True, eq=False)
class KeyForm:
    """Operations on keys before they are cached; `rope` takes [N, H_kv, n, D]."""

    rope: Rope
    norm: KeyNorm | None

    def rotated(self, delta: mx.array, factor: mx.array | None, starts: mx.array) -> mx.array:
        """Adapter's addition to base's cached keys, float32 [N, H_kv, n, D].

        `delta` is x·A·B, [N, n, H_kv, D]; `factor` is ρ with the adapter, [N, n, H_kv]; `starts` are int32 [N].
        """
        if self.norm is not None and factor is not None:
            delta = delta * self.norm.weight * factor[..., None]
        rotated: mx.array = self.rope(delta.swapaxes(1, 2), offset=starts)
        return rotated

    def agent_factor(self, base: mx.array, without: mx.array, delta: mx.array, starts: mx.array) -> mx.array:
        """ρ of a family's keys with an adapter, [N, n, H_kv], from cached keys `base`, float32 [N, H_kv, n, D].

        For a key k and its addition d, 1/ρ² = mean(k²) + 2 mean(k·d) + mean(d²) + eps; `without` gives mean(k²) + eps.
        Cached keys are ρ_base * R(γk), and R is a rotation up to its gain: R(γk) · R(d / (γ gain²)) = k · d.
        """
        assert self.norm is not None
        rotated = self.rope((delta * self._inverse).swapaxes(1, 2), offset=starts)
        without = mx.maximum(without, SMALLEST_FACTOR)
        cross = (base * rotated).mean(axis=-1).swapaxes(1, 2) / without
        energy: mx.array = 1 / mx.square(without) + 2 * cross + mx.square(delta).mean(axis=-1)
        return mx.rsqrt(mx.maximum(energy, self.norm.eps))

    @cached_property
    def _inverse(self) -> mx.array:
        """1 / (γ gain²), [D]; 0 where γ is 0: no cache has that part of k."""
        assert self.norm is not None
        weight = self.norm.weight
        unit = mx.eye(weight.shape[0])[None, :, None]
        gain = mx.square(self.rope(unit, offset=mx.array([0], mx.int32))).sum(axis=(0, 2, 3))
        known = mx.abs(weight) > SMALLEST_FACTOR
        return mx.where(known, 1 / (mx.where(known, weight, 1) * gain), 0)


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """One layer's matrices, float32: A [in, r], key_b [r, H_kv * D_k], value_b [H_kv, r, D_v]."""

    key_a: mx.array | None
    key_b: mx.array | None
    value_a: mx.array | None
    value_b: mx.array | None
    for_kernels: KernelMatrices


@dataclass(frozen=True, eq=False)
class KernelMatrices:
    """B matrices for kernels, float32 [H_kv, r, D]; `key_b` includes the norm's weights."""

    key_b: mx.array | None
    value_b: mx.array | None
    _packed: dict[mx.Dtype, mx.array] = field(default_factory=dict)

    def packed_key_b(self, turns: RopeTables, dtype: mx.Dtype) -> mx.array:
        assert self.key_b is not None
        if dtype not in self._packed:
            self._packed[dtype] = packed_b(self.key_b, turns, dtype)
        return self._packed[dtype]


@dataclass(frozen=True, eq=False)
class RowResidualKV:
    """One residual row in one layer; `residual_ids` are the slots beside the blocks read, by position, int32 [n]."""

    row: int
    reads: BlockReads
    residual_slots: Sequence[int]
    residual_ids: mx.array
    form: KeyForm
    matrices: LayerMatrices
    key_a: TensorArena | None
    key_norms: TensorArena | None
    value_a: TensorArena | None

    @cached_property
    def residuals_of_blocks(self) -> mx.array:
        """`residual_ids` in the order of `reads.blocks`."""
        blocks = self.reads.blocks
        if blocks.open_ids is None:
            return self.residual_ids
        places = [(start - self.reads.key_start) // BLOCK_SIZE for start in blocks.starts]
        return self.residual_ids[mx.array(places)]

    def within(self, reads: BlockReads) -> RowResidualKV:
        """The same row with a part of its reads."""
        begin = (reads.key_start - self.reads.key_start) // BLOCK_SIZE
        own = slice(begin, begin + -(-reads.num_keys // BLOCK_SIZE))
        return replace(self, reads=reads, residual_slots=self.residual_slots[own], residual_ids=self.residual_ids[own])


@dataclass(frozen=True, eq=False)
class LayerResidualKV:
    """Rows of a step in one layer; `rows` have residuals; one adapter's are neighbours with the same `matrices`.

    `order`: each row's index in plain rows followed by `rows`, int32 [B]; `reads`: of all rows, in step order.
    """

    plain: mx.array
    plain_reads: BlockReads | None
    rows: Sequence[RowResidualKV]
    order: mx.array
    reads: BlockReads

    def segments(self) -> Iterator[tuple[int, int, LayerResidualKV]]:
        """The step's tokens by `Reads.segments`; each part reads open blocks from their own slots."""
        plain = _segments_of(self.plain_reads)
        of_rows = [_segments_of(row.reads) for row in self.rows]
        for index, (start, stop, reads) in enumerate(_segments_of(self.reads)):
            rows = [row.within(segments[index].reads) for row, segments in zip(self.rows, of_rows, strict=True)]
            yield start, stop, replace(self, plain_reads=plain[index].reads if plain else None, rows=rows, reads=reads)


def _segments_of(reads: BlockReads | None) -> list[Segment]:
    return reads.segments if isinstance(reads, Reads) else []

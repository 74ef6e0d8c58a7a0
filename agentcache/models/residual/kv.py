"""Rows with residual KV as attention sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import TensorArena
from agentcache.kv.step_cache import Reads
from agentcache.metal_kernels.rope_tables import RopeTables, packed_b
from agentcache.models.residual.key_form import KeyForm

_MOST_SCORES, _LEAST_BLOCKS, _MOST_BLOCKS = 1 << 24, 2, 16  # limits of a piece
# Copies of one piece's KV must take less than the keys of the whole row.
_PIECES = 4


def piece_blocks(num_blocks: int, num_queries: int) -> int:
    """Blocks that a residual row reads at a time; `num_queries` counts all heads."""
    part = min(_MOST_BLOCKS, max(_LEAST_BLOCKS, num_blocks // _PIECES))
    return max(1, min(part, _MOST_SCORES // (num_queries * BLOCK_SIZE)))


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """An adapter's matrices for one layer's keys and values, float32; None for none.

    Args:
        key_a, value_a: [in, r].
        key_b: [r, H_kv * D_k].
        value_b: [H_kv, r, D_v].
    """

    key_a: mx.array | None
    key_b: mx.array | None
    value_a: mx.array | None
    value_b: mx.array | None
    for_kernels: KernelMatrices


@dataclass(frozen=True, eq=False)
class KernelMatrices:
    """B matrices of one layer in the kernels' layout, float32 [H_kv, r, D], kept while the adapter is on the device.

    `key_b` includes the key norm's weights, if any.
    """

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
    """One residual row in one layer.

    Args:
        reads: base blocks that it reads.
        residual_slots, residual_ids: slots for these blocks; as int32 [num_blocks].
        key_a, key_norms, value_a: arenas; a family's norms are those without adapter (`KeyForm.agent_factor`).
    """

    row: int
    reads: Reads
    residual_slots: Sequence[int]
    residual_ids: mx.array
    form: KeyForm
    matrices: LayerMatrices
    key_a: TensorArena | None
    key_norms: TensorArena | None
    value_a: TensorArena | None


@dataclass(frozen=True, eq=False)
class LayerResidualKV:
    """Rows of a step in one layer, some with residuals.

    Args:
        plain: indices of plain rows, int32.
        rows: rows with residuals; those of one adapter are neighbours with the same `matrices`.
        order: index of each row in plain rows followed by `rows`; int32 [B].
        reads: base blocks of all rows, in step order.
    """

    plain: mx.array
    plain_reads: Reads | None
    rows: Sequence[RowResidualKV]
    order: mx.array
    reads: Reads

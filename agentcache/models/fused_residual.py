"""Where a kernel stands in for the reference in rows whose values have residuals.

Rows of one adapter are computed together, each over its own blocks: what they share of base's is read by each of them.
Keys' residuals have to be multiplied out, normed and brought to their place by the layer's own rope before they are
added; there is no kernel for that, so the reference serves layers where an adapter acts on keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from agentcache.kv.arena import LayerArena
from agentcache.metal_kernels.decode import Prepared, Residuals, ValueResiduals, prepare
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.tiling import HeadShape
from agentcache.models import fused
from agentcache.models.overlay import RowOverlay

NO_KEYS = "no kernel for residuals of keys yet"


def attention(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowOverlay],
    *,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention of a step's `queries` [B, H_q, n, D] over rows of one adapter: [rows, H_q, n, D], in their order.

    Args:
        reference: computes the same by MLX's operations.
    """
    first, values = rows[0], arena.values
    low_rank, value_b = first.value_a, first.matrices.value_b
    if fused.why_none() or queries.shape[2] > fused.MAX_QUERIES or first.key_a is not None:
        return reference()
    if values is None or low_rank is None or value_b is None or not fused.is_pair(arena):
        return reference()
    shape = fused.shape_of(arena.keys, queries.shape[1], queries.dtype, low_rank.array.shape[2])
    # The first row knows how they are read, for all layers of a group.
    key = "residual", tuple(row.row for row in rows), shape, scale, softcap, sinks is None
    prepared = first.reads.prepared
    if key not in prepared:
        is_right = fused.usable(shape).right
        prepared[key] = prepare(_plan(shape, rows), shape, scale, softcap, sinks is not None) if is_right else None
    by_kernels: Prepared | None = prepared[key]
    if by_kernels is None:
        return reference()
    own = queries[mx.array([row.row for row in rows], mx.int32)] if len(rows) < queries.shape[0] else queries
    residuals = Residuals(None, ValueResiduals(low_rank.array, value_b))
    made = by_kernels(own, arena.keys.arrays(), values.arrays(), sinks, arena.keys.written, residuals)
    return made if fused.mode() is fused.Mode.ON else fused.checked(made, reference(), "decode with residuals")


def _plan(shape: HeadShape, rows: Sequence[RowOverlay]) -> DecodePlan:
    base = [own for row in rows for own in row.reads.rows]
    reads = rows[0].reads
    return DecodePlan(
        shape,
        StepRows(
            [tuple(own.block_ids) for own in base],
            [own.base for own in base],
            [own.length for own in base],
            reads.num_tokens,
            reads.window,
            [tuple(row.residual_slots) for row in rows],
        ),
    )

"""Run attention of rows with residual KV by kernels, or by the reference.

For few tokens, rows of one adapter run together. For a chunk, a row's blocks are unpacked with residuals for flash
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from agentcache.kv.arena import LayerArena, SideArena
from agentcache.metal_kernels.decode import KeyResiduals, PreparedDecode, Residuals, ValueResiduals, prepare
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.tiling import HeadShape, ResidualKind
from agentcache.metal_kernels.unpack import LowRankSide, unpack_residual
from agentcache.models import fused
from agentcache.models.attention import AttentionOptions, flash_attention, unpack_for
from agentcache.models.residual.key_form import turning_of
from agentcache.models.residual.kv import RowResidualKV


def attention(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowResidualKV],
    options: AttentionOptions,
    reference: Callable[[], mx.array],
) -> mx.array:
    """Attention of `queries` [B, H_q, n, D] over rows of one adapter: [rows, H_q, n, D], in their order."""
    first = rows[0]
    if fused.why_none() or not fused.is_pair(arena):
        return reference()
    is_chunk = queries.shape[2] > fused.MAX_QUERIES
    if is_chunk and options.softcap is not None:
        return reference()
    # Kept in the first row's reads, for all layers of a group.
    shape = _shape_of(first, arena, queries.shape[1], queries.dtype)
    if shape is None:
        return reference()
    key = "residual", tuple(row.row for row in rows), shape, *options[:2], options.sinks is None
    prepared = first.reads.prepared
    if key not in prepared:
        prepared[key] = fused.usable_by_now(shape).right  # without blocking: other requests are being served
        if prepared[key] and not is_chunk:
            prepared[key] = prepare(_plan(shape, rows), shape, *options[:2], options.sinks is not None)
    found: PreparedDecode | bool = prepared[key]
    if not found:
        return reference()
    if isinstance(found, PreparedDecode):
        made, what = _decoded(queries, arena, rows, found, options), "decode with residuals"
    else:
        made, what = _flash(queries, arena, rows, options), "unpack with residuals"
    return made if fused.mode() is fused.Mode.ON else fused.checked(made, reference(), what)


def _shape_of(row: RowResidualKV, arena: LayerArena, num_heads: int, dtype: mx.Dtype) -> HeadShape | None:
    kind = _kind(row, arena)
    return None if kind is None else kind.on(fused.shape_of(arena.keys, num_heads, dtype))


def _kind(row: RowResidualKV, arena: LayerArena) -> ResidualKind | None:
    """None if no kernel can compute the residuals."""
    value_rank = 0 if row.value_a is None else row.value_a.array.shape[2]
    if row.key_a is None:
        return ResidualKind(value_rank)
    turning = turning_of(row.form, arena.keys.dim)
    is_normed = row.key_norms is not None
    if turning.why_not or (row.key_norms is not None and row.key_norms.array.shape[-1] < 2):
        return None
    return ResidualKind(value_rank, row.key_a.array.shape[2], turning.pairs, turning.interleaved, is_normed)


def _decoded(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowResidualKV],
    prepared: PreparedDecode,
    options: AttentionOptions,
) -> mx.array:
    assert arena.values is not None  # see `is_pair`
    own = queries[mx.array([row.row for row in rows], mx.int32)] if len(rows) < queries.shape[0] else queries
    first, matrices = rows[0], rows[0].matrices.for_kernels
    keys = values = None
    if first.key_a is not None:
        staged = prepared.shape.staged
        turns = turning_of(first.form, arena.keys.dim).turns(_end(rows), staged)
        norms = None if first.key_norms is None else first.key_norms.array
        keys = KeyResiduals(first.key_a.array, norms, matrices.packed_key_b(turns, staged), turns)
    if first.value_a is not None and matrices.value_b is not None:
        values = ValueResiduals(first.value_a.array, matrices.value_b)
    residuals = Residuals(keys, values)
    return prepared(own, arena.keys.arrays(), arena.values.arrays(), options.sinks, arena.keys.written, residuals)


def _flash(queries: mx.array, arena: LayerArena, rows: Sequence[RowResidualKV], options: AttentionOptions) -> mx.array:
    """Rows depend on each other, so that one row's memory is free before the next begins."""
    assert arena.values is not None  # see `is_pair`
    done: list[mx.array] = []
    for row in rows:
        q = queries[row.row : row.row + 1]
        q = mx.depends([q], [done[-1]])[0] if done else q
        keys = _unpacked(q, arena.keys, row, _key_side(row, arena))
        values = _unpacked(q, arena.values, row, _value_side(row))
        done.append(flash_attention(q, keys, values, row.reads, options))
    return mx.concatenate(done)


def _key_side(row: RowResidualKV, arena: LayerArena) -> LowRankSide | None:
    b = row.matrices.for_kernels.key_b
    if row.key_a is None or b is None:
        return None
    norms = None if row.key_norms is None else row.key_norms.array
    turns = turning_of(row.form, arena.keys.dim).turns(_end([row]), mx.float32)
    return LowRankSide(row.key_a.array, b, row.residual_ids, norms, turns)


def _value_side(row: RowResidualKV) -> LowRankSide | None:
    b = row.matrices.for_kernels.value_b
    return None if row.value_a is None or b is None else LowRankSide(row.value_a.array, b, row.residual_ids)


def _unpacked(queries: mx.array, side: SideArena, row: RowResidualKV, added: LowRankSide | None) -> mx.array:
    if added is None:
        return unpack_for(queries, side, row.reads)
    data, scales, biases = side.arrays()
    ids, reads = mx.depends([fused.row_ids(row.reads)], [queries])[0], row.reads
    return unpack_residual(
        *((data, scales, biases), ids, added, reads.num_keys, queries.dtype),
        base=reads.key_start,
        written=side.written,
    )


def _end(rows: Sequence[RowResidualKV]) -> int:
    return max(own.length for row in rows for own in row.reads.rows) + rows[0].reads.num_tokens


def _plan(shape: HeadShape, rows: Sequence[RowResidualKV]) -> DecodePlan:
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

"""Attention of residual rows (ForkKV, arXiv 2604.06370) by MLX's operations: the specification of every kernel.

A key is base's cached key plus R(x·A·B), R the rope. Queries multiply with both separately, one softmax runs over the
sums, and out = P·V + (P·x·A)·B.

Rows run one by one, a few blocks at a time; the softmax is merged (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, SideArena
from agentcache.kv.packed import dequantise
from agentcache.kv.reads import BlockReads
from agentcache.kv.step_cache import PagedKV
from agentcache.models import fused
from agentcache.models.attention import (
    MAX_PACKED_QUERIES,
    AttentionOptions,
    by_definition,
    flash_attention,
    gather,
    packed_attention,
    packed_product,
    paged_attention,
    unpack_row,
)
from agentcache.models.residual.fused import attention_by_kernels
from agentcache.models.residual.kv import SMALLEST_FACTOR, LayerResidualKV, RowResidualKV, piece_blocks

_MASKED = -1e30  # finite, as a whole piece may be masked


def overlaid_attention(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    """`paged_attention` with residuals in some rows."""
    if arena.open is None:
        return _overlaid(queries, arena, residual_kv, options)
    parts = [_overlaid(queries[:, :, start:stop], arena, part, options) for start, stop, part in residual_kv.segments()]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _overlaid(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    if acts_on_values(queries.shape[2], residual_kv, options):
        return attention_on_values(queries, arena, residual_kv, options)
    done = []
    if residual_kv.plain_reads is not None:
        done.append(paged_attention(queries[residual_kv.plain], PagedKV(arena, residual_kv.plain_reads), options))
    for _, rows in groupby(residual_kv.rows, lambda row: id(row.matrices)):
        alike = list(rows)
        reference = partial(_by_operations, queries, arena, alike, options, done[-1:])
        done.append(attention_by_kernels(queries, arena, alike, options, reference))
    return mx.concatenate(done)[residual_kv.order]


def _by_operations(
    queries: mx.array,
    arena: LayerArena,
    rows: Sequence[RowResidualKV],
    options: AttentionOptions,
    before: list[mx.array],
) -> mx.array:
    done = list(before)
    for row in rows:
        q = queries[row.row].astype(mx.float32) * options.scale
        # A row's memory is free before the next begins.
        q = q if not done else mx.depends([q], [done[-1]])[0]
        done.append(_row_attention(q, arena, row, options)[None].astype(queries.dtype))
    return mx.concatenate(done[len(before) :])


@dataclass
class _Sums:
    """Float32: largest score, sum of exp(score - peak), [H_kv, g, n, 1]; weighted sums, [H_kv, g, n, D_v or r]."""

    peak: mx.array
    total: mx.array
    values: mx.array
    residuals: mx.array | None


class _Piece(NamedTuple):
    """Some of a row's blocks: base's slots, among open blocks or not, int32 [n].

    `span`: their places in `BlockReads.blocks`; `residuals`: in `RowResidualKV.residual_ids`.
    """

    span: slice
    residuals: slice
    ids: mx.array
    is_open: bool

    def of(self, side: SideArena) -> SideArena:
        return side.form(is_open=self.is_open)


def _pieces(reads: BlockReads, num_queries: int) -> Iterator[_Piece]:
    for part in reads.parts:
        count, place = part.ids.shape[0], (part.start - reads.key_start) // BLOCK_SIZE
        size = piece_blocks(count, num_queries)
        for begin in range(0, count, size):
            end = min(begin + size, count)
            span = slice(part.span.start + begin, part.span.start + end)
            yield _Piece(span, slice(place + begin, place + end), part.ids[begin:end], part.is_open)


def _row_attention(q: mx.array, arena: LayerArena, row: RowResidualKV, options: AttentionOptions) -> mx.array:
    """Float32 [H_q, n, D_v] of scaled queries [H_q, n, D_k]."""
    assert arena.values is not None  # MLA has no residuals
    num_heads, num_tokens, _ = q.shape
    kv_heads = arena.keys.num_heads
    grouped = q.reshape(kv_heads, num_heads // kv_heads, num_tokens, -1)
    sums = _nothing(grouped, arena.values.dim, row, options)
    for piece in _pieces(row.reads, num_heads * num_tokens):
        after = piece._replace(ids=mx.depends([piece.ids], [sums.total, q])[0])
        sums = _read(grouped, arena, row, after, sums, options)
    out = sums.values
    if sums.residuals is not None and row.matrices.value_b is not None:
        out = out + sums.residuals @ row.matrices.value_b[:, None]
    return (out / sums.total).reshape(num_heads, num_tokens, -1)


def _nothing(grouped: mx.array, value_dim: int, row: RowResidualKV, options: AttentionOptions) -> _Sums:
    shape = grouped.shape[:3]
    peak, total = mx.full((*shape, 1), _MASKED), mx.zeros((*shape, 1))
    if options.sinks is not None:
        sinks = options.sinks.astype(mx.float32).reshape(*shape[:2], 1, 1)
        peak, total = mx.broadcast_to(sinks, peak.shape), mx.ones((*shape, 1))
    rank = 0 if row.value_a is None else row.value_a.array.shape[-1]
    return _Sums(peak, total, mx.zeros((*shape, value_dim)), mx.zeros((*shape, rank)) if rank else None)


def _read(
    grouped: mx.array,
    arena: LayerArena,
    row: RowResidualKV,
    piece: _Piece,
    sums: _Sums,
    options: AttentionOptions,
) -> _Sums:
    assert arena.values is not None
    residual_ids = row.residual_ids[piece.residuals]
    scores = _scores(grouped, arena, row, piece)
    if options.softcap is not None:
        scores = options.softcap * mx.tanh(scores / options.softcap)
    scores = mx.where(row.reads.block_mask[piece.span, None, None], scores, _MASKED)
    peak = mx.maximum(sums.peak, scores.max(axis=(0, -1))[..., None])
    weights, fading = mx.exp(scores - peak), mx.exp(sums.peak - peak)
    merged = weights.reshape(*weights.shape[:2], -1, BLOCK_SIZE)
    values = _product(merged, piece.of(arena.values), piece.ids, grouped.shape[2], transpose=False).sum(axis=0)
    residuals = None
    if sums.residuals is not None and row.value_a is not None:
        low_rank = row.value_a.array[residual_ids].astype(mx.float32)[:, None]
        residuals = sums.residuals * fading + (merged @ low_rank).sum(axis=0).reshape(sums.residuals.shape)
    return _Sums(
        peak,
        sums.total * fading + weights.sum(axis=(0, -1))[..., None],
        sums.values * fading + values.reshape(sums.values.shape),
        residuals,
    )


def _scores(grouped: mx.array, arena: LayerArena, row: RowResidualKV, piece: _Piece) -> mx.array:
    """Float32 [blocks, H_kv, g, n, 256]."""
    ids, keys, residual_ids = piece.ids, piece.of(arena.keys), row.residual_ids[piece.residuals]
    heads, shared_by, num_tokens, dim = grouped.shape
    queries = mx.broadcast_to(grouped.reshape(heads, -1, dim), (ids.shape[0], heads, shared_by * num_tokens, dim))
    scores = _product(queries, keys, ids, num_tokens, transpose=True)
    if row.key_a is not None and row.matrices.key_b is not None:
        low_rank = row.key_a.array[residual_ids].astype(mx.float32)
        delta = (low_rank @ row.matrices.key_b).reshape(*low_rank.shape[:2], heads, dim)
        starts, agent = mx.array(row.reads.blocks.starts[piece.span], mx.int32), None
        if row.key_norms is not None:
            norms = row.key_norms.array[residual_ids].astype(mx.float32)
            without = norms[..., 0]
            agent = norms[..., 1] if norms.shape[-1] == 2 else _factor(keys, row, ids, without, delta, starts)
            # Unwritten places hold zeros: masked, but must not become infinite.
            ratio = mx.where(without > 0, agent / mx.maximum(without, SMALLEST_FACTOR), 0).swapaxes(1, 2)
            scores = scores * ratio[:, :, None]
        scores = scores + queries @ row.form.rotated(delta, agent, starts).swapaxes(-1, -2)
    return scores.reshape(ids.shape[0], *grouped.shape[:3], BLOCK_SIZE)


def _factor(
    side: SideArena, row: RowResidualKV, ids: mx.array, without: mx.array, delta: mx.array, starts: mx.array
) -> mx.array:
    return row.form.agent_factor(dequantise(side.gather(ids), side.quantisation, mx.float32), without, delta, starts)


def _product(x: mx.array, side: SideArena, ids: mx.array, num_tokens: int, *, transpose: bool) -> mx.array:
    product = packed_product if num_tokens <= MAX_PACKED_QUERIES else by_definition
    return product(x, side.gather(ids), side.quantisation, transpose=transpose)


def acts_on_values(num_tokens: int, residual_kv: LayerResidualKV, options: AttentionOptions) -> bool:
    """Whether rows run together: on a CPU, where pieces are slow, if no adapter acts on keys."""
    if mx.default_device() != mx.cpu or not fused.why_none():
        return False
    if num_tokens > MAX_PACKED_QUERIES and options.softcap is not None:
        return False  # flash attention has no softcap
    return all(row.key_a is None and row.key_norms is None for row in residual_kv.rows)


def attention_on_values(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    """`overlaid_attention` if `acts_on_values`; a chunk reads values with residuals added."""
    if queries.shape[2] <= MAX_PACKED_QUERIES:
        return _of_few_tokens(queries, arena, residual_kv, options)
    done = []
    if residual_kv.plain_reads is not None:
        done.append(paged_attention(queries[residual_kv.plain], PagedKV(arena, residual_kv.plain_reads), options))
    for row in residual_kv.rows:
        own = queries[row.row : row.row + 1]
        done.append(_of_a_chunk(mx.depends([own], [done[-1]])[0] if done else own, arena, row, options))
    return mx.concatenate(done)[residual_kv.order]


def _of_few_tokens(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    assert arena.values is not None
    reads = residual_kv.reads
    added = partial(_added, residual_kv, reads)
    return packed_attention(queries, *gather(arena, reads), reads, options, added)


def _added(residual_kv: LayerResidualKV, reads: BlockReads, weights: mx.array) -> mx.array:
    _, heads, shared_by, num_tokens, _ = weights.shape
    of_rows = {row.row: row for row in residual_kv.rows}
    made: list[mx.array | None] = []
    for place in range(reads.batch_size):
        row = of_rows.get(place)
        if row is None or row.value_a is None or row.matrices.value_b is None:
            made.append(None)
            continue
        low_rank = row.value_a.array[row.residuals_of_blocks].astype(mx.float32)
        own = weights[mx.array(reads.blocks.of_rows[place])].moveaxis(0, 3).reshape(heads * shared_by * num_tokens, -1)
        sums = (own @ low_rank.reshape(own.shape[1], -1)).reshape(heads, shared_by * num_tokens, -1)
        made.append(sums @ row.matrices.value_b)
    nothing = mx.zeros_like(next(each for each in made if each is not None))
    return mx.stack([nothing if each is None else each for each in made])


def _of_a_chunk(queries: mx.array, arena: LayerArena, row: RowResidualKV, options: AttentionOptions) -> mx.array:
    assert arena.values is not None
    keys, values = unpack_row(arena.keys, row.reads, queries.dtype), unpack_row(arena.values, row.reads, mx.float32)
    if row.value_a is not None and row.matrices.value_b is not None:
        low_rank = row.value_a.array[row.residual_ids]
        low_rank = low_rank.reshape(-1, low_rank.shape[-1])[: row.reads.num_keys].astype(mx.float32)
        values = values + low_rank @ row.matrices.value_b
    return flash_attention(queries, keys, values.astype(queries.dtype), row.reads, options)

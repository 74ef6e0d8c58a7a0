"""Attention on a CPU of rows whose adapters act on values but not on keys.

Their scores are those of base's keys, so all rows run together: P·(V + x·A·B) = P·V + (P·x·A)·B. A chunk reads values
with residuals already added.

`attention.py` is the specification; its pieces are slow on a CPU, where each operation costs as much as a small
product.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import mlx.core as mx

from agentcache.kv.arena import LayerArena
from agentcache.kv.step_cache import PagedKV, Reads
from agentcache.models import fused
from agentcache.models.attention import (
    MAX_PACKED_QUERIES,
    AttentionOptions,
    flash_attention,
    packed_attention,
    paged_attention,
    unpack_row,
)
from agentcache.models.residual.kv import LayerResidualKV, RowResidualKV


def serves(num_tokens: int, residual_kv: LayerResidualKV, options: AttentionOptions) -> bool:
    """Whether a step of `num_tokens` tokens per row is computed here."""
    if mx.default_device() != mx.cpu or not fused.why_none():
        return False
    if num_tokens > MAX_PACKED_QUERIES and options.softcap is not None:
        return False  # flash attention has no softcap
    return all(row.key_a is None and row.key_norms is None for row in residual_kv.rows)


def attention(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    """Attention of `queries` [B, H_q, n, D], some rows with residuals; same shape."""
    if queries.shape[2] <= MAX_PACKED_QUERIES:
        return _of_few_tokens(queries, arena, residual_kv, options)
    done = []
    if residual_kv.plain_reads is not None:
        done.append(paged_attention(queries[residual_kv.plain], PagedKV(arena, residual_kv.plain_reads), options))
    for row in residual_kv.rows:
        own = queries[row.row : row.row + 1]
        # Rows depend on each other: one row's memory is free before the next begins.
        done.append(_of_a_chunk(mx.depends([own], [done[-1]])[0] if done else own, arena, row, options))
    return mx.concatenate(done)[residual_kv.order]


def _of_few_tokens(
    queries: mx.array, arena: LayerArena, residual_kv: LayerResidualKV, options: AttentionOptions
) -> mx.array:
    assert arena.values is not None  # MLA has no residuals
    reads = residual_kv.reads
    keys, values = arena.keys.gather(reads.blocks.ids), arena.values.gather(reads.blocks.ids)
    return packed_attention(queries, keys, values, reads, options, arena, partial(_added, residual_kv, reads))


def _added(residual_kv: LayerResidualKV, reads: Reads, weights: mx.array) -> mx.array:
    """Residuals' part of each row's sums of values, float32 [B, H_kv, g * n, D], from weights [num_blocks, H_kv, g, n,
    256].
    """
    _, heads, shared_by, num_tokens, _ = weights.shape
    ends = [0, *accumulate(len(row.block_ids) for row in reads.rows)]
    of_rows = {row.row: row for row in residual_kv.rows}
    made: list[mx.array | None] = []
    for place in range(reads.batch_size):
        row = of_rows.get(place)
        if row is None or row.value_a is None or row.matrices.value_b is None:
            made.append(None)
            continue
        low_rank = row.value_a.array[row.residual_ids].astype(mx.float32)
        own = weights[ends[place] : ends[place + 1]].moveaxis(0, 3).reshape(heads * shared_by * num_tokens, -1)
        sums = (own @ low_rank.reshape(own.shape[1], -1)).reshape(heads, shared_by * num_tokens, -1)
        made.append(sums @ row.matrices.value_b)
    nothing = mx.zeros_like(next(each for each in made if each is not None))
    return mx.stack([nothing if each is None else each for each in made])


def _of_a_chunk(queries: mx.array, arena: LayerArena, row: RowResidualKV, options: AttentionOptions) -> mx.array:
    assert arena.values is not None  # MLA has no residuals
    keys, values = unpack_row(arena.keys, row.reads, queries.dtype), unpack_row(arena.values, row.reads, mx.float32)
    if row.value_a is not None and row.matrices.value_b is not None:
        low_rank = row.value_a.array[row.residual_ids]
        low_rank = low_rank.reshape(-1, low_rank.shape[-1])[: row.reads.num_keys].astype(mx.float32)
        values = values + low_rank @ row.matrices.value_b
    return flash_attention(queries, keys, values.astype(queries.dtype), row.reads, options)

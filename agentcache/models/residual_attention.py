"""Attention of residual rows (ForkKV, arXiv 2604.06370), in MLX's operations: the specification of every kernel.

Keys are put together when they are read: what base has cached, and what x·A·B adds to it, brought to its position by
the layer's own rope (`residual_forms`). One softmax runs over the sums. Of values, base's and the low-rank ones are
added up apart and meet at the end, so that B is multiplied once: out = P·V + (P·x·A)·B.

Row by row and a few blocks at a time, so that one piece of one layer's keys is in memory at a time. The softmax is put
together on the way (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from agentcache.kv.arena import LayerArena, dequantise
from agentcache.kv.step_cache import PagedKV
from agentcache.models.attention import AttentionOptions, paged_attention
from agentcache.models.overlay import LayerOverlay, RowOverlay, piece_blocks

_SMALLEST = 6e-8  # above 0, in float16
_MASKED = -1e30  # finite: a piece may be masked as a whole


def overlaid_attention(
    queries: mx.array, arena: LayerArena, overlay: LayerOverlay, options: AttentionOptions
) -> mx.array:
    """Attention of `queries` [B, H_q, n, D_k] over rows of which some have residuals; returns [B, H_q, n, D_v]."""
    done = []
    if overlay.plain_reads is not None:
        done.append(paged_attention(queries[overlay.plain], PagedKV(arena, overlay.plain_reads), options))
    for row in overlay.rows:
        q = queries[row.row].astype(mx.float32) * options.scale
        # One row after the other: what a row needs in memory is gone before the next one begins.
        ids = row.reads.block_ids[0] if not done else mx.depends([row.reads.block_ids[0]], [done[-1]])[0]
        done.append(_row_attention(q, arena, row, ids, options)[None].astype(queries.dtype))
    return mx.concatenate(done)[overlay.order]


@dataclass
class _Sums:
    """What a row's queries have seen so far.

    Args:
        peak: the largest score, float32 [H_kv, g, n, 1].
        total: sum of exp(score - peak), likewise.
        values: the same sum over values, [H_kv, g, n, D_v].
        residuals: and over residuals of values, [H_kv, g, n, r]; None without.
    """

    peak: mx.array
    total: mx.array
    values: mx.array
    residuals: mx.array | None


def _row_attention(
    q: mx.array, arena: LayerArena, row: RowOverlay, ids: mx.array, options: AttentionOptions
) -> mx.array:
    """Float32 [H_q, n, D_v] of one row's scaled queries [H_q, n, D_k].

    Args:
        ids: slots of base's blocks.
    """
    assert arena.values is not None  # MLA has no residuals
    num_heads, num_tokens, _ = q.shape
    kv_heads = arena.keys.num_heads
    grouped = q.reshape(kv_heads, num_heads // kv_heads, num_tokens, -1)  # query head h reads kv head h // g
    sums = _nothing(grouped, arena.values.dim, row, options)
    size = piece_blocks(ids.shape[0], num_heads * num_tokens)
    for begin in range(0, ids.shape[0], size):
        piece = slice(begin, begin + size)
        sums = _read(grouped, arena, row, mx.depends([ids[piece]], [sums.total])[0], piece, sums, options)
    out = sums.values
    if sums.residuals is not None and row.matrices.value_b is not None:
        out = out + sums.residuals @ row.matrices.value_b[:, None]
    return (out / sums.total).reshape(num_heads, num_tokens, -1)


def _nothing(grouped: mx.array, value_dim: int, row: RowOverlay, options: AttentionOptions) -> _Sums:
    """Before the first key. A sink is a score that is there already, and has no value."""
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
    row: RowOverlay,
    ids: mx.array,
    piece: slice,
    sums: _Sums,
    options: AttentionOptions,
) -> _Sums:
    """The sums with the keys and values of some of the row's blocks."""
    assert arena.values is not None
    residual_ids = row.residual_ids[piece]
    scores = grouped @ _in_order(_keys(arena, row, ids, residual_ids, piece))[:, None].swapaxes(-1, -2)
    if options.softcap is not None:
        scores = options.softcap * mx.tanh(scores / options.softcap)
    mask = row.reads.block_mask[piece].swapaxes(0, 1).reshape(scores.shape[2], -1)
    scores = mx.where(mask, scores, _MASKED)
    peak = mx.maximum(sums.peak, scores.max(axis=-1, keepdims=True))
    weights, fading = mx.exp(scores - peak), mx.exp(sums.peak - peak)
    values = _in_order(dequantise(arena.values.gather(ids), arena.quantisation, mx.float32))
    residuals = None
    if sums.residuals is not None and row.value_a is not None:
        low_rank = row.value_a.array[residual_ids].astype(mx.float32).reshape(-1, sums.residuals.shape[-1])
        residuals = sums.residuals * fading + weights @ low_rank
    return _Sums(
        peak,
        sums.total * fading + weights.sum(axis=-1, keepdims=True),
        sums.values * fading + weights @ values[:, None],
        residuals,
    )


def _keys(arena: LayerArena, row: RowOverlay, ids: mx.array, residual_ids: mx.array, piece: slice) -> mx.array:
    """Float32 keys [blocks, H_kv, 256, D_k]: base's, and what the adapter adds."""
    base = dequantise(arena.keys.gather(ids), arena.quantisation, mx.float32)
    if row.key_a is None or row.matrices.key_b is None:
        return base
    low_rank = row.key_a.array[residual_ids].astype(mx.float32)
    delta = (low_rank @ row.matrices.key_b).reshape(*low_rank.shape[:2], arena.keys.num_heads, -1)
    starts = mx.array(row.reads.blocks.starts[piece], mx.int32)
    if row.key_norms is None:
        return base + row.form.rotated(delta, None, starts)
    norms = row.key_norms.array[residual_ids].astype(mx.float32)
    without, agent = norms[..., 0], norms[..., 1]
    # A place that has never been written holds zeros; it is masked, and must not become infinite.
    ratio = mx.where(without > 0, agent / mx.maximum(without, _SMALLEST), 0).swapaxes(1, 2)[..., None]
    return base * ratio + row.form.rotated(delta, agent, starts)


def _in_order(blocks: mx.array) -> mx.array:
    """[blocks, H, 256, D] to [H, blocks * 256, D]."""
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])

"""Attention over quantised KV, also of a chunk's own tokens: cold, warm and hot prompts read the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, SideArena
from agentcache.kv.by_channel import product_by_channel, product_of_values
from agentcache.kv.packed import PackedBlocks, dequantise, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import ByChannel, Packing, Plain, Quantisation
from agentcache.kv.reads import BlockReads, Part, Reads
from agentcache.kv.step_cache import PagedKV
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.models import fused
from agentcache.models.fused import read_by_kernels

# Query tokens up to which packed products are faster than unpacking.
MAX_PACKED_QUERIES = 8
log = logging.getLogger("agentcache.models")

Product = Callable[[mx.array, Packed, Packing, bool], mx.array]
_CHECKED_ROWS = (1, 2, 6, 16, 64)  # kernels depend on the number of rows
_TOLERANCE = 1e-3  # of the largest result, for TF32
_BLOCKS, _HEADS = 3, 2


class AttentionOptions(NamedTuple):
    """Operations on scores: `softcap` c in c * tanh(scores / c); `sinks`, a logit per head without a value, [H_q]."""

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None


def reads_packed(num_tokens: int, batch_size: int, softcap: float | None = None) -> bool:
    return num_tokens <= MAX_PACKED_QUERIES or batch_size > 1 or softcap is not None


def paged_attention(queries: mx.array, kv: PagedKV, options: AttentionOptions) -> mx.array:
    """Attention of `queries` [B, H_q, n, D_k] over paged rows; [B, H_q, n, D_v]."""
    if fused.why_none():
        return attention_by_operations(queries, kv, options)
    return fused.attention(
        queries,
        kv,
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
        reference=lambda: attention_by_operations(queries, kv, options),
    )


def attention_by_operations(queries: mx.array, kv: PagedKV, options: AttentionOptions) -> mx.array:
    """`paged_attention` by MLX's operations: the specification of every kernel."""
    reads = kv.reads
    if isinstance(reads, Reads) and reads.in_segments:
        return _by_segments(queries, kv, reads, options)
    if reads_packed(queries.shape[2], reads.batch_size, options.softcap):
        return packed_attention(queries, *gather(kv.arena, reads), reads, options)
    return _flash(queries, kv, options)


def _flash(queries: mx.array, kv: PagedKV, options: AttentionOptions) -> mx.array:
    keys, values = unpack_both(queries, kv.arena, kv.reads)
    attended = flash_attention(queries, keys, values, kv.reads, options)
    if kv.reads.begins_early:
        mx.async_eval(attended)
    return attended


def _by_segments(queries: mx.array, kv: PagedKV, step: Reads, options: AttentionOptions) -> mx.array:
    """Attention of queries that read block 0 and their own block in the open form, blocks between in the full one."""
    segments = step.segments
    if len(segments) == 1 and reads_packed(queries.shape[2], step.batch_size, options.softcap):
        [(_, _, reads)] = segments
        return packed_attention(queries, *gather(kv.arena, reads), reads, options)
    unpacked = _unpack_segments(queries, kv.arena, step, options.softcap)
    parts = []
    for start, stop, reads in segments:
        own = queries[:, :, start:stop]
        if _is_packed(reads, options.softcap):
            parts.append(packed_attention(own, *gather(kv.arena, reads), reads, options))
        else:
            keys, values = next(unpacked)
            parts.append(flash_attention(own, keys, values, reads, options))
    attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    if step.begins_early:
        mx.async_eval(attended)
    return attended


def _is_packed(reads: BlockReads, softcap: float | None) -> bool:
    return reads_packed(reads.num_tokens, reads.batch_size, softcap)


def _unpack_segments(
    queries: mx.array, arena: LayerArena, step: Reads, softcap: float | None
) -> Iterator[Sequence[mx.array]]:
    """Keys and values of the segments that are read unpacked, in their order.

    A kernel reads packed blocks again for each segment: joining unpacked ones would move four times the bytes.
    """
    reads = [segment.reads for segment in step.segments if not _is_packed(segment.reads, softcap)]
    if not unpacks_by_kernel(queries, arena):
        yield from map(_FullBlocks(arena, step, queries.dtype).with_open, reads)
        return
    for group in fused.together(reads, queries.dtype):
        yield from zip(*(_unpack_group(queries, arena, side, group) for side in arena.both), strict=True)


def _unpack_group(queries: mx.array, arena: LayerArena, side: SideArena, group: Sequence[BlockReads]) -> list[mx.array]:
    """One side of several segments, by a kernel."""
    references = [partial(unpack_row, side, reads, queries.dtype) for reads in group]
    return fused.unpacked_together(side, group, queries.dtype, arena.appended.keys.written, references)


class _FullBlocks:
    """All full blocks that one row's step reads, unpacked once."""

    def __init__(self, arena: LayerArena, step: Reads, dtype: mx.Dtype) -> None:
        self._arena = arena
        self._step = step
        self._dtype = dtype

    @cached_property
    def _unpacked(self) -> list[mx.array]:
        ids = self._step.full_ids
        return [self._unpack(side, ids, ids.size * BLOCK_SIZE) for side in self._arena.both]

    def with_open(self, reads: BlockReads) -> list[mx.array]:
        """Keys and values of one segment, [1, H_kv, T, D]."""
        return [self._side(index, side, reads) for index, side in enumerate(self._arena.both)]

    def _side(self, index: int, side: SideArena, reads: BlockReads) -> mx.array:
        parts = [self._part(index, side, part) for part in reads.parts]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _part(self, index: int, side: SideArena, part: Part) -> mx.array:
        if part.is_open:
            return self._unpack(side.form(is_open=True), part.ids, part.num_tokens)
        begin = part.start - self._step.full_start
        return self._unpacked[index][:, :, begin : begin + part.num_tokens]

    def _unpack(self, side: SideArena, ids: mx.array, num_tokens: int) -> mx.array:
        return joined_blocks([dequantise(side.gather(ids), side.quantisation, self._dtype)])[:, :, :num_tokens]


def gather(arena: LayerArena, reads: BlockReads) -> tuple[list[PackedBlocks], list[PackedBlocks]]:
    """Keys and values of `reads.blocks`, in their order."""
    keys, values = (gather_side(side, reads) for side in arena.both)
    return keys, values


def gather_side(side: SideArena, reads: BlockReads) -> list[PackedBlocks]:
    made, blocks = [], reads.blocks
    if blocks.ids.size:
        made.append(PackedBlocks(side.gather(blocks.ids), side.quantisation))
    if blocks.open_ids is not None:
        opened = side.form(is_open=True)
        made.append(PackedBlocks(opened.gather(blocks.open_ids), opened.quantisation))
    return made


def joined_blocks(blocks: Sequence[mx.array]) -> mx.array:
    """[num_blocks, H, 256, D] of one row to [1, H, num_blocks * 256, D]."""
    joined = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
    _, heads, _, dim = joined.shape
    return joined.swapaxes(0, 1).reshape(1, heads, -1, dim)


def flash_attention(
    queries: mx.array, keys: mx.array, values: mx.array, reads: BlockReads, options: AttentionOptions
) -> mx.array:
    """Attention of one row's queries [1, H_q, n, D] over KV [1, H_kv, T, D]."""
    mask: str | mx.array = "causal" if reads.window is None else reads.mask[:, None, :, : keys.shape[2]]
    sinks = None if options.sinks is None else options.sinks.astype(queries.dtype)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=options.scale, mask=mask, sinks=sinks)


def unpack_both(queries: mx.array, arena: LayerArena, reads: BlockReads) -> list[mx.array]:
    """One row's keys and values."""
    return [unpack_for(queries, arena, side, reads) for side in arena.both]


def unpack_for(queries: mx.array, arena: LayerArena, side: SideArena, reads: BlockReads) -> mx.array:
    """`unpack_row` of one of `arena`'s sides in the type of `queries`, by a kernel if usable."""
    reference = partial(unpack_row, side, reads, queries.dtype)
    if not unpacks_by_kernel(queries, arena):
        return reference()
    return fused.unpacked(side, reads, queries.dtype, arena.appended.keys.written, reference)


def unpacks_by_kernel(queries: mx.array, arena: LayerArena) -> bool:
    if fused.why_none() or not fused.is_pair(arena):
        return False
    return fused.usable(fused.shape_of(arena, queries.shape[1], queries.dtype)).right


def unpack_row(side: SideArena, reads: BlockReads, dtype: mx.Dtype) -> mx.array:
    """One row's keys or values up to the end of the step, [1, H_kv, T, D]."""
    forms = [(side.form(is_open=part.is_open), part.ids) for part in reads.parts]
    blocks = [dequantise(form.gather(ids), form.quantisation, dtype) for form, ids in forms]
    return joined_blocks(blocks)[:, :, : reads.num_keys]


def packed_attention(
    queries: mx.array,
    keys: Sequence[PackedBlocks],
    values: Sequence[PackedBlocks],
    reads: BlockReads,
    options: AttentionOptions,
    added: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """`paged_attention` on packed blocks, merged in float32 as in flash-decoding.

    Args:
        keys, values: of `reads.blocks`, in their order.
        added: makes an addition to the values' sums, [B, H_kv, repeats * n, D_v], from weights [num_blocks, H_kv,
            repeats, n, 256].
    """
    batch, num_heads, num_tokens, _ = queries.shape
    kv_heads = keys[0].packed.data.shape[1]
    grouped = (kv_heads, num_heads // kv_heads, num_tokens)
    merged = (kv_heads, grouped[1] * num_tokens)
    blocks = reads.blocks

    q = blocks.spread((queries.astype(mx.float32) * options.scale).reshape(batch, *merged, -1))
    scores = product_with(q, keys, transpose=True).reshape(-1, *grouped, BLOCK_SIZE)
    weights, total = _softmax(scores, reads, options)
    out = product_with(weights.reshape(-1, *merged, BLOCK_SIZE), values, transpose=False)
    out = blocks.sum(out)
    if added is not None:
        out = out + added(weights)
    out = out.reshape(batch, *grouped, -1) / total
    return out.reshape(batch, num_heads, num_tokens, -1).astype(queries.dtype)


def _softmax(scores: mx.array, reads: BlockReads, options: AttentionOptions) -> tuple[mx.array, mx.array]:
    if options.softcap is not None:
        scores = options.softcap * mx.tanh(scores / options.softcap)
    scores = scores + reads.block_bias
    peak = reads.blocks.max(scores.max(axis=-1, keepdims=True))
    if options.sinks is None:
        weights = mx.exp(scores - reads.blocks.spread(peak))
        return weights, reads.blocks.sum(weights.sum(axis=-1, keepdims=True))
    sinks = options.sinks.astype(mx.float32).reshape(1, *scores.shape[1:3], 1, 1)
    peak = mx.maximum(peak, sinks)
    weights = mx.exp(scores - reads.blocks.spread(peak))
    return weights, reads.blocks.sum(weights.sum(axis=-1, keepdims=True)) + mx.exp(sinks - peak)


def activation_dtype(linear: nn.Module) -> mx.Dtype:
    """Type in which a linear module computes."""
    dtype = linear.scales.dtype if "scales" in linear else linear.weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16  # mxfp4's scales are uint8


def product_with(x: mx.array, blocks: Sequence[PackedBlocks], *, transpose: bool) -> mx.array:
    """`packed_product` with blocks of several packings, one after the other."""
    made, begin = [], 0
    for each in blocks:
        end = begin + len(each.packed.data)
        made.append(packed_product(x[begin:end], *each, transpose=transpose))
        begin = end
    return made[0] if len(made) == 1 else mx.concatenate(made)


def packed_product(x: mx.array, packed: Packed, quantisation: Packing, *, transpose: bool) -> mx.array:
    """Multiply float32 `x` with packed blocks [num_blocks, H, 256, D].

    `x` is [num_blocks, H, n, D], the result [num_blocks, H, n, 256]; without `transpose` the other way round.
    """
    if isinstance(quantisation, ByChannel):  # of keys
        product = product_by_channel if device() == NO_DEVICE else product_of_values
        return product(x, packed, quantisation.bits)
    # MLX's kernel is checked once: some are missing or wrong. On CUDA, compiling it would block serving.
    if isinstance(quantisation, Plain) or (device() == "cuda" and read_by_kernels(quantisation)):
        return by_definition(x, packed, quantisation, transpose)
    dim = packed.data.shape[-1] * 32 // quantisation.bits
    right = kernel_is_right(dim, quantisation, transpose, mx.default_device().type)
    return (by_kernel if right else by_definition)(x, packed, quantisation, transpose)


def by_kernel(x: mx.array, packed: Packed, quantisation: Packing, transpose: bool) -> mx.array:
    """Product by MLX's kernel; evaluation may raise RuntimeError."""
    assert isinstance(quantisation, Quantisation)
    packing = {"group_size": quantisation.group_size, "bits": quantisation.bits}
    return mx.quantized_matmul(x, *packed, transpose=transpose, **packing)


def by_definition(x: mx.array, packed: Packed, quantisation: Packing, transpose: bool) -> mx.array:
    values = dequantise(packed, quantisation, mx.float32)
    return x @ (values.swapaxes(-1, -2) if transpose else values)


@cache
def kernel_is_right(dim: int, quantisation: Quantisation, transpose: bool, device: mx.DeviceType) -> bool:
    """Whether `by_kernel` agrees with `by_definition`; warns if not."""
    if agrees(by_kernel, dim, quantisation, transpose):
        return True
    log.warning(
        "this device's packed product (%s, %d values a head, %s) is wrong or missing: blocks are unpacked (slower)",
        "keys" if transpose else "values",
        dim,
        quantisation,
    )
    return False


def agrees(product: Product, dim: int, quantisation: Quantisation, transpose: bool) -> bool:
    """Whether a product is right on random blocks."""
    keys = mx.random.split(mx.random.key(dim), 1 + len(_CHECKED_ROWS))
    packed = quantise(mx.random.normal((_BLOCKS, _HEADS, BLOCK_SIZE, dim), key=keys[0]), quantisation)
    width = dim if transpose else BLOCK_SIZE
    inputs = [
        mx.random.normal((_BLOCKS, _HEADS, rows, width), key=key)
        for rows, key in zip(_CHECKED_ROWS, keys[1:], strict=True)
    ]
    try:
        return all(
            _close(product(x, packed, quantisation, transpose), packed, quantisation, transpose, x) for x in inputs
        )
    except RuntimeError as error:
        log.debug("no packed product: %s", error)
        return False


def _close(actual: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool, x: mx.array) -> bool:
    expected = by_definition(x, packed, quantisation, transpose)
    largest = mx.abs(expected).max()
    return bool((mx.abs(actual - expected).max() <= _TOLERANCE * largest).item())

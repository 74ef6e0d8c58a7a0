"""Reference implementation of the kernels in numpy and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.packing_text import GROUP_TOKENS

Array = NDArray[np.float64]
# As `decode.PackedArrays`.
PackedNumpy = tuple[np.ndarray, np.ndarray, np.ndarray]


def unpacked(packed: PackedNumpy, bits: int = 4) -> Array:
    """Unpack to [..., D]: q * scale + bias, lowest bits first."""
    data, scales, biases = packed
    codes = (data[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    values = codes.reshape(*data.shape[:-1], scales.shape[-1], -1).astype(np.float64)
    result: Array = (values * scales[..., None] + biases[..., None]).reshape(*data.shape[:-1], -1)
    return result


def packed(x: Array, group_size: int, bits: int = 4) -> tuple[NDArray[np.uint32], Array, Array]:
    """Pack [..., D] as `mx.quantize`: data [..., D*bits/32], unrounded scales and biases [..., D/group_size]."""
    groups = np.clip(np.nan_to_num(x, nan=0.0), -30000, 30000).reshape(*x.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    most = 2**bits - 1
    width = np.maximum((high - low) / most, 1e-7)
    from_below = np.abs(low) > np.abs(high)
    edge, width = np.where(from_below, low, high), np.where(from_below, width, -width)
    steps = np.rint(edge / width)
    scales = np.where(steps == 0, width, edge / np.where(steps == 0, 1, steps))
    biases = np.where(steps == 0, 0.0, edge)
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, most).astype(np.uint32)
    words = codes.reshape(*x.shape[:-1], -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    return words.sum(axis=-1, dtype=np.uint32), scales, biases


def stored(x: Array, group_size: int, bits: int) -> PackedNumpy:
    """`packed` with float16 scales and biases."""
    data, scales, biases = packed(x, group_size, bits)
    return data, scales.astype(np.float16), biases.astype(np.float16)


def quantise_by_channel(x: np.ndarray, bits: int = 4) -> tuple[NDArray[np.uint32], np.ndarray, np.ndarray]:
    """Pack [..., T, D] by channel, in float32: data [..., T, D*bits/32], float16 scales and biases [..., T/64, D].

    A step is at least the rounding error of the bias, so that even equal values far from 0 are right to a step, and a
    normal float16: with a smaller scale the highest code would miss by more than a step.
    """
    values = np.clip(np.where(np.isnan(x), 0.0, x).astype(np.float32), np.float32(-30000), np.float32(30000))
    groups = values.reshape(*x.shape[:-2], -1, GROUP_TOKENS, x.shape[-1])
    low, high = groups.min(axis=-2, keepdims=True), groups.max(axis=-2, keepdims=True)
    most = np.float32(2**bits - 1)
    biases = low.astype(np.float16)
    rounded = np.abs(biases.astype(np.float32) - low)
    scales = np.maximum(np.maximum((high - low) / most, rounded), np.float32(2**-14)).astype(np.float16)
    steps = np.rint((groups - biases.astype(np.float32)) / scales.astype(np.float32))
    codes = np.clip(steps, 0, most).astype(np.uint8).reshape(x.shape)
    ones = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    data = np.packbits(ones.reshape(*x.shape[:-1], -1), axis=-1, bitorder="little").view(np.uint32)
    return data, scales.squeeze(-2), biases.squeeze(-2)


def unpacked_by_channel(packed: PackedNumpy, bits: int = 4) -> Array:
    """Unpack `quantise_by_channel` to [..., T, D]."""
    data, scales, biases = packed
    ones = np.unpackbits(np.ascontiguousarray(data).view(np.uint8), axis=-1, bitorder="little")
    codes = ones.reshape(*data.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    groups = codes.reshape(*scales.shape[:-1], GROUP_TOKENS, -1).astype(np.float64)
    result: Array = (groups * scales[..., None, :] + biases[..., None, :]).reshape(codes.shape)
    return result


def sealed(keys: PackedNumpy, values: PackedNumpy, group_size: int) -> tuple[PackedNumpy, PackedNumpy]:
    """Keys and values of full blocks from those of open blocks."""
    return quantise_by_channel(unpacked(keys, 8)), stored(unpacked(values, 8), group_size, 4)


def reopened(keys: PackedNumpy, values: PackedNumpy, group_size: int) -> tuple[PackedNumpy, PackedNumpy]:
    """Keys and values of open blocks from those of full blocks."""
    return stored(unpacked_by_channel(keys), group_size, 8), stored(unpacked(values), group_size, 8)


def row_of(
    packed: PackedNumpy, block_ids: Sequence[int], num_tokens: int, bits: int = 4, by_channel: bool = False
) -> Array:
    """The first tokens of a block table, [H_kv, num_tokens, D]."""
    if not block_ids:
        return np.zeros((packed[0].shape[1], 0, packed[0].shape[3] * 32 // bits))
    data, scales, biases = (part[list(block_ids)] for part in packed)
    blocks = (unpacked_by_channel if by_channel else unpacked)((data, scales, biases), bits)
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])[:, :num_tokens]


@dataclass(frozen=True, eq=False)
class OpenBlocks:
    """Open blocks, 8 bits by token; `block_ids` by row, from the block of its first query.

    `first_ids`: slots of block 0 for queries of later blocks, by row; -1 if these do not read it; () if they read it
    from full blocks.
    """

    keys: PackedNumpy
    values: PackedNumpy
    block_ids: Sequence[Sequence[int]]
    first_ids: Sequence[int] = ()

    def row(self, block_ids: Sequence[int], num_tokens: int) -> tuple[Array, Array]:
        """Keys and values of a block table's first tokens, [H_kv, num_tokens, D]."""
        return row_of(self.keys, block_ids, num_tokens, 8), row_of(self.values, block_ids, num_tokens, 8)


def attention(
    queries: Array,
    keys: PackedNumpy,
    values: PackedNumpy,
    block_ids: Sequence[Sequence[int]],
    bases: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    bits: tuple[int, int] = (4, 4),
    open_blocks: OpenBlocks | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    residuals: LowRank | None = None,
    key_residuals: LowRankKeys | None = None,
) -> Array:
    """Attention [B, H_q, n, D] of `queries` over rows with `lengths` earlier tokens.

    Args:
        bits: of keys and of values.
        open_blocks: from which queries read their own blocks, and block 0; `keys` are by channel then.
    """
    rows = []
    for row, (query, ids, base, length) in enumerate(zip(queries, block_ids, bases, lengths, strict=True)):
        parts = []
        for begin, end in _runs(length, length + query.shape[1], open_blocks is not None):
            if open_blocks is None:
                k, v = (row_of(side, ids, end - base, of) for side, of in zip((keys, values), bits, strict=True))
            else:
                slot = open_blocks.block_ids[row][begin // BLOCK_SIZE - length // BLOCK_SIZE]
                first = open_blocks.first_ids[row] if open_blocks.first_ids else -1
                k, v = _of_both(keys, values, bits[1], ids, open_blocks, (first, slot), base, end)
            at = end - k.shape[1]
            if residuals is not None:
                v = v + residuals.of_row(row, end - at)
            if key_residuals is not None:
                k = key_residuals.of_row(row, k, at)
            own = query[:, begin - length : end - length]
            parts.append(_row(own, k, v, at, begin, scale, window, softcap, sinks))
        rows.append(np.concatenate(parts, axis=1))
    return np.stack(rows)


def _runs(begin: int, end: int, is_cut: bool) -> list[tuple[int, int]]:
    """`begin … end-1`, cut where blocks begin."""
    cuts = range((begin // BLOCK_SIZE + 1) * BLOCK_SIZE, end, BLOCK_SIZE) if is_cut else ()
    return list(zip([begin, *cuts], [*cuts, end], strict=True))


def _of_both(
    keys: PackedNumpy,
    values: PackedNumpy,
    value_bits: int,
    block_ids: Sequence[int],
    open_blocks: OpenBlocks,
    slots: tuple[int, int],
    base: int,
    end: int,
) -> tuple[Array, Array]:
    """Keys and values up to `end - 1`: block 0 and the last one from open `slots`, others from full blocks.

    Without block 0 they begin at `base`. The last one is also a full block if its slot is -1.
    """
    first, last = slots
    own = (end - 1) // BLOCK_SIZE * BLOCK_SIZE if last >= 0 else end
    count = max(0, own - base)
    full = block_ids[: -(-count // BLOCK_SIZE)]
    parts = [
        open_blocks.row([first], BLOCK_SIZE if first >= 0 and end > BLOCK_SIZE else 0),
        (row_of(keys, full, count, by_channel=True), row_of(values, full, count, value_bits)),
        open_blocks.row([last], end - own),
    ]
    k, v = zip(*parts, strict=True)
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


@dataclass(frozen=True, eq=False)
class LowRank:
    """Residuals of values: x·A [slots, 256, r], B [H_kv, r, D], slots by row."""

    low_rank: np.ndarray
    matrix: Array
    block_ids: Sequence[Sequence[int]]

    def of_row(self, row: int, num_tokens: int) -> Array:
        """A row's residuals, [H_kv, num_tokens, D]."""
        tokens = self.low_rank[list(self.block_ids[row])].astype(np.float64)
        result: Array = tokens.reshape(-1, tokens.shape[-1])[:num_tokens] @ self.matrix
        return result


@dataclass(frozen=True, eq=False)
class LowRankKeys:
    """Residuals of keys.

    Args:
        added: x·A·B before rope, times the norm's weights if keys are normed.
        norms: norm factors without and with the adapter, [slots, 256, H_kv, 2]; None without norm.
        angles: rotation per position, [pairs].
        interleaved: as in `HeadShape`.
    """

    added: LowRank
    norms: np.ndarray | None
    angles: Array
    interleaved: bool

    def of_row(self, row: int, keys: Array, base: int) -> Array:
        """Add residuals to keys [H_kv, num_tokens, D]; the first is at position `base`."""
        count = keys.shape[1]
        added = self.turned(self.added.of_row(row, count), base)
        if self.norms is None:
            return keys + added
        norms = self.norms[list(self.added.block_ids[row])].astype(np.float64)
        without, agent = norms.reshape(-1, *norms.shape[2:])[:count].T[..., None]
        result: Array = agent / without * keys + agent * added
        return result

    def turned(self, x: Array, base: int) -> Array:
        """Apply rope to [H_kv, num_tokens, D]; the first is at position `base`."""
        pairs = len(self.angles)
        first, second = (
            (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
            if self.interleaved
            else (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        angles = (base + np.arange(x.shape[1]))[:, None] * self.angles
        turned = x.copy()
        turned[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        turned[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
        return turned


def latent_attention(
    queries: Array,
    latents: PackedNumpy,
    rank: int,
    block_ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    scale: float,
    bits: int = 4,
) -> Array:
    """Attention [B, H, n, rank] of `queries` [B, H, n, rank + rope] over latents."""
    rows = []
    for query, ids, length in zip(queries, block_ids, lengths, strict=True):
        keys = row_of(latents, ids, length + query.shape[1], bits)
        rows.append(_row(query, keys, keys[..., :rank], 0, length, scale, None, None, None))
    return np.stack(rows)


def _row(
    queries: Array,
    keys: Array,
    values: Array,
    base: int,
    length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    repeats = queries.shape[0] // keys.shape[0]
    keys, values = keys.repeat(repeats, axis=0), values.repeat(repeats, axis=0)
    scores = scale * np.einsum("hnd,htd->hnt", queries, keys)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    at = base + np.arange(keys.shape[1])[None]
    own = length + np.arange(queries.shape[1])[:, None]
    farthest = own - (at.size + base + 1 if window is None else window)
    visible: NDArray[np.bool_] = np.logical_and(at <= own, at > farthest)
    scores = np.where(visible, scores, -np.inf)
    seen: NDArray[np.bool_] = np.any(visible, axis=0, keepdims=True)
    values = np.where(seen.T, values, 0.0)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    result: Array = np.einsum("hnt,htd->hnd", weights / total, values)
    return result

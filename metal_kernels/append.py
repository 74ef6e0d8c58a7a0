"""Quantise a step's keys and values to 4 bits into the arenas, one launch per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.decode import PackedArrays
from agentcache.metal_kernels.decode_plan import nothing_written
from agentcache.metal_kernels.kernel_text import NO_DEVICE, KernelText, device

_THREADS = 256
_MOST_TRACED = 32  # tokens per row; longer chunks are rare and of many lengths

# One thread per word of eight values. Threads of a quantisation group share its range.
_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int lane = int(thread_index_in_simdgroup);
    const int WORDS = D / 8;
    const int SHARE = GS / 8;
    const int tokens = params[0];
    const int row_tokens = params[1];
    const int side_words = tokens * HEADS * WORDS;
    const bool real = i < SIDES * side_words;
    const bool is_key = i < side_words;
    const int own = is_key ? i : i - side_words;
    float x[8];
    float low = 30000.0f;
    float high = -30000.0f;
    UNROLL for (int e = 0; e < 8; ++e) {
        const size_t from = size_t(own) * 8 + e;
        const float value = real ? float(is_key ? keys[from] : values[from]) : 0.0f;
        x[e] = value == value ? metal::max(-30000.0f, metal::min(value, 30000.0f)) : 0.0f;
        low = metal::min(low, x[e]);
        high = metal::max(high, x[e]);
    }
    UNROLL for (int b = SHARE / 2; b > 0; b >>= 1) {
        low = metal::min(low, simd_shuffle_xor(low, ushort(b)));
        high = metal::max(high, simd_shuffle_xor(high, ushort(b)));
    }
    const float range = metal::max((high - low) / 15.0f, 1.0e-7f);
    const bool from_below = metal::max(low, -low) > metal::max(high, -high);
    const float edge = from_below ? low : high;
    const float width = from_below ? range : -range;
    const float steps = metal::rint(edge / width);
    const float scale = steps == 0.0f ? width : edge / steps;
    const float bias = steps == 0.0f ? 0.0f : edge;
    uint word = 0;
    UNROLL for (int e = 0; e < 8; ++e)
        word |= uint(metal::max(0.0f, metal::min(metal::rint((x[e] - bias) / scale), 15.0f))) << (4 * e);
    if (real) {
        const int token = own / WORDS % row_tokens;
        const int head = own / WORDS / row_tokens % HEADS;
        const int place = places[own / WORDS / row_tokens / HEADS * row_tokens + token];
        const size_t row = (size_t(place / 256) * HEADS + head) * 256 + place % 256;
        device uint* data = (device uint*)(is_key ? kq : vq);
        device half* scales = (device half*)(is_key ? ks : vs);
        device half* biases = (device half*)(is_key ? kb : vb);
        data[row * WORDS + own % WORDS] = word;
        if (lane % SHARE == 0) {
            const size_t at = row * (D / GS) + own % WORDS / SHARE;
            scales[at] = half(scale);
            biases[at] = half(bias);
        }
    }
    if (i == 0) written[0] = 0;
"""

APPEND = KernelText(
    "agentcache_append",
    ("keys", "values", "places", "params", "before", "kq", "ks", "kb", "vq", "vs", "vb"),
    ("written",),
    _BODY,
    changed=("kq", "ks", "kb", "vq", "vs", "vb"),
)


class Places(NamedTuple):
    """Slots of a step's tokens, for all layers of a cache group.

    `places`: slot * 256 + offset, int32 [B * n], row by row. `counts`: B * n and n, int32 [2].
    """

    places: mx.array
    counts: mx.array


def append(
    sides: Sequence[mx.array],
    arenas: Sequence[mx.array],
    places: Places,
    group_size: int,
    before: mx.array | None = None,
) -> mx.array:
    """Quantise a step's keys and values as `mx.quantize` in float32, and write them into the arenas.

    NaN becomes 0; values saturate at 30,000. MLX does not know of the writes into `arenas`: readers in the same graph
    must take the result, a zero int32 [1], as an input, so that the device orders them.

    Args:
        sides: keys, and values if any, [B, H_kv, n, D].
        arenas: data, scales and biases of each side, [slots, H_kv, 256, ·].
        before: result of the last call for these arrays, which may still run.
    """
    before = nothing_written() if before is None else before
    return _appending(len(sides), group_size, sides[0].shape[2] <= _MOST_TRACED)(*sides, *places, before, *arenas)


def packed_alone(x: mx.array, group_size: int) -> PackedArrays:
    """Pack x [B, H, n, D] into evaluated data, scales, biases [B, H, n, ·]."""
    batch, heads, num_tokens, dim = x.shape
    count = batch * num_tokens
    slots = -(-count // BLOCK_SIZE)
    widths = ((dim // 8, mx.uint32), (dim // group_size, mx.float16), (dim // group_size, mx.float16))
    arenas = [mx.zeros((slots, heads, BLOCK_SIZE, width), dtype) for width, dtype in widths]
    mx.eval(arenas)
    places = Places(mx.arange(count, dtype=mx.int32), mx.array([count, num_tokens], mx.int32))
    mx.eval(append([x], arenas, places, group_size))
    order = [part.swapaxes(1, 2).reshape(-1, heads, part.shape[3])[:count] for part in arenas]
    data, scales, biases = (part.reshape(batch, num_tokens, heads, -1).swapaxes(1, 2) for part in order)
    return data, scales, biases


@cache
def _appending(num_sides: int, group_size: int, is_traced: bool) -> Callable[..., mx.array]:
    write = partial(_append, num_sides, group_size)
    return mx.compile(write) if is_traced and device() != NO_DEVICE else write


def _append(num_sides: int, group_size: int, *given: mx.array) -> mx.array:
    sides, step, arenas = given[:num_sides], given[num_sides : num_sides + 3], given[num_sides + 3 :]
    _, kv_heads, _, dim = sides[0].shape
    words = num_sides * sides[0].size // 8
    [written] = APPEND.launch(
        [sides[0], sides[-1], *step, *arenas[:3], *arenas[-3:]],
        {"D": dim, "GS": group_size, "HEADS": kv_heads, "SIDES": num_sides},
        threadgroups=-(-words // _THREADS),
        threads=_THREADS,
        outputs=[((1,), mx.int32)],
    )
    return written

"""Quantise a step's keys and values per token into the arenas, one launch per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.decode import PackedArrays
from agentcache.metal_kernels.decode_plan import nothing_written
from agentcache.metal_kernels.kernel_text import NO_DEVICE, KernelText, device
from agentcache.metal_kernels.packing_text import PACKING

_THREADS = 256
_MOST_TRACED = 32  # tokens per row; longer chunks are rare and of many lengths

# One thread per eight values.
_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int UNITS = D / 8;
    const int tokens = params[0];
    const int row_tokens = params[1];
    const int side_units = tokens * HEADS * UNITS;
    const bool real = i < SIDES * side_units;
    const bool is_key = i < side_units;
    const int bits = is_key ? KEY_BITS : VALUE_BITS;
    const int own = is_key ? i : i - side_units;
    float x[8];
    UNROLL for (int e = 0; e < 8; ++e) {
        const size_t from = size_t(own) * 8 + e;
        x[e] = real ? limited(float(is_key ? keys[from] : values[from])) : 0.0f;
    }
    uint words[2];
    float scale;
    float bias;
    quantise_unit<GS / 8>(x, bits, words, scale, bias);
    if (real) {
        const int token = own / UNITS % row_tokens;
        const int head = own / UNITS / row_tokens % HEADS;
        const int place = places[own / UNITS / row_tokens / HEADS * row_tokens + token];
        const size_t row = (size_t(place / 256) * HEADS + head) * 256 + place % 256;
        device uint* data = (device uint*)(is_key ? kq : vq);
        device half* scales = (device half*)(is_key ? ks : vs);
        device half* biases = (device half*)(is_key ? kb : vb);
        store_unit<GS>(data, scales, biases, row, UNITS, own % UNITS, bits, words, scale, bias);
    }
    if (i == 0) written[0] = 0;
"""

APPEND = KernelText(
    "agentcache_append",
    ("keys", "values", "places", "params", "before", "kq", "ks", "kb", "vq", "vs", "vb"),
    ("written",),
    _BODY,
    PACKING,
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
        arenas: data, scales and biases of each side, [slots, H_kv, 256, ·]; bits (4 or 8) are those of data's width.
        before: result of the last call for these arrays, which may still run.
    """
    before = nothing_written() if before is None else before
    return _appending(len(sides), group_size, sides[0].shape[2] <= _MOST_TRACED)(*sides, *places, before, *arenas)


def packed_alone(x: mx.array, group_size: int, bits: int = 4) -> PackedArrays:
    """Pack x [B, H, n, D] into evaluated data, scales, biases [B, H, n, ·]."""
    batch, heads, num_tokens, dim = x.shape
    count = batch * num_tokens
    slots = -(-count // BLOCK_SIZE)
    widths = ((dim * bits // 32, mx.uint32), (dim // group_size, mx.float16), (dim // group_size, mx.float16))
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
    units = num_sides * sides[0].size // 8
    bits = {f"{side}_BITS": data.shape[3] * 32 // dim for side, data in (("KEY", arenas[0]), ("VALUE", arenas[-3]))}
    [written] = APPEND.launch(
        [sides[0], sides[-1], *step, *arenas[:3], *arenas[-3:]],
        {"D": dim, "GS": group_size, "HEADS": kv_heads, "SIDES": num_sides, **bits},
        threadgroups=-(-units // _THREADS),
        threads=_THREADS,
        outputs=[((1,), mx.int32)],
    )
    return written

"""A step's new keys or values to the 4 bits that the arenas hold, in one launch instead of a dozen.

Kernels cannot write into arrays that exist, so what is packed is then put into its slots by assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx

from agentcache.metal_kernels.decode import PackedArrays
from agentcache.metal_kernels.kernel_text import NO_DEVICE, KernelText, device

_THREADS = 256

# One thread a word of eight values; the threads of a quantisation group are neighbours in a simdgroup and find the
# group's range together. The arithmetic is mx.quantize's, in float32. NaN is 0, and values saturate.
_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int lane = int(thread_index_in_simdgroup);
    const int SHARE = GS / 8;
    const bool real = i < params[0];
    float x[8];
    float low = 30000.0f;
    float high = -30000.0f;
    UNROLL for (int e = 0; e < 8; ++e) {
        const float value = real ? float(values[size_t(i) * 8 + e]) : 0.0f;
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
        data[i] = word;
        if (lane % SHARE == 0) {
            scales[i / SHARE] = half(scale);
            biases[i / SHARE] = half(bias);
        }
    }
"""

PACK = KernelText("agentcache_pack", ("values", "params"), ("data", "scales", "biases"), _BODY)


def pack(x: mx.array, group_size: int) -> PackedArrays:
    """Quantise x [..., D] along its last axis to 4 bits: data uint32 [..., D/8], scales and biases float16 [..., D/GS].

    As `mx.quantize` does in float32; NaN becomes 0, and values saturate at 30,000.
    """
    *rows, dim = x.shape
    words = x.size // 8
    data, scales, biases = PACK.launch(
        [x, mx.array([words], mx.int32)],
        {"GS": group_size},
        threadgroups=-(-words // _THREADS),
        threads=_THREADS,
        outputs=[
            ((*rows, dim // 8), mx.uint32),
            ((*rows, dim // group_size), mx.float16),
            ((*rows, dim // group_size), mx.float16),
        ],
    )
    return data, scales, biases


def append(
    sides: Sequence[mx.array], arenas: Sequence[mx.array], slots: mx.array, offsets: mx.array, group_size: int
) -> Sequence[mx.array]:
    """A step's keys and values behind its rows, in place where nobody else holds the arenas' arrays.

    Args:
        sides: keys, and values where there are any, [B, H_kv, n, D].
        arenas: data, scales and biases of each, [slots, H_kv, 256, ·].
        slots, offsets: where each token goes, int32 [B * n].

    Returns:
        The arenas' arrays as they are then.
    """
    return _appending(len(sides), group_size)(*sides, *arenas, slots, offsets)


@cache
def _appending(num_sides: int, group_size: int) -> Callable[..., Sequence[mx.array]]:
    """Traced once: fifteen operations a layer that Python need not put together for each of them."""
    write = partial(_append, num_sides, group_size)
    return write if device() == NO_DEVICE else mx.compile(write)


def _append(num_sides: int, group_size: int, *given: mx.array) -> list[mx.array]:
    slots, offsets = given[-2:]
    new = [part for side in given[:num_sides] for part in pack(side, group_size)]
    written = []
    for part, arena in zip(new, given[num_sides:-2], strict=True):
        arena[slots, :, offsets] = part.swapaxes(1, 2).reshape(-1, part.shape[1], part.shape[3])
        written.append(arena)
    return written

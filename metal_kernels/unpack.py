"""Unpack one row's blocks into contiguous keys or values of the model's dtype, for flash attention."""

from __future__ import annotations

import mlx.core as mx

from agentcache.metal_kernels.decode import PackedArrays
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.numbers import ints

_THREADS = 256

# One thread per word of eight values. The thread of a group's first word loads its scale and bias.
_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int lane = int(thread_index_in_simdgroup);
    const int tokens = params[0];
    const int WORDS = D / 8;
    const int SHARE = GS / 8;
    const bool real = i < HEADS * tokens * WORDS;
    uint word = 0;
    float scale = 0.0f;
    float bias = 0.0f;
    if (real) {
        const int token = i / WORDS % tokens;
        const int head = i / WORDS / tokens;
        const size_t row = (size_t(table[token / 256]) * HEADS + head) * 256 + token % 256;
        word = data[row * WORDS + i % WORDS];
        if (lane % SHARE == 0) {
            const size_t at = row * (D / GS) + i % WORDS / SHARE;
            scale = float(scales[at]);
            bias = float(biases[at]);
        }
    }
    scale = simd_shuffle(scale, ushort(lane / SHARE * SHARE));
    bias = simd_shuffle(bias, ushort(lane / SHARE * SHARE));
    float x[8];
    UNROLL for (int e = 0; e < 8; ++e) x[e] = metal::fma(float((word >> (4 * e)) & 15u), scale, bias);
    if (real) store8<T>(out + size_t(i) * 8, x);
"""

UNPACK = KernelText("agentcache_unpack", ("data", "scales", "biases", "table", "params", "written"), ("out",), _BODY)


def unpack(
    packed: PackedArrays, block_ids: mx.array, num_tokens: int, dtype: mx.Dtype, written: mx.array | None = None
) -> mx.array:
    """The first `num_tokens` tokens of the blocks `block_ids`, int32 [n], as [1, H_kv, num_tokens, D].

    Args:
        written: result of `append` for these arrays in the same graph.
    """
    kv_heads, dim = packed[0].shape[1], packed[0].shape[3] * 8
    words = kv_heads * num_tokens * dim // 8
    counts = ints((num_tokens,))
    [out] = UNPACK.launch(
        [*packed, block_ids, counts, counts if written is None else written],
        {"T": dtype, "D": dim, "HEADS": kv_heads, "GS": dim // packed[1].shape[3]},
        threadgroups=-(-words // _THREADS),
        threads=_THREADS,
        outputs=[((1, kv_heads, num_tokens, dim), dtype)],
    )
    return out

"""Unpacks a row's blocks into contiguous keys or values for flash attention."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from agentcache.metal_kernels.decode import PackedArrays, no_residuals
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.numbers import ints
from agentcache.metal_kernels.rope_tables import STEP, RopeTables, no_rope

_THREADS = 256

# One thread per word; that of a group's first word loads scale and bias.
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
    """Unpack the first tokens of the blocks `block_ids`, int32 [n], to [1, H_kv, num_tokens, D].

    `written`: result of `append` for these arrays in the same graph.
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


_TOKENS = 4  # per thread: a row of B is loaded once for all

# One thread per two words of some tokens: those that rope pairs, or neighbours.
_FUNCTIONS = """
METAL_FUNC void unpack_scaled(uint word, half scale, half bias, float factor, thread float* x) {
    UNROLL for (int e = 0; e < 8; ++e)
        x[e] = factor * metal::fma(float((word >> (4 * e)) & 15u), float(scale), float(bias));
}
template <int RANK> METAL_FUNC void load_ranks(const device half* from, int begin, thread half* x) {
    if (RANK % 8 == 0) {
        load8(from + begin, x);
    } else {
        UNROLL for (int e = 0; e < 8; ++e) x[e] = begin + e < RANK ? from[begin + e] : half(0.0f);
    }
}
METAL_FUNC void turn_pair(thread float& a, thread float& b, int pair, const device float* near,
                          const device float* far) {
    const int at = pair / 2 * 4 + pair % 2;
    const float cosine = near[at] * far[at] - near[at + 2] * far[at + 2];
    const float sine = near[at + 2] * far[at] + near[at] * far[at + 2];
    const float x = a;
    a = x * cosine - b * sine;
    b = b * cosine + x * sine;
}
"""
_RESIDUAL_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int tokens = params[0];
    const int base = params[1];
    const int WORDS = D / 8;
    const int SHARE = GS / 8;
    const int runs = (tokens + TOKENS - 1) / TOKENS;
    if (i < HEADS * runs * (WORDS / 2)) {
        const int unit = i % (WORDS / 2);
        const int first = i / (WORDS / 2) % runs * TOKENS;
        const int head = i / (WORDS / 2) / runs;
        const bool apart = !INTERLEAVED && unit < PAIRS / 8;
        const int a = apart ? unit : 2 * unit;
        const int b = apart ? unit + PAIRS / 8 : 2 * unit + 1;
        float x[TOKENS * 8];
        float y[TOKENS * 8];
        size_t at[TOKENS];
        UNROLL for (int t = 0; t < TOKENS; ++t) {
            const int token = metal::min(first + t, tokens - 1);
            at[t] = size_t(residual_table[token / 256]) * 256 + token % 256;
            UNROLL for (int e = 0; e < 8; ++e) {
                x[t * 8 + e] = 0.0f;
                y[t * 8 + e] = 0.0f;
            }
        }
        for (int begin = 0; begin < RANK; begin += 8) {
            half low[TOKENS * 8];
            UNROLL for (int t = 0; t < TOKENS; ++t) load_ranks<RANK>(residuals + at[t] * RANK, begin, low + t * 8);
            UNROLL for (int r = 0; r < 8; ++r) {
                if (begin + r < RANK) {
                    const device float* row = matrix + size_t(head * RANK + begin + r) * D;
                    UNROLL for (int e = 0; e < 8; ++e) {
                        const float p = row[a * 8 + e];
                        const float q = row[b * 8 + e];
                        UNROLL for (int t = 0; t < TOKENS; ++t) {
                            x[t * 8 + e] = metal::fma(float(low[t * 8 + r]), p, x[t * 8 + e]);
                            y[t * 8 + e] = metal::fma(float(low[t * 8 + r]), q, y[t * 8 + e]);
                        }
                    }
                }
            }
        }
        UNROLL for (int t = 0; t < TOKENS; ++t) {
            const int token = first + t;
            if (token < tokens) {
                const size_t row = (size_t(table[token / 256]) * HEADS + head) * 256 + token % 256;
                const device float* near = near_turns + size_t((base + token) % STEP) * (2 * PAIRS);
                const device float* far = far_turns + size_t((base + token) / STEP) * (2 * PAIRS);
                UNROLL for (int e = 0; e < 8; ++e) {
                    if (apart) turn_pair(x[t * 8 + e], y[t * 8 + e], a * 8 + e, near, far);
                    if (INTERLEAVED && e % 2 == 0 && a * 8 < 2 * PAIRS) {
                        turn_pair(x[t * 8 + e], x[t * 8 + e + 1], a * 4 + e / 2, near, far);
                        turn_pair(y[t * 8 + e], y[t * 8 + e + 1], b * 4 + e / 2, near, far);
                    }
                }
                float agent = 1.0f;
                float ratio = 1.0f;
                if (NORMED) {
                    const float without = float(norms[(at[t] * HEADS + head) * 2]);
                    agent = float(norms[(at[t] * HEADS + head) * 2 + 1]);
                    ratio = without > 0.0f ? agent / without : 0.0f;
                }
                float v[8];
                float w[8];
                const size_t of_a = row * (D / GS) + a / SHARE;
                const size_t of_b = row * (D / GS) + b / SHARE;
                unpack_scaled(data[row * WORDS + a], scales[of_a], biases[of_a], ratio, v);
                unpack_scaled(data[row * WORDS + b], scales[of_b], biases[of_b], ratio, w);
                UNROLL for (int e = 0; e < 8; ++e) {
                    v[e] = metal::fma(agent, x[t * 8 + e], v[e]);
                    w[e] = metal::fma(agent, y[t * 8 + e], w[e]);
                }
                const size_t to = (size_t(head) * tokens + token) * D;
                store8<T>(out + to + a * 8, v);
                store8<T>(out + to + b * 8, w);
            }
        }
    }
"""

UNPACK_RESIDUAL = KernelText(
    "agentcache_unpack_residual",
    (
        *("data", "scales", "biases", "residuals", "norms", "matrix", "near_turns", "far_turns"),
        *("table", "residual_table", "params", "written"),
    ),
    ("out",),
    _RESIDUAL_BODY,
    _FUNCTIONS,
)


class LowRankSide(NamedTuple):
    """Residuals of a row's keys or values.

    Args:
        low_rank: x·A, float16 [slots, 256, r].
        b: float32 [H_kv, r, D]; normed keys: with the norm's weights.
        block_ids: slots of the residuals, int32 [n].
        norms: float16 [slots, 256, H_kv, 2]; None without norm.
        turns: float32; None without rope.
    """

    low_rank: mx.array
    b: mx.array
    block_ids: mx.array
    norms: mx.array | None = None
    turns: RopeTables | None = None


def unpack_residual(
    packed: PackedArrays,
    block_ids: mx.array,
    side: LowRankSide,
    num_tokens: int,
    dtype: mx.Dtype,
    *,
    base: int = 0,
    written: mx.array | None = None,
) -> mx.array:
    """As `unpack`, with residuals; the first token is at position `base`."""
    kv_heads, dim = packed[0].shape[1], packed[0].shape[3] * 8
    turns = side.turns or no_rope(mx.float32)
    nothing = no_residuals(mx.float16)
    counts = ints((num_tokens, base))
    [out] = UNPACK_RESIDUAL.launch(
        [
            *(*packed, side.low_rank, nothing if side.norms is None else side.norms, side.b, turns.near, turns.far),
            *(block_ids, side.block_ids, counts, counts if written is None else written),
        ],
        {
            "T": dtype,
            "D": dim,
            "HEADS": kv_heads,
            "GS": dim // packed[1].shape[3],
            "RANK": side.low_rank.shape[2],
            "PAIRS": turns.pairs,
            "INTERLEAVED": turns.interleaved,
            "NORMED": side.norms is not None,
            "STEP": STEP,
            "TOKENS": _TOKENS,
        },
        threadgroups=-(-kv_heads * -(-num_tokens // _TOKENS) * (dim // 16) // _THREADS),
        threads=_THREADS,
        outputs=[((1, kv_heads, num_tokens, dim), dtype)],
    )
    return out

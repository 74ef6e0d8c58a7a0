"""Unpacks a row's blocks into contiguous keys or values for flash attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.decode import PackedArrays, no_residuals
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.numbers import ints
from agentcache.metal_kernels.packing_text import GROUP_TOKENS, PACKING
from agentcache.metal_kernels.rope_tables import STEP, RopeTables, no_rope

_THREADS = 256
_TOKENS_BY_CHANNEL = 8

# `count` tokens from `row` on, each RUNS after the one before. A thread's tokens share scales and biases by channel;
# else the thread of a group's first values loads a token's for the others.
_UNPACK_FUNCTIONS = """
template <typename T, bool BY_CHANNEL, int D, int GS, int BITS, int TOKENS>
METAL_FUNC void unpack_tokens(const device uint* data, const device half* scales, const device half* biases, size_t row,
                              int unit, int count, int lane, device T* to) {
    const int RUNS = 64 / TOKENS;
    const int SHARE = GS / 8;
    uint words[TOKENS * BITS / 4];
    UNROLL for (int t = 0; t < TOKENS; ++t) {
        if (t * RUNS < count)
            load_words<BITS>(data + ((row + t * RUNS) * (D / 8) + unit) * (BITS / 4), words + t * (BITS / 4));
    }
    float scale[8];
    float bias[8];
    if (BY_CHANNEL) {
        const size_t at = factors_at<BY_CHANNEL, D, GS>(row, unit);
        if (count > 0) {
            load_factors<BY_CHANNEL>(scales + at, scale);
            load_factors<BY_CHANNEL>(biases + at, bias);
        }
    } else {
        UNROLL for (int t = 0; t < TOKENS; ++t) {
            const size_t at = factors_at<BY_CHANNEL, D, GS>(row + t * RUNS, unit);
            const bool loads = t * RUNS < count && lane % SHARE == 0;
            const float own_scale = loads ? float(scales[at]) : 0.0f;
            const float own_bias = loads ? float(biases[at]) : 0.0f;
            scale[t] = simd_shuffle(own_scale, ushort(lane / SHARE * SHARE));
            bias[t] = simd_shuffle(own_bias, ushort(lane / SHARE * SHARE));
        }
    }
    UNROLL for (int t = 0; t < TOKENS; ++t) {
        if (t * RUNS < count) {
            float x[8];
            UNROLL for (int e = 0; e < 8; ++e) {
                const int of = BY_CHANNEL ? e : t;
                x[e] = metal::fma(code<BITS>(words + t * (BITS / 4), e), scale[of], bias[of]);
            }
            store8<T>(to + t * RUNS * D, x);
        }
    }
}
"""
# One thread per eight values of TOKENS tokens of a group of 64. Open blocks, slots below 0 of the table, are in 8 bits
# by token. A simdgroup has tokens of one block.
_BODY = """
    const int i = int(thread_position_in_grid.x);
    const int lane = int(thread_index_in_simdgroup);
    const int tokens = params[0];
    const int UNITS = D / 8;
    const int RUNS = 64 / TOKENS;
    const int groups = (tokens + 63) / 64;
    const int unit = i % UNITS;
    const int group = i / UNITS / RUNS % groups;
    const int head = i / UNITS / RUNS / groups;
    const int first = group * 64 + i / UNITS % RUNS;
    const int count = head < HEADS ? tokens - first : 0;
    const int slot = head < HEADS ? table[group / 4] : 0;
    const bool is_open = HAS_OPEN && slot < 0;
    const size_t row = (size_t(is_open ? -1 - slot : slot) * HEADS + head) * 256 + first % 256;
    device T* to = out + (size_t(head) * tokens + first) * D + unit * 8;
    if (is_open)
        unpack_tokens<T, false, D, OPEN_GS, 8, TOKENS>(open_data, open_scales, open_biases, row, unit, count, lane, to);
    else
        unpack_tokens<T, BY_CHANNEL, D, GS, BITS, TOKENS>(data, scales, biases, row, unit, count, lane, to);
"""

UNPACK = KernelText(
    "agentcache_unpack",
    (
        *("data", "scales", "biases", "open_data", "open_scales", "open_biases"),
        *("table", "params", "written"),
    ),
    ("out",),
    _BODY,
    PACKING + _UNPACK_FUNCTIONS,
)


class PackedForm(NamedTuple):
    """How a side's arrays are packed: constants of kernels that unpack."""

    dim: int
    group_size: int
    bits: int
    by_channel: bool

    @classmethod
    def of(cls, packed: PackedArrays, bits: int) -> PackedForm:
        data, scales, _ = packed
        dim = data.shape[3] * 32 // bits
        by_channel = scales.shape[2] < BLOCK_SIZE
        return cls(dim, GROUP_TOKENS if by_channel else dim // scales.shape[3], bits, by_channel)

    @property
    def constants(self) -> Mapping[str, int]:
        return {"D": self.dim, "GS": self.group_size, "BITS": self.bits, "BY_CHANNEL": self.by_channel}


def unpack(
    packed: PackedArrays,
    block_ids: mx.array,
    num_tokens: int,
    dtype: mx.Dtype,
    written: mx.array | None = None,
    *,
    bits: int = 4,
    opened: PackedArrays | None = None,
) -> mx.array:
    """Unpack the first tokens of the blocks `block_ids`, int32 [n], to [1, H_kv, num_tokens, D].

    Args:
        packed: with scales and biases of each token, or by channel: [slots, H_kv, 4, D].
        written: result of `append` or `seal` for these arrays in the same graph.
        opened: open blocks, in 8 bits by token; slot s of them is -1 - s in `block_ids`.
    """
    form = PackedForm.of(packed, bits)
    kv_heads, dim = packed[0].shape[1], form.dim
    tokens = _TOKENS_BY_CHANNEL if form.by_channel or opened is not None else 1
    threads = kv_heads * -(-num_tokens // GROUP_TOKENS) * (GROUP_TOKENS // tokens) * (dim // 8)
    counts = ints((num_tokens,))
    of_open = {"HAS_OPEN": opened is not None, "OPEN_GS": dim // (opened or packed)[1].shape[3]}
    [out] = UNPACK.launch(
        [*packed, *(packed if opened is None else opened), block_ids, counts, counts if written is None else written],
        {"T": dtype, "HEADS": kv_heads, "TOKENS": tokens, **form.constants, **of_open},
        threadgroups=-(-threads // _THREADS),
        threads=_THREADS,
        outputs=[((1, kv_heads, num_tokens, dim), dtype)],
    )
    return out


_TOKENS = 4  # per thread: a row of B is loaded once for all

# One thread per two units of some tokens: those that rope pairs, or neighbours.
_FUNCTIONS = """
template <int BITS>
METAL_FUNC void unpack_scaled(const device uint* from, const thread float* scale, const thread float* bias,
                              float factor, thread float* x) {
    uint words[BITS / 4];
    load_words<BITS>(from, words);
    UNROLL for (int e = 0; e < 8; ++e) x[e] = factor * metal::fma(code<BITS>(words, e), scale[e], bias[e]);
}
// Scales and biases of two units.
struct Factors { float scale[2][8]; float bias[2][8]; };
template <bool BY_CHANNEL, int D, int GS>
METAL_FUNC void load_both(const device half* scales, const device half* biases, size_t row, int a, int b,
                          thread Factors& factors) {
    const size_t at[2] = {factors_at<BY_CHANNEL, D, GS>(row, a), factors_at<BY_CHANNEL, D, GS>(row, b)};
    UNROLL for (int i = 0; i < 2; ++i) {
        load_factors<BY_CHANNEL>(scales + at[i], factors.scale[i]);
        load_factors<BY_CHANNEL>(biases + at[i], factors.bias[i]);
    }
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
    const int UNITS = D / 8;
    const int runs = (tokens + TOKENS - 1) / TOKENS;
    if (i < HEADS * runs * (UNITS / 2)) {
        const int unit = i % (UNITS / 2);
        const int first = i / (UNITS / 2) % runs * TOKENS;
        const int head = i / (UNITS / 2) / runs;
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
        const size_t begin_row = (size_t(table[first / 256]) * HEADS + head) * 256 + first % 256;
        Factors factors;
        if (BY_CHANNEL) load_both<BY_CHANNEL, D, GS>(scales, biases, begin_row, a, b, factors);
        UNROLL for (int t = 0; t < TOKENS; ++t) {
            const int token = first + t;
            if (token < tokens) {
                const size_t row = begin_row + t;
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
                if (!BY_CHANNEL) load_both<BY_CHANNEL, D, GS>(scales, biases, row, a, b, factors);
                const device uint* words = data + row * UNITS * (BITS / 4);
                unpack_scaled<BITS>(words + a * (BITS / 4), factors.scale[0], factors.bias[0], ratio, v);
                unpack_scaled<BITS>(words + b * (BITS / 4), factors.scale[1], factors.bias[1], ratio, w);
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
    PACKING + _FUNCTIONS,
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
    bits: int = 4,
) -> mx.array:
    """As `unpack`, with residuals; the first token is at position `base`."""
    form = PackedForm.of(packed, bits)
    kv_heads, dim = packed[0].shape[1], form.dim
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
            "HEADS": kv_heads,
            **form.constants,
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

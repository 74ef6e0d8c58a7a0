"""Pack blocks from their open form to the full one, once their last token is known, and back.

Open blocks have 8 bits per token. Full blocks have 4: keys by channel, in groups of 64 tokens, and values per token.
One launch packs the keys and values of a layer's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from agentcache.metal_kernels.decode_plan import nothing_written
from agentcache.metal_kernels.kernel_text import KernelText, traced
from agentcache.metal_kernels.numbers import ints
from agentcache.metal_kernels.packing_text import PACKING

_THREADS = 256

# By channel, a thread has eight tokens of a unit, 8 apart. A simdgroup has the 64 tokens of a group and 4 units to seal
# them; to reopen them, the units of a token are neighbours. Values are one unit of a token a thread. Simdgroups are
# alike: each has either keys or values.
_BEGIN = """
    const int i = int(thread_position_in_grid.x);
    const int UNITS = D / 8;
    const int KEYS = HEADS * 4 * 8 * UNITS;
    const int VALUES = HEADS * 256 * UNITS;
    const int blocks = counts[0];
    if (i == 0) written[0] = 0;
"""

_SEAL = """
    if (i < blocks * KEYS) {
        const int lane = int(thread_index_in_simdgroup);
        const int part = i / 32;
        const int unit = part % (UNITS / 4) * 4 + lane % 4;
        const int group = part / (UNITS / 4) % 4;
        const int head = part / UNITS % HEADS;
        const int block = part / UNITS / HEADS;
        const int token = group * 64 + lane / 4;
        const size_t from = (size_t(sources[block]) * HEADS + head) * 256 + token;
        const size_t to = (size_t(targets[block]) * HEADS + head) * 256 + token;
        uint words[16];
        float scale[8];
        float bias[8];
        UNROLL for (int t = 0; t < 8; ++t) {
            const size_t at = factors_at<false, D, GS>(from + 8 * t, unit);
            load_words<8>(open_kq + ((from + 8 * t) * UNITS + unit) * 2, words + 2 * t);
            scale[t] = float(open_ks[at]);
            bias[t] = float(open_kb[at]);
        }
        float low[8];
        float high[8];
        UNROLL for (int e = 0; e < 8; ++e) {
            low[e] = 30000.0f;
            high[e] = -30000.0f;
            UNROLL for (int t = 0; t < 8; ++t) {
                const float x = limited(metal::fma(code<8>(words + 2 * t, e), scale[t], bias[t]));
                low[e] = metal::min(low[e], x);
                high[e] = metal::max(high[e], x);
            }
            UNROLL for (int b = 4; b < 32; b <<= 1) {
                low[e] = metal::min(low[e], simd_shuffle_xor(low[e], ushort(b)));
                high[e] = metal::max(high[e], simd_shuffle_xor(high[e], ushort(b)));
            }
        }
        float step[8];
        float least[8];
        UNROLL for (int e = 0; e < 8; ++e) {
            least[e] = float(half(low[e]));
            const float rounded = metal::max(least[e] - low[e], low[e] - least[e]);
            const float range = metal::max((high[e] - low[e]) / 15.0f, rounded);
            step[e] = float(half(metal::max(range, 6.103515625e-5f)));
        }
        if (lane < 4) {
            const size_t at = factors_at<true, D, GS>(to, unit);
            store8<half>((device half*)ks + at, step);
            store8<half>((device half*)kb + at, least);
        }
        UNROLL for (int t = 0; t < 8; ++t) {
            uint word = 0;
            UNROLL for (int e = 0; e < 8; ++e) {
                const float x = limited(metal::fma(code<8>(words + 2 * t, e), scale[t], bias[t]));
                const float steps = metal::rint((x - least[e]) / step[e]);
                word |= uint(metal::max(0.0f, metal::min(steps, 15.0f))) << (4 * e);
            }
            ((device uint*)kq)[(to + 8 * t) * UNITS + unit] = word;
        }
    } else if (i < blocks * (KEYS + VALUES)) {
        const int own = i - blocks * KEYS;
        const int unit = own % UNITS;
        const int token = own / UNITS % 256;
        const int head = own / UNITS / 256 % HEADS;
        const int block = own / UNITS / 256 / HEADS;
        const size_t from = (size_t(sources[block]) * HEADS + head) * 256 + token;
        const size_t to = (size_t(targets[block]) * HEADS + head) * 256 + token;
        const size_t at = factors_at<false, D, GS>(from, unit);
        uint words[2];
        load_words<8>(open_vq + (from * UNITS + unit) * 2, words);
        float scale = float(open_vs[at]);
        float bias = float(open_vb[at]);
        float x[8];
        UNROLL for (int e = 0; e < 8; ++e) x[e] = limited(metal::fma(code<8>(words, e), scale, bias));
        quantise_unit<GS / 8>(x, 4, words, scale, bias);
        store_unit<GS>((device uint*)vq, (device half*)vs, (device half*)vb, to, UNITS, unit, 4, words, scale, bias);
    }
"""

_REOPEN = """
    const bool is_key = i < blocks * KEYS;
    if (i < blocks * (KEYS + VALUES)) {
        const int own = is_key ? i : i - blocks * KEYS;
        const int unit = own % UNITS;
        const int place = is_key ? own / UNITS / 8 % 4 * 64 + own / UNITS % 8 : own / UNITS % 256;
        const int head = own / UNITS / (is_key ? 32 : 256) % HEADS;
        const int block = own / UNITS / (is_key ? 32 : 256) / HEADS;
        const size_t from = (size_t(sources[block]) * HEADS + head) * 256 + place;
        const size_t to = (size_t(targets[block]) * HEADS + head) * 256 + place;
        const device uint* data = is_key ? kq : vq;
        device uint* open_data = (device uint*)(is_key ? open_kq : open_vq);
        device half* open_scales = (device half*)(is_key ? open_ks : open_vs);
        device half* open_biases = (device half*)(is_key ? open_kb : open_vb);
        float scale[8];
        float bias[8];
        if (is_key) {
            load_factors<true>(ks + factors_at<true, D, GS>(from, unit), scale);
            load_factors<true>(kb + factors_at<true, D, GS>(from, unit), bias);
        } else {
            load_factors<false>(vs + factors_at<false, D, GS>(from, unit), scale);
            load_factors<false>(vb + factors_at<false, D, GS>(from, unit), bias);
        }
        for (int t = 0; t < (is_key ? 8 : 1); ++t) {
            uint words[2];
            load_words<4>(data + (from + 8 * t) * UNITS + unit, words);
            float x[8];
            UNROLL for (int e = 0; e < 8; ++e) x[e] = limited(metal::fma(code<4>(words, e), scale[e], bias[e]));
            float own_scale;
            float own_bias;
            quantise_unit<GS / 8>(x, 8, words, own_scale, own_bias);
            store_unit<GS>(open_data, open_scales, open_biases, to + 8 * t, UNITS, unit, 8, words, own_scale, own_bias);
        }
    }
"""

_OPEN = ("open_kq", "open_ks", "open_kb", "open_vq", "open_vs", "open_vb")
_FULL = ("kq", "ks", "kb", "vq", "vs", "vb")
_INPUTS = ("sources", "targets", "counts", "before", *_OPEN, *_FULL)
SEAL = KernelText("agentcache_seal", _INPUTS, ("written",), _BEGIN + _SEAL, PACKING, changed=_FULL)
REOPEN = KernelText("agentcache_reopen", _INPUTS, ("written",), _BEGIN + _REOPEN, PACKING, changed=_OPEN)


def seal(
    opened: Sequence[mx.array],
    full: Sequence[mx.array],
    sources: mx.array,
    targets: mx.array,
    before: mx.array | None = None,
) -> mx.array:
    """Pack open blocks into full ones, in place; 8-bit values are unpacked in float32.

    As after `append`, readers of `full` in the same graph must take the result, a zero int32 [1], as an input; so must
    writers of `opened`.

    Args:
        opened: data, scales and biases of keys, then of values, [slots, H_kv, 256, ·].
        full: the same of full blocks; scales and biases of keys are [slots, H_kv, 4, D].
        sources, targets: slots in `opened` and in `full`, int32 [n]; at least one.
        before: result of the last `append` or `seal` for these arrays, which may still run.
    """
    return _launched(SEAL, opened, full, sources, targets, before)


def reopen(
    opened: Sequence[mx.array],
    full: Sequence[mx.array],
    sources: mx.array,
    targets: mx.array,
    before: mx.array | None = None,
) -> mx.array:
    """Pack full blocks into open ones, in place; arguments as of `seal`, but `sources` are slots in `full`.

    Readers of `opened` and writers of `full` take the result.
    """
    return _launched(REOPEN, opened, full, sources, targets, before)


class _Kind(NamedTuple):
    kernel: KernelText
    kv_heads: int
    dim: int
    group_size: int


def _launched(
    kernel: KernelText,
    opened: Sequence[mx.array],
    full: Sequence[mx.array],
    sources: mx.array,
    targets: mx.array,
    before: mx.array | None,
) -> mx.array:
    dim = full[1].shape[3]
    kind = _Kind(kernel, full[0].shape[1], dim, dim // full[4].shape[3])
    before = nothing_written() if before is None else before
    return traced(_packed, kind)(sources, targets, ints((sources.size,)), before, *opened, *full)


def _packed(kind: _Kind, *given: mx.array) -> mx.array:
    threads = given[0].size * kind.kv_heads * (32 + 256) * (kind.dim // 8)
    [written] = kind.kernel.launch(
        list(given),
        {"D": kind.dim, "HEADS": kind.kv_heads, "GS": kind.group_size},
        threadgroups=-(-threads // _THREADS),
        threads=_THREADS,
        outputs=[((1,), mx.int32)],
    )
    return written

"""Functions of kernels that pack and unpack, in the common subset of Metal and CUDA.

A thread has a unit: eight neighbouring values of a head, BITS / 4 words, lowest bits first. The lanes of a group of
values are neighbours. Rows are tokens of all slots and heads: (slot * heads + head) * 256 + token.
"""

from __future__ import annotations

GROUP_TOKENS = 64  # that share the scales and biases of keys by channel

PACKING = """
METAL_FUNC float limited(float x) {
    return x == x ? metal::max(-30000.0f, metal::min(x, 30000.0f)) : 0.0f;
}
template <int BITS> METAL_FUNC void load_words(const device uint* from, thread uint* words) {
    UNROLL for (int w = 0; w < BITS / 4; ++w) words[w] = from[w];
}
template <int BITS> METAL_FUNC float code(const thread uint* words, int e) {
    return float((words[e * BITS / 32] >> (e * BITS % 32)) & ((1u << BITS) - 1u));
}
// Where a unit's scales are: one for each channel of 64 tokens, or one for each GS values of a token.
template <bool BY_CHANNEL, int D, int GS> METAL_FUNC size_t factors_at(size_t row, int unit) {
    return BY_CHANNEL ? row / 64 * D + unit * 8 : row * (D / GS) + unit / (GS / 8);
}
template <bool BY_CHANNEL> METAL_FUNC void load_factors(const device half* from, thread float* x) {
    half own[8];
    if (BY_CHANNEL) load8(from, own);
    else own[0] = from[0];
    UNROLL for (int e = 0; e < 8; ++e) x[e] = float(own[BY_CHANNEL ? e : 0]);
}
// As `mx.quantize`, for a group of SHARE lanes; all lanes of a simdgroup take part.
template <int SHARE>
METAL_FUNC void quantise_unit(const thread float* x, int bits, thread uint* words, thread float& scale,
                              thread float& bias) {
    float low = 30000.0f;
    float high = -30000.0f;
    UNROLL for (int e = 0; e < 8; ++e) {
        low = metal::min(low, x[e]);
        high = metal::max(high, x[e]);
    }
    UNROLL for (int b = SHARE / 2; b > 0; b >>= 1) {
        low = metal::min(low, simd_shuffle_xor(low, ushort(b)));
        high = metal::max(high, simd_shuffle_xor(high, ushort(b)));
    }
    const float most = float((1 << bits) - 1);
    const float range = metal::max((high - low) / most, 1.0e-7f);
    const bool from_below = metal::max(low, -low) > metal::max(high, -high);
    const float edge = from_below ? low : high;
    const float width = from_below ? range : -range;
    const float steps = metal::rint(edge / width);
    scale = steps == 0.0f ? width : edge / steps;
    bias = steps == 0.0f ? 0.0f : edge;
    words[0] = 0;
    words[1] = 0;
    UNROLL for (int e = 0; e < 8; ++e) {
        const uint code = uint(metal::max(0.0f, metal::min(metal::rint((x[e] - bias) / scale), most)));
        if (bits * e < 32) words[0] |= code << (bits * e);
        else words[1] |= code << (bits * e - 32);
    }
}
template <int GS>
METAL_FUNC void store_unit(device uint* data, device half* scales, device half* biases, size_t row, int units, int unit,
                           int bits, const thread uint* words, float scale, float bias) {
    data[(row * units + unit) * (bits / 4)] = words[0];
    if (bits == 8) data[(row * units + unit) * 2 + 1] = words[1];
    if (unit % (GS / 8) == 0) {
        const size_t at = (row * units + unit) / (GS / 8);
        scales[at] = half(scale);
        biases[at] = half(bias);
    }
}
"""

"""KV formats to compare, and their rounding. `k4c64 v4 open` reads: keys in 4 bits by channel, values in 4 per token.

A format is a word for keys and one for values, and modifiers:

    k4, v4    bits: 2, 3, 4, 5, 6, 8, or 16 for float16; per token in groups of 64 along the head
    g32       groups of 32 along the head
    c64       by channel in groups of 64 tokens (or 32, 128, 256): each channel has its own scale; keys only, 2-5 bits
    n         codes at the quantiles of a normal distribution, not at equal distances; by channel, 4 bits
    m         relative to each channel's mean in its block of 256 tokens
    r         after a Hadamard transform of each head
    sink      the first block in 8 bits per token
    open      a query reads its own block in 8 bits per token; without it, all tokens are in the format

`k4c64nr` has all its letters behind one word, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.errors import ConfigError
from agentcache.kv.by_channel import GROUP_TOKENS
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import UNQUANTISED_BITS, LayerBits, Packing, Plain, Quantisation

_TOKEN_BITS, _CHANNEL_BITS, _NORMAL_BITS = (2, 3, 4, 5, 6, 8), (2, 3, 4, 5), 4
_GROUPS, _TOKENS = (64, 32), (32, 64, 128, 256)
_SIDE = re.compile(r"([kv])(\d+)(?:g(\d+))?(?:c(\d+))?(n?)(m?)(r?)")
_SINK, _OPEN = "sink", "open"
_SMALLEST_SCALE = 1e-7
_SCALE_BITS = 16  # of a scale, a bias or a mean


@dataclass(frozen=True)
class Side:
    """Format of keys or of values.

    Attributes:
        bits: bits of a code; 16: float16, None: the model's type.
        group: values along the head that share a scale; 32 where 64 does not divide the head.
        tokens: tokens of a channel that share a scale; None: per token.
        normal, centred, rotated: `n`, `m`, `r` of the grammar.
    """

    bits: int | None = 4
    group: int = 64
    tokens: int | None = None
    normal: bool = False
    centred: bool = False
    rotated: bool = False

    def __str__(self) -> str:
        group = f"c{self.tokens}" if self.tokens else "" if self.group == _GROUPS[0] else f"g{self.group}"
        return f"{self.bits}{group}{'n' * self.normal}{'m' * self.centred}{'r' * self.rotated}"

    def bits_a_value(self, full: int) -> float:
        if self.bits is None:
            return full
        of_mean = _SCALE_BITS / BLOCK_SIZE if self.centred else 0
        if self.bits == UNQUANTISED_BITS:
            return self.bits + of_mean
        return self.bits + 2 * _SCALE_BITS / (self.tokens or self.group) + of_mean

    def check(self, dim: int) -> None:
        """Raise ConfigError if heads of `dim` values cannot be kept so."""
        if self.rotated and dim & (dim - 1):
            raise ConfigError(f"heads of {dim} values cannot be rotated: {dim} is not a power of two")
        if self.tokens is None and self.bits not in (None, UNQUANTISED_BITS) and dim % min(_GROUPS):
            raise ConfigError(f"heads of {dim} values have no groups of {min(_GROUPS)}")

    def mean(self, block: mx.array) -> mx.array | None:
        """Mean of each channel over a block [..., n, D], as stored; None if not centred."""
        if not self.centred:
            return None
        return block.astype(mx.float32).mean(axis=-2, keepdims=True).astype(mx.float16).astype(mx.float32)

    def round(self, block: mx.array, mean: mx.array | None = None) -> mx.array:
        """Values [..., n, D] of one block as they are read, relative to `mean`."""
        if self.bits is None:
            return block
        x = block.astype(mx.float32)
        x = x if mean is None else x - mean
        x = hadamard(x) if self.rotated else x
        x = self._by_token(x) if self.tokens is None else by_channel(x, self.tokens, levels(self.bits, self.normal))
        x = hadamard(x) if self.rotated else x
        x = x if mean is None else x + mean
        return x.astype(block.dtype)

    def _by_token(self, x: mx.array) -> mx.array:
        packing = self._packing(x.shape[-1])
        return dequantise(quantise(x, packing), packing, mx.float32)

    def _packing(self, dim: int) -> Packing:
        assert self.bits is not None
        if self.bits == UNQUANTISED_BITS:
            return Plain("F16")
        return Quantisation(self.bits, next(size for size in (self.group, min(_GROUPS)) if dim % size == 0))


@dataclass(frozen=True)
class Format:
    """Format of one layer's KV; see the grammar."""

    keys: Side = Side()
    values: Side = Side()
    sink: bool = False
    opens: bool = False

    @classmethod
    def of(cls, bits: LayerBits) -> Format:
        keys = Side(bits.keys, tokens=GROUP_TOKENS if bits.by_channel else None)
        return cls(keys, Side(bits.values), sink=bits.by_channel, opens=bits.by_channel)

    @classmethod
    def parse(cls, text: str) -> Format:
        """Inverse of `str`. Raises ConfigError."""
        keys, values, *modifiers = [*text.split(), "", ""][: max(2, len(text.split()))]
        if len(set(modifiers)) < len(modifiers) or not set(modifiers) <= {_SINK, _OPEN}:
            raise ConfigError(f'"{text}": behind keys and values there may be {_SINK} and {_OPEN}')
        return cls(_side(text, keys, "k"), _side(text, values, "v"), _SINK in modifiers, _OPEN in modifiers)

    def __str__(self) -> str:
        modifiers = [name for name, is_on in ((_SINK, self.sink), (_OPEN, self.opens)) if is_on]
        return " ".join([f"k{self.keys}", f"v{self.values}", *modifiers])

    def bits_a_value(self, full: int = 32) -> float:
        """Average over full blocks with scales, biases and means, but a sink; `full` replaces None."""
        return (self.keys.bits_a_value(full) + self.values.bits_a_value(full)) / 2


UNQUANTISED = Format(Side(None), Side(None))


def parse_formats(texts: Sequence[str]) -> tuple[Format, ...]:
    """Formats, each once. Raises ConfigError."""
    return tuple(dict.fromkeys(map(Format.parse, texts)))


def _side(text: str, word: str, kind: str) -> Side:
    match = _SIDE.fullmatch(word)
    if match is None or match[1] != kind:
        raise ConfigError(
            f'"{text}": {word or "nothing"!r} is no format of {_KINDS[kind]}, such as {kind}4 or {kind}4g32'
        )
    bits, group, tokens = int(match[2]), int(match[3] or _GROUPS[0]), int(match[4]) if match[4] else None
    side = Side(bits, group, tokens, *(bool(letter) for letter in match.groups()[4:]))
    if reason := _why_not(side, kind, match[3] is not None):
        raise ConfigError(f'"{text}": {word}: {reason}')
    return side


_KINDS = {"k": "keys", "v": "values"}


def _why_not(side: Side, kind: str, names_group: bool) -> str:
    if side.tokens is not None:
        if kind == "v" or names_group:
            return "only keys are kept by channel, and then have groups of tokens only"
        if side.tokens not in _TOKENS:
            return f"groups by channel have {_any_of(_TOKENS)} tokens"
        if side.bits not in _CHANNEL_BITS:
            return f"by channel there are {_any_of(_CHANNEL_BITS)} bits"
        return f"normal codes have {_NORMAL_BITS} bits" if side.normal and side.bits != _NORMAL_BITS else ""
    if side.normal:
        return "normal codes are kept by channel"
    if side.group not in _GROUPS:
        return f"groups have {_any_of(_GROUPS)} values"
    return "" if side.bits in (*_TOKEN_BITS, UNQUANTISED_BITS) else f"there are {_any_of(_TOKEN_BITS)} or 16 bits"


def _any_of(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def levels(bits: int, normal: bool = False) -> tuple[float, ...]:
    """Places of the codes in a group's range, from 0 to 1."""
    count = 1 << bits
    if not normal:
        return tuple(index / (count - 1) for index in range(count))
    quantiles = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
    return tuple((each - quantiles[0]) / (quantiles[-1] - quantiles[0]) for each in quantiles)


def by_channel(x: mx.array, tokens: int, places: Sequence[float]) -> mx.array:
    """Round float32 [..., n, D], each channel of each group of `tokens` between its least and largest value.

    The last group may be shorter. Bias and scale (the distance of equal codes) are rounded to float16 before coding.
    """
    count, steps = x.shape[-2], len(places) - 1
    tokens = min(tokens, count)
    missing = -count % tokens
    if missing:  # copies of the last token change no range
        x = mx.concatenate([x, mx.repeat(x[..., -1:, :], missing, axis=-2)], axis=-2)
    groups = x.reshape(*x.shape[:-2], -1, tokens, x.shape[-1])
    low, high = groups.min(axis=-2, keepdims=True), groups.max(axis=-2, keepdims=True)
    scale = _as_stored(mx.maximum((high - low) / steps, _SMALLEST_SCALE))
    bias = _as_stored(low)
    places_in_steps = [steps * place for place in places]
    rounded = bias + scale * _nearest((groups - bias) / scale, places_in_steps)
    return rounded.reshape(x.shape)[..., :count, :]


def _nearest(x: mx.array, places: Sequence[float]) -> mx.array:
    if list(places) == list(range(len(places))):
        return mx.clip(mx.round(x), 0, len(places) - 1)
    found = mx.full(x.shape, places[0], x.dtype)
    for below, above in zip(places, places[1:], strict=False):
        found = mx.where(x > (below + above) / 2, above, found)
    return found


def _as_stored(x: mx.array) -> mx.array:
    return x.astype(mx.float16).astype(mx.float32)


def hadamard(x: mx.array) -> mx.array:
    """Orthonormal Hadamard transform of [..., D], its own inverse: additions only, as on every device."""
    dim, width = x.shape[-1], 1
    while width < dim:
        pairs = x.reshape(*x.shape[:-1], -1, 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = mx.stack([first + second, first - second], axis=-2).reshape(x.shape)
        width *= 2
    return x * dim**-0.5

"""Storage formats of keys and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agentcache.errors import UnsupportedModel

PARTS = ("data", "scales", "biases")  # in block byte order
UNQUANTISED_BITS = 16
_KEPT = (4, 8, UNQUANTISED_BITS)


@dataclass(frozen=True)
class Quantisation:
    """MLX affine quantisation along the head dimension."""

    bits: int = 4
    group_size: int = 64

    def __str__(self) -> str:
        return f"affine-{self.bits}bit-g{self.group_size}"

    @property
    def bits_a_value(self) -> float:
        """With scales and biases."""
        return self.bits + 32 / self.group_size

    def parts(self, dim: int) -> dict[str, tuple[str, int]]:
        """(dtype, width) of each part of `dim` values."""
        groups = dim // self.group_size
        return {"data": ("U32", dim * self.bits // 32), "scales": ("F16", groups), "biases": ("F16", groups)}


@dataclass(frozen=True)
class Plain:
    """Unquantised, in bfloat16 if the model computes in it, else float16."""

    dtype: str

    @property
    def bits(self) -> int:
        return UNQUANTISED_BITS

    @property
    def bits_a_value(self) -> float:
        return self.bits

    def __str__(self) -> str:
        return {"F16": "float16", "BF16": "bfloat16"}[self.dtype]

    def parts(self, dim: int) -> dict[str, tuple[str, int]]:
        return {"data": (self.dtype, dim)}


@dataclass(frozen=True)
class ByChannel:
    """Affine quantisation of each channel over groups of tokens, in full blocks only (KIVI, arXiv 2402.02750)."""

    bits: int = 4
    group_tokens: int = 64

    def __str__(self) -> str:
        return f"affine-{self.bits}bit-channel-g{self.group_tokens}"

    @property
    def bits_a_value(self) -> float:
        return self.bits + 32 / self.group_tokens

    def parts(self, dim: int) -> dict[str, tuple[str, int]]:
        """As of `Quantisation`; scales and biases have a row per group."""
        return {"data": ("U32", dim * self.bits // 32), "scales": ("F16", dim), "biases": ("F16", dim)}


Packing = Quantisation | Plain | ByChannel
OPEN_BITS = 8  # of blocks until they are full


@dataclass(frozen=True)
class LayerPacking:
    """Packing of a layer's keys and values; with keys by channel, that of full blocks."""

    keys: Packing
    values: Packing

    def side(self, name: str) -> Packing:
        return self.keys if name == "key_cache" else self.values

    @property
    def while_open(self) -> LayerPacking | None:
        """Packing of a block until it is full, if different."""
        if not isinstance(self.keys, ByChannel):
            return None
        assert isinstance(self.values, Quantisation)
        open_packing = Quantisation(OPEN_BITS, self.values.group_size)
        return LayerPacking(open_packing, open_packing)

    @property
    def bits(self) -> LayerBits:
        return LayerBits(self.keys.bits, self.values.bits, isinstance(self.keys, ByChannel))

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}, values {self.values}"


def quantisation_for(*dims: int, bits: int = 4) -> Quantisation:
    """Choose groups of 64, else 32, that divide all `dims`. Raises UnsupportedModel."""
    for group_size in (64, 32):
        if all(dim % group_size == 0 for dim in dims):
            return Quantisation(bits, group_size)
    raise UnsupportedModel(f"head dimensions {dims} are not multiples of 32, so {bits}-bit quantisation has no groups")


@dataclass(frozen=True, order=True)
class LayerBits:
    """Bits of a layer's keys and values. `by_channel`: keys of full blocks are `ByChannel`."""

    keys: int = 4
    values: int = 4
    by_channel: bool = False

    def __str__(self) -> str:
        return _NAMES.get(self, f"k{self.keys}v{self.values}")

    @property
    def words(self) -> str:
        """Such as `4 bits, keys by channel`."""
        if self == PER_TOKEN:
            return f"{self.keys} bits per token"
        by_channel = ", keys by channel" if self.by_channel else ""
        values = f", values in {self.values}" if self.values != self.keys else ""
        return f"{self.keys} bits{by_channel}{values}"


BY_CHANNEL = LayerBits(4, 4, by_channel=True)
PER_TOKEN = LayerBits(4, 4)  # as mlx-lm's own; the only one for latents
BITS = {
    "2.5": LayerBits(3, 2, by_channel=True),
    "3": LayerBits(3, 3, by_channel=True),
    "4": BY_CHANNEL,
    "4t": PER_TOKEN,
    "k8v4": LayerBits(8, 4),
    "8": LayerBits(8, 8),
    "16": LayerBits(UNQUANTISED_BITS, UNQUANTISED_BITS),
}
"""Choices of a user by name, from the fewest."""
_NAMES = {bits: name for name, bits in BITS.items()}

AUTO = "auto"  # measured at load


@dataclass(frozen=True)
class Precision:
    """Bits of a model's KV, by layer in order of computation.

    `divergence`: mean Kullback-Leibler divergence of logits from unquantised KV's, in nats; None if not measured.
    """

    layers: tuple[LayerBits, ...]
    divergence: float | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Precision:
        """Inverse of `as_data`; raises LookupError, TypeError or ValueError."""
        layers = tuple(LayerBits(keys, values, *rest) for keys, values, *rest in data["layers"])
        divergence = data["divergence"]
        if not all(map(_is_kept, layers)):
            raise ValueError(f"these bits of layers are not supported: {layers!r:.80}")
        if divergence is not None and not 0 <= float(divergence) < math.inf:
            raise ValueError(f"{divergence!r:.40} is not a divergence")
        return cls(layers, divergence)

    def as_data(self) -> dict[str, Any]:
        layers = [[bits.keys, bits.values, *([True] if bits.by_channel else [])] for bits in self.layers]
        return {"layers": layers, "divergence": self.divergence}

    def __str__(self) -> str:
        """Such as `4`, or `4 (layers 0-1, 7 in k8v4)`."""
        return self._told(str)

    @property
    def words(self) -> str:
        """Such as `4 bits, keys by channel (layers 0-1, 7 in 8 bits, values in 4)`."""
        return self._told(lambda bits: bits.words)

    def _told(self, name: Callable[[LayerBits], str]) -> str:
        if not self.layers:
            return "none"
        usual, _ = Counter(self.layers).most_common(1)[0]
        others = sorted(set(self.layers) - {usual})
        told = [
            f"{_ranges([index for index, bits in enumerate(self.layers) if bits == other])} in {name(other)}"
            for other in others
        ]
        return f"{name(usual)} (layers {'; '.join(told)})" if told else name(usual)


def _is_kept(layer: LayerBits) -> bool:
    if layer.by_channel:
        return layer in _NAMES and layer.by_channel is True
    return all(type(bits) is int and bits in _KEPT for bits in (layer.keys, layer.values))


def _ranges(indices: Sequence[int]) -> str:
    runs = groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    spans = [[index for _, index in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)

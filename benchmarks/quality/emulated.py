"""Emulates KV formats in caches of mlx-lm's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import UNQUANTISED_BITS, LayerBits, Packing, Plain, Quantisation

_CENTRED_TOKENS = 256


@dataclass(frozen=True)
class Format:
    """Format of one layer's KV: bits (16: float16, None: the model's type); how keys are rounded.

    `rotated`: after a Hadamard transform. `centred`: relative to their mean in the first block.
    """

    keys: int | None = 4
    values: int | None = 4
    group_size: int = 64
    rotated: bool = False
    centred: bool = False

    @classmethod
    def of(cls, bits: LayerBits) -> Format:
        return cls(bits.keys, bits.values)

    def bits_a_value(self, full: int = 32) -> float:
        """Average with scales and biases; `full` replaces None."""
        return (self._bits(self.keys, full) + self._bits(self.values, full)) / 2

    def _bits(self, bits: int | None, full: int) -> float:
        if bits is None:
            return full
        return bits if bits == UNQUANTISED_BITS else bits + 32 / self.group_size

    def packing(self, bits: int, dim: int) -> Packing:
        if bits == UNQUANTISED_BITS:
            return Plain("F16")
        return Quantisation(bits, next(size for size in (self.group_size, 32) if dim % size == 0))

    def round(self, x: mx.array, bits: int | None) -> mx.array:
        if bits is None:
            return x
        packing = self.packing(bits, x.shape[-1])
        return dequantise(quantise(x, packing), packing, x.dtype)


class EmulatedCache:
    """mlx-lm's interface of a layer's cache."""

    def __init__(self, format: Format, window: int | None = None) -> None:
        self.format = format
        self.offset = 0
        self._window = window
        self._held: tuple[mx.array, mx.array] | None = None
        self._mean: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = self._round_keys(keys), self.format.round(values, self.format.values)
        if self._held is not None:
            new = (mx.concatenate([self._held[0], new[0]], axis=2), mx.concatenate([self._held[1], new[1]], axis=2))
        self._held = new
        self.offset += keys.shape[2]
        return new

    def _round_keys(self, keys: mx.array) -> mx.array:
        mean = mx.zeros((1,), keys.dtype)
        if self.format.centred:
            if self._mean is None:
                self._mean = keys[:, :, :_CENTRED_TOKENS].mean(axis=2, keepdims=True)
            mean = self._mean
        if not self.format.rotated:
            return self.format.round(keys - mean, self.format.keys) + mean
        return mx.hadamard_transform(self.format.round(mx.hadamard_transform(keys - mean), self.format.keys)) + mean

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._window is None and not return_array:
            return None if N == 1 else "causal"
        return create_causal_mask(N, self.offset, window_size=self._window)

    def spread(self, rows: int) -> EmulatedCache:
        """A copy for `rows` rows with the same beginning."""
        made = EmulatedCache(self.format, self._window)
        assert self._held is not None
        keys, values = (mx.broadcast_to(each, (rows, *each.shape[1:])) for each in self._held)
        made._held, made.offset, made._mean = (keys, values), self.offset, self._mean
        return made


def make_caches(formats: Sequence[Format], windows: Sequence[int | None]) -> list[EmulatedCache]:
    return [EmulatedCache(*each) for each in zip(formats, windows, strict=True)]

"""Bits of cached keys and values, by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

UNQUANTISED_BITS = 16
_KEPT = (4, 8, UNQUANTISED_BITS)


@dataclass(frozen=True, order=True)
class LayerBits:
    """Bits of a layer's keys and values: 4, 8, or 16 (unquantised)."""

    keys: int = 4
    values: int = 4

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"k{self.keys}v{self.values}"


BITS = {str(bits): bits for bits in (LayerBits(4, 4), LayerBits(8, 4), LayerBits(8, 8), LayerBits(16, 16))}
"""Those that can be asked for, by name, from the fewest."""


AUTO = "auto"  # measured at load


@dataclass(frozen=True)
class Precision:
    """Bits of a model's cached keys and values.

    Args:
        layers: in order of computation.
        divergence: mean Kullback-Leibler divergence of logits from those of unquantised KV, in nats; None if not
            measured.
    """

    layers: tuple[LayerBits, ...]
    divergence: float | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Precision:
        """Inverse of `as_data`; raises LookupError, TypeError or ValueError."""
        layers, divergence = tuple(LayerBits(keys, values) for keys, values in data["layers"]), data["divergence"]
        if not all(type(bits) is int and bits in _KEPT for layer in layers for bits in (layer.keys, layer.values)):
            raise ValueError(f"layers are not kept in {layers!r:.80}")
        if divergence is not None and not 0 <= float(divergence) < math.inf:
            raise ValueError(f"{divergence!r:.40} is no divergence")
        return cls(layers, divergence)

    def as_data(self) -> dict[str, Any]:
        return {"layers": [[bits.keys, bits.values] for bits in self.layers], "divergence": self.divergence}

    def __str__(self) -> str:
        """Such as `4`, or `4 (layers 0-1, 7 in k8v4)`."""
        if not self.layers:
            return "none"
        usual, _ = Counter(self.layers).most_common(1)[0]
        others = sorted(set(self.layers) - {usual})
        told = [
            f"{_ranges([index for index, bits in enumerate(self.layers) if bits == other])} in {other}"
            for other in others
        ]
        return f"{usual} (layers {'; '.join(told)})" if told else str(usual)


def _ranges(indices: Sequence[int]) -> str:
    runs = groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    spans = [[index for _, index in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)

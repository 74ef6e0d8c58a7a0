"""Search for the fewest bits of keys and values that keep a model's answers, in few passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from agentcache.kv.packing import BITS, LayerBits, Precision

_LEVELS = tuple(BITS.values())
_COARSEST, _UNQUANTISED = _LEVELS[0], _LEVELS[-1]
SAFE = LayerBits(8, 8)  # nearly always within the limit
_MOST_TRIALS = 4  # of layers in different bits
_NEAR = 0.75  # share of the limit above which a mixture is not improved further

Layers = Sequence[LayerBits]


class Measurements(Protocol):
    """Measurements of a model. Each costs at most one forward pass; exceptions end the search."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""

    def size(self, layer: int, bits: LayerBits) -> float:
        """Bytes per token of keys and values in this layer."""

    def divergence(self, layers: Layers) -> float:
        """Divergence of the model in these bits from the unquantised one, in nats."""

    def errors(self, bits: LayerBits) -> Sequence[float]:
        """Change of each layer's output with that layer alone in these bits. Only ratios matter."""


def find_precision(model: Measurements, limit: float) -> Precision:
    """Return the smallest precision within `limit` that the search measures.

    First all layers get the same bits, from the fewest, until the limit holds. Then single layers are lowered, those
    that save most bytes per harm first. Most models take one pass, or five to eight.
    """
    search = _Search(model, limit)
    search.run()
    assert search.best is not None  # unquantised layers are within every limit
    return search.best


@dataclass(frozen=True)
class _Step:
    """One layer to fewer bits: added change of its output, and cost."""

    layer: int
    bits: LayerBits
    error: float
    cost: float  # error per byte; not below that of the layer's earlier steps


@dataclass
class _Search:
    """`best` is the smallest precision known to be within the limit."""

    model: Measurements
    limit: float
    best: Precision | None = None
    _best_size: float = field(default=math.inf, init=False)

    def run(self) -> None:
        failed = math.inf  # divergence of the level below
        for level, bits in enumerate(_LEVELS):
            layers = self._taken(bits, ())
            # 8 bits are nearly always within the limit; the first mixture shows it as well.
            divergence = 0.0 if bits == SAFE else self._measure(layers)
            if divergence <= self.limit:
                if level and self._lower(level, divergence, failed):
                    return
                divergence = self._measure(layers) if bits == SAFE else divergence
                if divergence <= self.limit:
                    return
            failed = divergence

    def _measure(self, layers: Layers) -> float:
        divergence = 0.0 if set(layers) == {_UNQUANTISED} else self.model.divergence(layers)
        size = sum(self.model.size(index, bits) for index, bits in enumerate(layers))
        if divergence <= self.limit and size < self._best_size:
            self.best, self._best_size = Precision(tuple(layers), divergence), size
        return divergence

    def _lower(self, level: int, at_level: float, failed: float) -> bool:
        """Take as many steps down from `level` as the limit allows; return whether it allowed any.

        Args:
            at_level, failed: divergence of all layers at this level, and one below.
        """
        if at_level > _NEAR * self.limit:
            return False
        errors = {bits: self.model.errors(bits) for bits in _LEVELS[max(0, level - 2) : level]}
        steps = self._steps(_LEVELS[level], errors)
        sums = [0.0, *accumulate(step.error for step in steps)]
        low, high = 0, len(steps) + 1
        at_low, at_high, sum_high = at_level, failed, sum(errors[_LEVELS[level - 1]])
        for _ in range(_MOST_TRIALS):
            if high - low <= 1 or at_low > _NEAR * self.limit:
                break
            more = (self.limit - at_low) / max(at_high - at_low, 1e-12) * (sum_high - sums[low])
            tried = low + _share(sums, low, high, more)
            found = self._measure(self._taken(_LEVELS[level], steps[:tried]))
            if found <= self.limit:
                low, at_low = tried, found
            else:
                high, at_high, sum_high = tried, found, sums[tried]
        return low > 0

    def _steps(self, base: LayerBits, errors: dict[LayerBits, Sequence[float]]) -> list[_Step]:
        """Each layer's steps down from `base`, cheapest first."""
        steps = []
        for layer in range(self.model.num_layers):
            size, error, cost = self.model.size(layer, base), 0.0, 0.0
            for bits in sorted(errors, reverse=True):
                saved = size - self.model.size(layer, bits)
                if saved <= 0:  # e.g. fewer bits for values, in a layer that caches keys only
                    continue
                added = max(0.0, errors[bits][layer] - error)
                cost = max(cost, added / saved)
                steps.append(_Step(layer, bits, added, cost))
                size, error = size - saved, error + added
        return sorted(steps, key=lambda step: step.cost)  # stable: a layer's steps stay in order

    def _taken(self, base: LayerBits, steps: Sequence[_Step]) -> list[LayerBits]:
        layers = [base] * self.model.num_layers
        for step in steps:
            layers[step.layer] = step.bits
        return layers


def _share(sums: Sequence[float], low: int, high: int, more: float) -> int:
    """Number of steps after `low` with errors of `more`; half of the range if that is not finite."""
    if not math.isfinite(more):
        return (high - low) // 2
    fitting = sum(1 for index in range(low + 1, high) if sums[index] - sums[low] <= more)
    return min(max(1, fitting), high - low - 1)

"""The search for the fewest bits of keys and values that keep a model's answers, in few passes over a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from agentcache.kv.precision import BITS, LayerBits, Precision

_LEVELS = tuple(BITS.values())
_COARSEST, _UNQUANTISED = _LEVELS[0], _LEVELS[-1]
SAFE = LayerBits(8, 8)  # nearly every model stands it
_MOST_TRIALS = 4  # of layers in different bits
_NEAR = 0.75  # of the limit: a mixture whose divergence is above this is not improved any more

Layers = Sequence[LayerBits]


class Measurements(Protocol):
    """Measurements of a model. Each costs one forward pass at most; its exceptions end the search."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""

    def size(self, layer: int, bits: LayerBits) -> float:
        """Bytes of a token's keys and values in this layer."""

    def divergence(self, layers: Layers) -> float:
        """Of the model with its layers in these bits, from the unquantised one, in nats."""

    def errors(self, bits: LayerBits) -> Sequence[float]:
        """Of each layer alone in these bits: how far its output moves. Only ratios count."""


def find_precision(model: Measurements, limit: float) -> Precision:
    """Return the smallest precision within `limit` that the search measures.

    First all layers get the same bits, from the fewest, until the limit holds. Then single layers are lowered, those
    first that save most bytes for the harm they do. Most models take one pass, or five to eight: two for all layers
    alike, two for errors, up to four for mixtures.

    Args:
        limit: divergence that is allowed.
    """
    search = _Search(model, limit)
    search.run()
    assert search.best is not None  # unquantised layers are within every limit
    return search.best


@dataclass(frozen=True)
class _Step:
    """One layer to fewer bits: how much more its output moves, for how many bytes."""

    layer: int
    bits: LayerBits
    error: float
    cost: float  # error a byte; not below that of the same layer's earlier steps, which come first


@dataclass
class _Search:
    """One search.

    Args:
        best: smallest precision known to be within the limit.
    """

    model: Measurements
    limit: float
    best: Precision | None = None
    _best_size: float = field(default=math.inf, init=False)

    def run(self) -> None:
        failed = math.inf  # divergence of the level below, which is above the limit
        for level, bits in enumerate(_LEVELS):
            layers = self._taken(bits, ())
            # 8 bits are nearly always within the limit; the first mixture tells as much.
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
        """Take as many steps down from `level` as the limit allows; whether that is any.

        Args:
            at_level, failed: divergence of all layers at this level, and one below it.
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
        """Every layer's steps down from `base`, the cheapest first."""
        steps = []
        for layer in range(self.model.num_layers):
            size, error, cost = self.model.size(layer, base), 0.0, 0.0
            for bits in sorted(errors, reverse=True):
                saved = size - self.model.size(layer, bits)
                if saved <= 0:  # such as fewer bits for values where a layer caches keys only
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
    """How many steps behind `low` add errors of `more`; half of those before `high` where that says nothing."""
    if not math.isfinite(more):
        return (high - low) // 2
    fitting = sum(1 for index in range(low + 1, high) if sums[index] - sums[low] <= more)
    return min(max(1, fitting), high - low - 1)

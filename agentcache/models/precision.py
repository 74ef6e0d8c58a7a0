"""`--kv auto`: find the smallest format of keys and values that keeps a model's answers.

Harm is the Kullback-Leibler divergence of next tokens over a sample, in nats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import mlx.nn as nn

from agentcache.api.start_progress import Measuring, StartProgress
from agentcache.kv.packing import BY_CHANNEL, LayerBits, Packing, Precision
from agentcache.models.inspection import Inspection
from agentcache.models.precision_runs import PrecisionRuns
from agentcache.models.step import CurrentStep

MAX_DIVERGENCE = 0.0075  # about 0.75 % of perplexity: docs/quality.md
MOST_PASSES = 15  # including the unquantised one
SAFE = LayerBits(8, 8)  # nearly always enough
_COARSEST, _UNQUANTISED = BY_CHANNEL, LayerBits(16, 16)
_LEVELS = (_COARSEST, LayerBits(8, 4), SAFE, _UNQUANTISED)  # from the fewest bytes
Numbers = Mapping[str, Sequence[float]]
_MOST_TRIALS = 4  # of mixtures
_NEAR = 0.75  # share of the limit that is good enough
Layers = Sequence[LayerBits]


class PrecisionSearch:
    """Chooses the bits of a model's layers, one forward pass at a time, on the model's thread.

    After each pass `find_precision` runs again with all numbers, also an earlier process's. `agree` makes a
    number equal on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        inspection: Inspection,
        text: Sequence[int],
        *,
        current: CurrentStep | None = None,
        known: Numbers = MappingProxyType({}),
        keep: Callable[[Numbers], None] = lambda known: None,
        agree: Callable[[float], float] = lambda number: number,
        limit: float | None = None,
    ) -> None:
        self._inspection = inspection
        self._runs = PrecisionRuns(model, inspection, text, current or CurrentStep())
        self._known = {what: list(numbers) for what, numbers in known.items()}
        self._keep = keep
        self._agree = agree
        self._limit = MAX_DIVERGENCE if limit is None else limit
        self._passes = 0
        self._sizes = {bits: _sizes(inspection, bits) for bits in _LEVELS}
        self._precision, self._next = self._search()

    @property
    def measuring(self) -> Measuring:
        chosen = None if self._precision is None else self._precision.words
        return Measuring(self._passes, max(self._passes, MOST_PASSES), chosen)

    @property
    def precision(self) -> Precision | None:
        return self._precision

    @property
    def safe(self) -> Precision:
        """Precision until the search ends: 8 bits, or 16 if 8 are too few."""
        eight = Precision((SAFE,) * len(self._inspection.layers))
        too_few = self._known.get(str(eight), [0.0])[0] > self._limit
        return Precision((_UNQUANTISED,) * len(self._inspection.layers)) if too_few else eight

    def advance(self) -> None:
        if self._precision is not None:
            return
        self._passes += 1
        self._compute()
        self._precision, self._next = self._search()
        if self._precision is not None:
            self._runs.forget()

    def _compute(self) -> None:
        if not self._runs.has_reference:
            self._runs.compute_reference(self._agree)
            return
        what, measure = self._next
        self._known[what] = [self._agree(number) for number in measure()]
        self._keep(self._known)

    def _search(self) -> tuple[Precision | None, _Measurement]:
        nothing = _Measurement("", list)
        if not self.num_layers or not self._runs.has_text:
            return self._kept(Precision((_COARSEST,) * self.num_layers)), nothing
        try:
            return self._kept(find_precision(self, self._limit)), nothing
        except _NotMeasured as missing:
            return None, missing.measurement

    @property
    def num_layers(self) -> int:
        return len(self._inspection.layers)

    def size(self, layer: int, bits: LayerBits) -> float:
        return self._sizes[bits][layer]

    def divergence(self, layers: Layers) -> float:
        what = str(self._kept(Precision(tuple(layers))))
        return self._number(what, lambda: [self._runs.divergence(layers)])[0]

    def errors(self, bits: LayerBits) -> Sequence[float]:
        return self._number(f"errors in {bits}", lambda: self._runs.errors(bits))

    def _kept(self, precision: Precision) -> Precision:
        return self._inspection.kept_in(precision).precision

    def _number(self, what: str, measure: Callable[[], Sequence[float]]) -> Sequence[float]:
        if what not in self._known:
            raise _NotMeasured(_Measurement(what, measure))
        return self._known[what]


class _Measurement(NamedTuple):
    what: str
    measure: Callable[[], Sequence[float]]


class _NotMeasured(Exception):
    def __init__(self, measurement: _Measurement) -> None:
        super().__init__()
        self.measurement = measurement


def _sizes(inspection: Inspection, bits: LayerBits) -> list[float]:
    packings = inspection.kept_in(Precision((bits,) * len(inspection.layers))).packings
    return [
        layer.num_kv_heads * (_bytes(packing.keys, layer.key_dim) + _bytes(packing.values, layer.value_dim))
        for layer, packing in zip(inspection.layers, packings, strict=True)
    ]


def _bytes(packing: Packing, dim: int) -> float:
    return dim * packing.bits_a_value / 8


class Measured:
    """A `ChoosePrecision` that takes `kept`, or measures. After `seconds`: `safe` bits, and an `unfinished` search."""

    def __init__(
        self,
        text: Sequence[int],
        kept: Precision | None = None,
        *,
        seconds: float = math.inf,
        progress: StartProgress | None = None,
        **options: Any,
    ) -> None:
        self._text = text
        self._kept = kept
        self._seconds = seconds
        self._progress = progress or StartProgress()
        self._options = options
        self.unfinished: PrecisionSearch | None = None

    def __call__(self, model: nn.Module, inspection: Inspection) -> Precision:
        if self._kept is not None and len(self._kept.layers) == len(inspection.layers):
            return self._kept
        search, end = PrecisionSearch(model, inspection, self._text, **self._options), time.monotonic() + self._seconds
        with self._progress.inner("measuring in which format keys and values are kept, once for this model"):
            while search.precision is None and time.monotonic() < end:
                search.advance()
                self._progress.advance(search.measuring.done, search.measuring.most)
        if search.precision is None:
            self.unfinished = search
            return search.safe
        return search.precision


class Measurements(Protocol):
    """Measurements of a model, each by at most one forward pass. Exceptions end the search."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""

    def size(self, layer: int, bits: LayerBits) -> float:
        """Bytes per token of this layer."""

    def divergence(self, layers: Layers) -> float:
        """Divergence from the unquantised model, in nats."""

    def errors(self, bits: LayerBits) -> Sequence[float]:
        """Change of each layer's output with that layer alone in these bits."""


def find_precision(model: Measurements, limit: float) -> Precision:
    """Return the smallest precision within `limit` that the search measures.

    All layers get the smallest equal format; then layers are lowered, most bytes per harm first.
    """
    search = _Search(model, limit)
    search.run()
    assert search.best is not None  # unquantised, at the worst
    return search.best


@dataclass(frozen=True)
class _Step:
    layer: int
    bits: LayerBits
    error: float
    cost: float  # error per byte, at least that of the layer's earlier steps


@dataclass
class _Search:
    model: Measurements
    limit: float
    best: Precision | None = None
    _best_size_and_harm: tuple[float, float] = field(default=(math.inf, math.inf), init=False)

    def run(self) -> None:
        failed: dict[LayerBits, float] = {}  # divergences of the levels below
        for level, bits in enumerate(_LEVELS):
            layers = self._taken(bits, ())
            # 8 bits are measured only if no mixture is within the limit.
            divergence = 0.0 if bits == SAFE else self._measure(layers)
            if divergence <= self.limit:
                if level and self._lower(level, divergence, failed):
                    return
                divergence = self._measure(layers) if bits == SAFE else divergence
                if divergence <= self.limit:
                    return
            failed[bits] = divergence

    def _measure(self, layers: Layers) -> float:
        divergence = 0.0 if set(layers) == {_UNQUANTISED} else self.model.divergence(layers)
        size = sum(self.model.size(index, bits) for index, bits in enumerate(layers))
        if divergence <= self.limit and (size, divergence) < self._best_size_and_harm:
            self.best, self._best_size_and_harm = Precision(tuple(layers), divergence), (size, divergence)
        return divergence

    def _lower(self, level: int, at_level: float, failed: dict[LayerBits, float]) -> bool:
        base, errors = _LEVELS[level], {bits: self.model.errors(bits) for bits in _LEVELS[:level]}
        of_base = [0.0] * self.model.num_layers if base == _UNQUANTISED else self.model.errors(base)
        steps = _steps(self.model, base, of_base, errors)
        free = sum(step.cost == 0 for step in steps)  # smaller and no worse: the first trial takes them all
        sums = [0.0, *accumulate(step.error for step in steps)]
        low, high = 0, len(steps) + 1
        nearest = min(errors, key=lambda bits: failed[bits])
        at_low, at_high, sum_high = at_level, failed[nearest], _added(of_base, errors[nearest])
        for _ in range(_MOST_TRIALS):
            if high - low <= 1 or (at_low > _NEAR * self.limit and not free):
                break
            more = (self.limit - at_low) / max(at_high - at_low, 1e-12) * (sum_high - sums[low])
            tried, free = max(free, low + _share(sums, low, high, more)), 0
            found = self._measure(self._taken(base, steps[:tried]))
            if found <= self.limit:
                low, at_low = tried, found
            else:
                high, at_high, sum_high = tried, found, sums[tried]
        return low > 0

    def _taken(self, base: LayerBits, steps: Sequence[_Step]) -> list[LayerBits]:
        layers = [base] * self.model.num_layers
        for step in steps:
            layers[step.layer] = step.bits
        return layers


def _steps(
    model: Measurements, base: LayerBits, of_base: Sequence[float], errors: Mapping[LayerBits, Sequence[float]]
) -> list[_Step]:
    """All steps down from `base`, least harm per byte first."""
    steps = [step for layer, error in enumerate(of_base) for step in _steps_of(model, layer, base, error, errors)]
    return sorted(steps, key=lambda step: step.cost)  # stable: a layer's steps stay in order


def _steps_of(
    model: Measurements, layer: int, base: LayerBits, error: float, errors: Mapping[LayerBits, Sequence[float]]
) -> Iterator[_Step]:
    """A layer's steps, each to the format with the least harm per byte: none is larger than one that does less harm."""
    size, cost = model.size(layer, base), 0.0
    while True:
        offers = []
        for bits, of_layers in errors.items():
            saved, added = size - model.size(layer, bits), max(0.0, of_layers[layer] - error)
            if saved > 0:  # not e.g. values in a layer with keys only
                offers.append((max(cost, added / saved), -saved, added, bits))
        if not offers:
            return
        cost, change, added, bits = min(offers)
        yield _Step(layer, bits, added, cost)
        size, error = size + change, error + added


def _added(of_base: Sequence[float], errors: Sequence[float]) -> float:
    return sum(max(0.0, error - before) for before, error in zip(of_base, errors, strict=True))


def _share(sums: Sequence[float], low: int, high: int, more: float) -> int:
    if not math.isfinite(more):
        return (high - low) // 2
    fitting = sum(1 for index in range(low + 1, high) if sums[index] - sums[low] <= more)
    return min(max(1, fitting), high - low - 1)

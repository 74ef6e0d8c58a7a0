"""`--kv auto`: measure the fewest bits of keys and values that keep a model's answers.

The model reads a sample on the paged cache, unquantised and then with quantised layers. The harm of a precision is the
Kullback-Leibler divergence of next-token probabilities, in nats: 0.005 loses about half a percent of perplexity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.nn as nn

from agentcache.api.start_progress import Measuring, StartProgress
from agentcache.kv.packing import BITS, LayerBits, Packing, Plain, Precision
from agentcache.models.find_precision import SAFE, Layers, find_precision
from agentcache.models.inspection import Inspection
from agentcache.models.precision_runs import PrecisionRuns
from agentcache.models.step import CurrentStep

MAX_DIVERGENCE = 0.005
MOST_PASSES = 15  # including the unquantised one; most models take two, or six to nine
_HOPELESS = 8.0  # times the limit: a larger divergence is not measured exactly
_COARSEST, _UNQUANTISED = LayerBits(4, 4), LayerBits(16, 16)

Numbers = Mapping[str, Sequence[float]]  # by name of the measurement


class PrecisionSearch:
    """Chooses the bits of a model's layers, one forward pass at a time, on the model's thread.

    After each pass `find_precision` runs again with all known numbers. So a search can continue in another process.

    Args:
        known: numbers of an earlier process for this model and sample.
        keep: called with all numbers after each measurement.
        agree: function from a number to the value that all ranks use.
        limit: highest divergence, in nats; `MAX_DIVERGENCE` by default.
    """

    def __init__(
        self,
        model: nn.Module,
        inspection: Inspection,
        texts: Sequence[Sequence[int]],
        *,
        current: CurrentStep | None = None,
        known: Numbers = MappingProxyType({}),
        keep: Callable[[Numbers], None] = lambda known: None,
        agree: Callable[[float], float] = lambda number: number,
        limit: float | None = None,
    ) -> None:
        self._inspection = inspection
        self._runs = PrecisionRuns(model, inspection, texts, current or CurrentStep())
        self._known = {what: list(numbers) for what, numbers in known.items()}
        self._keep = keep
        self._agree = agree
        self._limit = MAX_DIVERGENCE if limit is None else limit
        self._passes = 0
        self._sizes = {bits: _sizes(inspection, bits) for bits in BITS.values()}
        self._precision, self._next = self._search()

    @property
    def measuring(self) -> Measuring:
        chosen = None if self._precision is None else str(self._precision)
        return Measuring(self._passes, max(self._passes, MOST_PASSES), chosen)

    @property
    def precision(self) -> Precision | None:
        """Final choice; None before the end."""
        return self._precision

    @property
    def safe(self) -> Precision:
        """Precision until the search ends: 8 bits, or 16 if 8 are known to be too few."""
        eight = Precision((SAFE,) * len(self._inspection.layers))
        too_few = self._known.get(str(eight), [0.0])[0] > self._limit
        return Precision((_UNQUANTISED,) * len(self._inspection.layers)) if too_few else eight

    def advance(self) -> None:
        """Compute one forward pass."""
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
        """The precision if enough is known; else the next measurement."""
        nothing = _Measurement("", list)
        if not self.num_layers or not self._runs.has_texts:
            return Precision((_COARSEST,) * self.num_layers), nothing
        try:
            return find_precision(self, self._limit), nothing
        except _NotMeasured as missing:
            return None, missing.measurement

    # Measurements for `find_precision`:

    @property
    def num_layers(self) -> int:
        return len(self._inspection.layers)

    def size(self, layer: int, bits: LayerBits) -> float:
        return self._sizes[bits][layer]

    def divergence(self, layers: Layers) -> float:
        hopeless = _HOPELESS * self._limit
        measure = lambda: [self._runs.divergence(layers, hopeless, self._agree)]  # noqa: E731
        return self._number(str(Precision(tuple(layers))), measure)[0]

    def errors(self, bits: LayerBits) -> Sequence[float]:
        return self._number(f"errors in {bits}", lambda: self._runs.errors(bits))

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
    """Bytes per token in each layer."""
    packings = inspection.kept_in(Precision((bits,) * len(inspection.layers))).packings
    return [
        layer.num_kv_heads * (_bytes(packing.keys, layer.key_dim) + _bytes(packing.values, layer.value_dim))
        for layer, packing in zip(inspection.layers, packings, strict=True)
    ]


def _bytes(packing: Packing, dim: int) -> float:
    """Bytes of `dim` values, with scales and biases."""
    scales = 0.0 if isinstance(packing, Plain) else 32 / packing.group_size
    return dim * (packing.bits + scales) / 8


class Measured:
    """Chooses the bits of a model's layers by measuring; a `ChoosePrecision`.

    Args:
        kept: earlier choice, used if it has as many layers.
        seconds: time limit, after which the model is served in `safe` bits.
        options: further options of `PrecisionSearch`.

    Attributes:
        unfinished: search to continue; None if the choice is final.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        kept: Precision | None = None,
        *,
        seconds: float = math.inf,
        progress: StartProgress | None = None,
        **options: Any,
    ) -> None:
        self._texts = texts
        self._kept = kept
        self._seconds = seconds
        self._progress = progress or StartProgress()
        self._options = options
        self.unfinished: PrecisionSearch | None = None

    def __call__(self, model: nn.Module, inspection: Inspection) -> Precision:
        if self._kept is not None and len(self._kept.layers) == len(inspection.layers):
            return self._kept
        search, end = PrecisionSearch(model, inspection, self._texts, **self._options), time.monotonic() + self._seconds
        with self._progress.inner("measuring in how many bits keys and values are kept, once for this model"):
            while search.precision is None and time.monotonic() < end:
                search.advance()
                self._progress.advance(search.measuring.done, search.measuring.most)
        if search.precision is None:
            self.unfinished = search
            return search.safe
        return search.precision

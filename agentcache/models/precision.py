"""`--kv auto`: as few bits for keys and values as the model's logits stand, found out by measuring.

The model reads a text on the paged cache, once with nothing quantised and then with some layers quantised; what a
layer's bits cost is how far the next tokens' probabilities move (Kullback and Leibler, in nats). So a threshold of
0.005 is a loss of about half a percent in perplexity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import LayerArena
from agentcache.kv.precision import BITS, LayerBits, Precision
from agentcache.kv.step_cache import StepCache
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.recurrent import make_caches
from agentcache.models.step import CurrentStep, StepInputs
from agentcache.models.survey import Survey
from agentcache.start_progress import Measuring, StartProgress

MAX_DIVERGENCE = 0.005
MAX_TOKENS = 256
_COMPARED = 160  # the last ones, which have something to look back at
_COMPARED_AT_ONCE = 32  # a vocabulary may have a quarter of a million entries
_MOST_PARTS = 8  # layers of deep models are tried a few at a time, so that the time to measure is bounded
_LEVELS = tuple(BITS.values())
_COARSEST, _SAFE, _UNQUANTISED = _LEVELS[0], LayerBits(8, 8), _LEVELS[-1]
MOST_PASSES = 16  # with the one in which nothing is quantised

Layers = Sequence[LayerBits]


class PrecisionSearch:
    """Chooses the bits of a model's layers, one forward pass at a time. On the thread that owns the model.

    `find_precision` runs again after each pass, with all divergences that are known by then. So the search ends and
    continues anywhere, also in another process.

    Args:
        model: runs on the paged cache.
        token_ids: sample text; the first `MAX_TOKENS` are read.
        current: the model's step.
        known: divergences that an earlier process has measured, by `str` of a `Precision`.
        keep: called with all of them after each measurement.
        settle: replaces a divergence by the value that all ranks use.
        limit: highest divergence, in nats.
    """

    def __init__(
        self,
        model: nn.Module,
        survey: Survey,
        token_ids: Sequence[int],
        *,
        current: CurrentStep | None = None,
        known: Mapping[str, float] = MappingProxyType({}),
        keep: Callable[[Mapping[str, float]], None] = lambda known: None,
        settle: Callable[[float], float] = lambda divergence: divergence,
        limit: float = MAX_DIVERGENCE,
    ) -> None:
        self._model = model
        self._survey = survey
        self._ids = token_ids[:MAX_TOKENS]
        self._current = current or CurrentStep()
        self._known = dict(known)
        self._keep = keep
        self._settle = settle
        self._limit = limit
        self._passes = 0
        self._reference: mx.array | None = None
        self._precision, self._next = self._search()

    @property
    def measuring(self) -> Measuring:
        chosen = None if self._precision is None else str(self._precision)
        return Measuring(self._passes, max(self._passes, MOST_PASSES), chosen)

    @property
    def precision(self) -> Precision | None:
        """What was chosen; None before the end."""
        return self._precision

    @property
    def safe(self) -> Precision:
        """What to serve in before the end: 8 bits, or 16 if 8 are known to be too few."""
        eight = Precision((_SAFE,) * len(self._survey.layers))
        too_few = self._known.get(str(eight), 0.0) > self._limit
        return Precision((_UNQUANTISED,) * len(self._survey.layers)) if too_few else eight

    def advance(self) -> None:
        """Compute one forward pass; after the last one `precision` is known."""
        if self._precision is not None:
            return
        self._passes += 1
        if self._reference is None:
            self._reference = self._logits((_UNQUANTISED,) * len(self._survey.layers))
            return
        divergence = self._settle(mean_divergence(self._reference, self._logits(self._next)))
        self._known[str(Precision(tuple(self._next)))] = divergence
        self._keep(self._known)
        self._precision, self._next = self._search()
        if self._precision is not None:
            self._reference = None

    def _search(self) -> tuple[Precision | None, Layers]:
        """The precision, if enough is known; else the layers to measure next."""
        count = len(self._survey.layers)
        if not count or len(self._ids) < 2:
            return Precision((_COARSEST,) * count), ()
        try:
            return find_precision(self._divergence, count, self._limit), ()
        except _NotMeasured as missing:
            return None, missing.layers

    def _divergence(self, layers: Layers) -> float:
        divergence = self._known.get(str(Precision(tuple(layers))))
        if divergence is None:
            raise _NotMeasured(layers)
        return divergence

    def _logits(self, layers: Layers) -> mx.array:
        step = StepInputs(mx.array([self._ids]), [0], all_logits=True)
        with self._current.of(step):
            return _logits(self._model, self._survey.kept_in(Precision(tuple(layers))), self._ids)


class _NotMeasured(Exception):
    """The search needs the divergence of these layers."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers


class Measured:
    """Chooses the bits of a model's layers by measuring; a `ChoosePrecision`.

    Args:
        token_ids: sample text, as in `PrecisionSearch`.
        kept: earlier choice; used if it has as many layers.
        seconds: time limit. A search that takes longer is left in `unfinished`, and the model is served in `safe` bits.
        progress: is told of each forward pass.
        options: others of `PrecisionSearch`.

    Attributes:
        unfinished: search to continue; None if the choice is final.
    """

    def __init__(
        self,
        token_ids: tuple[int, ...],
        kept: Precision | None = None,
        *,
        seconds: float = math.inf,
        progress: StartProgress | None = None,
        **options: Any,
    ) -> None:
        self._ids = token_ids
        self._kept = kept
        self._seconds = seconds
        self._progress = progress or StartProgress()
        self._options = options
        self.unfinished: PrecisionSearch | None = None

    def __call__(self, model: nn.Module, survey: Survey) -> Precision:
        if self._kept is not None and len(self._kept.layers) == len(survey.layers):
            return self._kept
        search, end = PrecisionSearch(model, survey, self._ids, **self._options), time.monotonic() + self._seconds
        with self._progress.inner("measuring in how many bits keys and values are kept, once for this model"):
            while search.precision is None and time.monotonic() < end:
                search.advance()
                self._progress.advance(search.measuring.done, search.measuring.most)
        if search.precision is None:
            self.unfinished = search
            return search.safe
        return search.precision


def find_precision(divergence: Callable[[Layers], float], num_layers: int, limit: float) -> Precision:
    """The fewest bits that are within `limit` in all layers, and then 4 for layers that do little harm in them.

    Most models are asked once. No model is asked more than 15 times: once for each way to keep all layers, once for
    each part of them, and four times for parts together.

    Args:
        divergence: of layers in these bits, from unquantised ones.
    """
    level, total = _fewest_for_all(divergence, num_layers, limit)
    raised = Precision((level,) * num_layers, total)
    if level == _COARSEST:
        return raised

    def lowered(parts: Sequence[range]) -> list[LayerBits]:
        layers = list(raised.layers)
        for part in parts:
            layers[part.start : part.stop] = [_COARSEST] * len(part)
        return layers

    added = {part: max(0.0, divergence(lowered([part])) - total) for part in _parts(num_layers)}
    chosen, expected = list[range](), total
    for part in sorted(added, key=added.__getitem__):
        expected += added[part]
        if expected <= limit:
            chosen.append(part)
    # What parts add by themselves is about what they add together, which is measured.
    while chosen:
        together = divergence(lowered(chosen))
        if together <= limit:
            return Precision(tuple(lowered(chosen)), together)
        del chosen[len(chosen) // 2 :]
    return raised


def _fewest_for_all(divergence: Callable[[Layers], float], num_layers: int, limit: float) -> tuple[LayerBits, float]:
    """For all layers alike, with the divergence in them."""
    for level in _LEVELS[:-1]:
        total = divergence([level] * num_layers)
        if total <= limit:
            return level, total
    return _UNQUANTISED, 0.0


def _parts(num_layers: int) -> list[range]:
    """Layers that follow each other, in at most `_MOST_PARTS` parts."""
    count = min(num_layers, _MOST_PARTS)
    bounds = [num_layers * index // count for index in range(count + 1)]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def mean_divergence(reference: mx.array, logits: mx.array) -> float:
    """Of the probabilities of `logits` from those of `reference`, both [n, vocabulary]: the mean over n, in nats.

    Infinite where either is no number at some place.
    """
    total = 0.0
    for begin in range(0, reference.shape[0], _COMPARED_AT_ONCE):
        theirs, ours = (_log_softmax(each[begin : begin + _COMPARED_AT_ONCE]) for each in (reference, logits))
        # A vocabulary's padding may have a logit of minus infinity, on both sides.
        odds = mx.exp(theirs)
        total += mx.where(odds > 0, odds * (theirs - ours), odds).sum().item()
    return math.inf if math.isnan(total) else max(0.0, total / reference.shape[0])


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _logits(model: nn.Module, survey: Survey, token_ids: Sequence[int]) -> mx.array:
    """Of the last positions [n, vocabulary], read from the paged cache as serving reads it."""
    count = len(token_ids)
    table = BlockTable(list(range(-(-count // BLOCK_SIZE))))
    caches = []
    for layer, packing in zip(survey.layers, survey.packings, strict=True):
        arena = LayerArena(layer, packing)
        arena.grow(len(table.block_ids))
        caches.append(StepCache(arena, Reads([table], [0], count, layer.window), Writes([table], [0], count), 0))
    logits = model(mx.array([token_ids]), cache=survey.caches(caches, make_caches(None, survey.recurrent)))
    last: mx.array = mx.contiguous(logits[0, -_COMPARED:])
    mx.eval(last)
    return last

"""`--kv auto`: as few bits for keys and values as the model's logits stand, found out by measuring.

The model reads a text on the paged cache, once with nothing quantised and then with some layers quantised; what a
layer's bits cost is how far the next tokens' probabilities move (Kullback and Leibler, in nats). So a threshold of
0.005 is a loss of about half a percent in perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import LayerArena
from agentcache.kv.precision import BITS, LayerBits, Precision
from agentcache.kv.step_cache import StepCache
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.recurrent import make_caches
from agentcache.models.survey import Survey

MAX_DIVERGENCE = 0.005
MAX_TOKENS = 256
_COMPARED = 160  # the last ones, which have something to look back at
_COMPARED_AT_ONCE = 32  # a vocabulary may have a quarter of a million entries
_MOST_PARTS = 8  # layers of deep models are tried a few at a time, so that the time to measure is bounded
_LEVELS = tuple(BITS.values())
_COARSEST, _UNQUANTISED = _LEVELS[0], _LEVELS[-1]

Layers = Sequence[LayerBits]


@dataclass(frozen=True)
class Measured:
    """Chooses the bits of a model's layers by measuring; a `ChoosePrecision`.

    Args:
        token_ids: what the model reads; more than `MAX_TOKENS` are not read.
        kept: what was chosen before, which stands where it is for as many layers.
        settle: makes one of the divergences that several processes have measured of one model, so that all go on alike.
        limit: divergence that is allowed.
    """

    token_ids: tuple[int, ...]
    kept: Precision | None = None
    settle: Callable[[float], float] = lambda divergence: divergence
    limit: float = MAX_DIVERGENCE

    def __call__(self, model: nn.Module, survey: Survey) -> Precision:
        count = len(survey.layers)
        if self.kept is not None and len(self.kept.layers) == count:
            return self.kept
        ids = self.token_ids[:MAX_TOKENS]
        if not count or len(ids) < 2:
            return Precision((_COARSEST,) * count)
        reference = _logits(model, survey.kept_in(Precision((_UNQUANTISED,) * count)), ids)

        def divergence(layers: Layers) -> float:
            logits = _logits(model, survey.kept_in(Precision(tuple(layers))), ids)
            return self.settle(mean_divergence(reference, logits))

        return find_precision(divergence, count, self.limit)


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

"""Passes of a model over a text, with keys and values in given bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import LayerArena
from agentcache.kv.packing import UNQUANTISED_BITS, LayerBits, Precision
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import StepCache, Writes
from agentcache.models.inspection import Inspection
from agentcache.models.layers import LayerCall, hooked
from agentcache.models.step import CurrentStep, StepInputs, make_caches
from agentcache.system.memory import SystemMemory

_COMPARED_AT_ONCE = 32
_FAMILIAR, _STRETCH = 0.75, 64  # share of a uniform guess's loss, over that number of tokens
SEALED_READ_FROM = (FIRST_SEALED + 1) * BLOCK_SIZE  # by channel, earlier positions read 8 bits only
_PARTS = slice(SEALED_READ_FROM), slice(SEALED_READ_FROM, None)  # of a text
_UNQUANTISED = LayerBits(UNQUANTISED_BITS, UNQUANTISED_BITS)
_COPY_SHARE = 4  # 1/n of available memory, for the float32 copy
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding}


@dataclass
class Reference:
    """Unquantised results: `logprobs` [tokens, vocabulary], layer calls; `counted` positions, bool [tokens]."""

    is_float32: bool
    logprobs: mx.array
    counted: np.ndarray
    inputs: list[mx.array | None]
    outputs: list[mx.array]


class PrecisionRuns:
    """Runs a model on the paged cache, on its thread."""

    def __init__(self, model: nn.Module, inspection: Inspection, text: Sequence[int], current: CurrentStep) -> None:
        self._model = model
        self._inspection = inspection
        self._current = current
        self._text = tuple(text)
        self._reference: Reference | None = None

    @property
    def has_text(self) -> bool:
        return len(self._text) >= 2

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def forget(self) -> None:
        self._reference = None

    def divergence(self, layers: Sequence[LayerBits]) -> float:
        """`worse_part_divergence` over the counted positions."""
        reference = self._reference
        assert reference is not None
        with self._device_dtype(reference.is_float32):
            return worse_part_divergence(reference.logprobs, self._run(self._text, layers), reference.counted)

    def errors(self, bits: LayerBits) -> list[float]:
        """Relative mean squared change of each layer's output, for the reference run's input, in the worse part."""
        reference, count = self._reference, len(self._inspection.layers)
        assert reference is not None
        trace = _Trace(reference.inputs)
        with self._device_dtype(reference.is_float32):
            with hooked(self._model, trace.compute):
                self._forward(self._text, [bits] * count)  # lazy: the head is never computed
            changes = [_change(*pair) for pair in zip(reference.outputs, trace.outputs, strict=True)]
            mx.eval(changes)
        errors = [float(each.item()) for each in changes]
        shared = [layer.index for layer in self._inspection.layers]
        return [errors[layer.index] / shared.count(layer.index) for layer in self._inspection.layers]

    def compute_reference(self, agree: Callable[[float], float] = lambda number: number) -> None:
        """Run the text unquantised, on all ranks in the same dtype."""
        faster = is_float32(self._model) or gains_by_float32(self._model)
        as_float32, trace = bool(agree(float(faster))), _Trace()
        with self._device_dtype(as_float32), hooked(self._model, trace.compute):
            logprobs = self.logprobs(self._text, [_UNQUANTISED] * len(self._inspection.layers))
        counted = _familiar(self._text, logprobs)
        self._reference = Reference(as_float32, logprobs, counted, trace.inputs, trace.outputs)

    def _device_dtype(self, is_float32: bool) -> AbstractContextManager[None]:
        return in_float32(self._model) if is_float32 else nullcontext()

    def logprobs(self, text: Sequence[int], layers: Sequence[LayerBits]) -> mx.array:
        logprobs = _log_softmax(self._run(text, layers))
        mx.eval(logprobs)
        return logprobs

    def _run(self, text: Sequence[int], layers: Sequence[LayerBits]) -> mx.array:
        logits: mx.array = mx.contiguous(self._forward(text, layers)[0])
        mx.eval(logits)
        return logits

    def _forward(self, text: Sequence[int], layers: Sequence[LayerBits]) -> Any:
        inspection, count = self._inspection.kept_in(Precision(tuple(layers))), len(text)
        blocks = list(range(-(-count // BLOCK_SIZE)))
        every, sealed = BlockTable(blocks), BlockTable(blocks[FIRST_SEALED:], FIRST_SEALED)
        caches = []
        for layer, packing in zip(inspection.layers, inspection.packings, strict=True):
            arena = LayerArena(layer, packing)
            arena.grow(len(blocks))
            if arena.open is None:
                reads, writes = Reads([every], [0], count, layer.window), Writes([every], [0], count)
            else:
                reads = Reads([sealed], [0], count, layer.window, [every])
                writes = Writes([every], [0], count, [sealed])
            caches.append(StepCache(arena, reads, writes, 0))
        ids = mx.array([text])
        with self._current.of(StepInputs(ids, [0], all_logits=True)):
            return self._model(ids, cache=inspection.caches(caches, make_caches(None, inspection.recurrent)))


class _Trace:
    def __init__(self, given: Sequence[mx.array | None] | None = None) -> None:
        self.inputs: list[mx.array | None] = []
        self.outputs: list[mx.array] = []
        self._given = given

    def compute(self, call: LayerCall) -> Any:
        given = None if self._given is None else self._given[len(self.outputs)]
        self.inputs.append(call.x if given is None else given)
        out = call.compute(given)
        self.outputs.append(out[0] if isinstance(out, tuple) else out)
        return out


def _change(expected: mx.array, actual: mx.array) -> mx.array:
    expected, actual = expected.astype(mx.float32), actual.astype(mx.float32)
    squares = mx.maximum(mx.square(expected).sum(axis=-1), 1e-12)
    changes = mx.square(actual - expected).sum(axis=-1) / squares
    means = [changes[:, part].mean() for part in _PARTS if changes[:, part].size]
    return mx.nan_to_num(mx.stack(means), nan=1.0, posinf=1.0).max()


def _familiar(text: Sequence[int], logprobs: mx.array) -> np.ndarray:
    """Positions in stretches of a language that the model knows; all if it knows none."""
    chosen = mx.take_along_axis(logprobs[:-1], mx.array(text[1:])[:, None], axis=-1)[:, 0]
    losses = np.append(-np.array(chosen, np.float64), -float(chosen[-1].item()))  # the last token has no successor
    most = _FAMILIAR * math.log(logprobs.shape[-1])
    known = [losses[begin : begin + _STRETCH].mean() <= most for begin in range(0, len(text), _STRETCH)]
    return np.repeat(known if any(known) else [True] * len(known), _STRETCH)[: len(text)]


def worse_part_divergence(theirs: mx.array, logits: mx.array, counted: np.ndarray) -> float:
    """Larger of the mean divergences before `SEALED_READ_FROM` and from there on, in nats; infinite if a logit is NaN.

    `theirs` are log odds. One part is enough if the other has no `counted` position.
    """
    found = divergences_of(theirs, logits)
    if np.isnan(found).any():
        return math.inf
    means = [float(found[part][counted[part]].mean()) for part in _PARTS if counted[part].any()]
    return max(0.0, *means)


def divergences_of(theirs: mx.array, logits: mx.array) -> np.ndarray:
    """Divergence at each position, float64 [n]; NaN if a logit is; may be slightly negative."""
    parts = []
    for begin in range(0, theirs.shape[0], _COMPARED_AT_ONCE):
        logs = theirs[begin : begin + _COMPARED_AT_ONCE]
        # Padding may have logits of minus infinity.
        odds = mx.exp(logs)
        ours = _log_softmax(logits[begin : begin + _COMPARED_AT_ONCE])
        parts.append(np.array(mx.where(odds > 0, odds * (logs - ours), odds).sum(axis=-1), np.float64))
    return np.concatenate(parts)


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32, on a copy of the weights."""
    quantised = [(path, module) for path, module in model.named_modules() if type(module) in _PLAIN]
    model.update_modules(tree_unflatten([(path, _plain(module)) for path, module in quantised]))
    before = model.parameters()
    try:
        model.update(tree_map(_as_float32, before))
        mx.eval(model.parameters())
        yield
    finally:
        model.update(before)
        model.update_modules(tree_unflatten(quantised))
        mx.clear_cache()


def is_float32(model: nn.Module) -> bool:
    """Whether `in_float32` changes nothing."""
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)}
    return dtypes <= {mx.float32} and not any(type(module) in _PLAIN for module in model.modules())


def gains_by_float32(model: nn.Module) -> bool:
    """Whether float32 is faster, as on a CPU, and fits."""
    if mx.default_device() != mx.Device(mx.cpu) or is_float32(model):
        return False
    arrays = [array for _, array in tree_flatten(model.parameters())]
    packed = {id(module.weight): 32 // module.bits for module in model.modules() if type(module) in _PLAIN}
    available = SystemMemory().available()
    values = sum(array.size * packed.get(id(array), 1) for array in arrays)
    return available is not None and 4 * values <= available // _COPY_SHARE


def _plain(module: nn.Module) -> nn.Module:
    weight = mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
    )
    made = _PLAIN[type(module)](1, 1)
    if "bias" in made:
        del made["bias"]
    made.weight = weight.astype(mx.float32)
    if "bias" in module:
        made.bias = module.bias
    return made


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


# A coarse cache first spoils answers that depend on single distant words; prose and code depend on all text.
_FACTS = (
    "Marc lives in Cairo. Marc wears a silver coat. Alan works at the windmill. Dora has a friend called Nadia. "
    "The ladder is in the barn. Ines likes nuts best. Nadia likes figs best. The watch is in the red box."
)
_PROSE = """The ferry leaves the harbour at seven, before the fog has lifted, and the first passengers are nearly always
the same: two teachers who work on the island, a woman with a crate of bread, and the man who repairs the
clocks. Nobody talks much until the engine settles into its rhythm. Then the bread is passed around, still
warm, and somebody asks how the winter has treated the roof of the school. By the time the lighthouse comes
into view, the fog has turned into a thin white line above the water, and the conversation has moved on to the
price of fish.

On the way back in the evening the boat is full. Children sleep on the benches with their boots still wet, and
the teachers mark the last papers of the week by the light of a single lamp. The man with the clocks has been
paid in potatoes, as he often is, and he gives half of them to the captain, who never asks him for a ticket.
"""
_CODE = '''import re
from collections import Counter


def count_words(path, ignore=("the", "a", "an")):
    """Return how often each word occurs in a text file."""
    counts = Counter()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            for word in re.findall(r"[a-z]+", line.lower()):
                if word not in ignore:
                    counts[word] += 1
    return counts


def print_report(counts, limit=10):
    for word, count in counts.most_common(limit):
        print(f"{word:<20} {count:>6}")


if __name__ == "__main__":
    import sys

    print_report(count_words(sys.argv[1]))
'''
SAMPLE = tuple(
    message
    for said, answer in (
        (_FACTS, "Noted."),
        ("Tell me a story.", _PROSE),
        ("Where does Marc live?", "Marc lives in Cairo."),
        ("What does Nadia like best?", "Nadia likes figs best."),
        ("Where is the ladder?", "The ladder is in the barn."),
        ("Write a Python script that counts words.", _CODE),
        ("What colour of coat does Marc wear?", "Marc wears a silver coat."),
        ("Where does Alan work?", "Alan works at the windmill."),
        ("Where is the watch?", "The watch is in the red box."),
    )
    for message in ({"role": "user", "content": said}, {"role": "assistant", "content": answer})
)

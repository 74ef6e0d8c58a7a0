"""LoRA beside base's weights, by row. Tokens without an adapter get the original's output bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import mlx.core as mx
import mlx.nn as nn

from agentcache.errors import BrokenInvariant
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import AdapterContent, AdapterRows, AdapterWeights, target_modules
from agentcache.models.attention import activation_dtype
from agentcache.models.inspection import Inspection
from agentcache.models.layers import Stand
from agentcache.models.residual.forms import ResidualForms, find_forms
from agentcache.models.step import CurrentStep

# On CUDA, MLX 0.32.4's `gather_mm` crashes (misaligned addresses) if rows are no multiple of this.
_RANKS = 8


@dataclass(frozen=True)
class Stack:
    """A module's matrices of several adapters, padded to one rank: a [S, in, r], b [S, r, out]."""

    indices: Mapping[AdapterWeights, int]
    a: mx.array
    b: mx.array

    @classmethod
    def of(cls, pairs: Mapping[AdapterWeights, LowRank]) -> Stack:
        rank = _stacked_rank(pairs.values())
        a = [mx.pad(pair.a, [(0, 0), (0, rank - pair.rank)]) for pair in pairs.values()]
        b = [mx.pad(pair.b, [(0, rank - pair.rank), (0, 0)]) for pair in pairs.values()]
        return cls({weights: index for index, weights in enumerate(pairs)}, mx.stack(a), mx.stack(b))


def can_stack(adapters: Collection[AdapterWeights]) -> bool:
    """Whether the device can use stacks: MLX's CPU back end gathers float32 only."""
    if mx.default_device() != mx.cpu:
        return True
    pairs = (pair for weights in adapters for pair in weights.matrices.values())
    return all(pair.a.dtype == mx.float32 for pair in pairs)


def stacked_bytes(adapters: Collection[AdapterWeights]) -> int:
    """Bytes of stacks; only modules of several adapters count."""
    counts = Counter(name for weights in adapters for name in weights.matrices)
    shared = [name for name, count in counts.items() if count > 1]
    return sum(_stack_bytes([each.matrices[name] for each in adapters if name in each.matrices]) for name in shared)


def _stack_bytes(pairs: Sequence[LowRank]) -> int:
    per_rank = (pairs[0].a.nbytes + pairs[0].b.nbytes) // pairs[0].rank
    return len(pairs) * _stacked_rank(pairs) * per_rank


def _stacked_rank(pairs: Iterable[LowRank]) -> int:
    return -(-max(pair.rank for pair in pairs) // _RANKS) * _RANKS


class Stacks:
    """Stacks of a set of adapters, made on first use; `nbytes` counts all."""

    def __init__(self) -> None:
        self.built = 0
        self.nbytes = 0
        self.adapters: frozenset[AdapterWeights] = frozenset()
        self._by_module: dict[ModuleName, Stack] = {}

    def cover(self, adapters: Collection[AdapterWeights]) -> None:
        self.clear()
        self.adapters, self.nbytes = frozenset(adapters), stacked_bytes(adapters)
        self.built += 1

    def covers(self, adapters: Collection[AdapterWeights]) -> bool:
        return self.adapters.issuperset(adapters)

    def clear(self) -> None:
        self.adapters, self.nbytes, self._by_module = frozenset(), 0, {}

    def get(self, name: ModuleName) -> Stack:
        if name not in self._by_module:
            pairs = {weights: weights.matrices[name] for weights in self.adapters if name in weights.matrices}
            self._by_module[name] = Stack.of(pairs)
        return self._by_module[name]


class ModelAdapters:
    """Adapters of one model; `stacks`, for steps with several, are optional."""

    def __init__(self, model: nn.Module, inspection: Inspection, current: CurrentStep) -> None:
        self.modules = target_modules(model.layers, inspection)
        self.stacks = Stacks()
        self._model, self._inspection = model, inspection
        self._layers = list(model.layers)  # before they are wrapped
        self._wrapped: dict[ModuleName, AdaptedLinear] = {}
        self._current = current

    @cached_property
    def residual_forms(self) -> ResidualForms:
        """Found at first use, by a run on a few tokens."""
        return find_forms(self._model, self._inspection, self.modules)

    def load(self, content: AdapterContent) -> AdapterWeights:
        matrices = {name: self._put(name, pair) for name, pair in content.matrices.items()}
        weights = AdapterWeights(content.adapter, matrices)
        mx.eval([(pair.a, pair.b) for pair in matrices.values()])
        return weights

    def _put(self, name: ModuleName, pair: LowRank) -> LowRank:
        dtype = activation_dtype(self._wrap(name).original)
        return LowRank(mx.array(pair.a).astype(dtype), mx.array(pair.b).astype(dtype))

    def _wrap(self, name: ModuleName) -> AdaptedLinear:
        if name not in self._wrapped:
            before, _, leaf = name.path.rpartition(".")
            parent = dict(self._layers[name.layer].named_modules())[before]
            self._wrapped[name] = AdaptedLinear(parent[leaf], partial(self._adapt, name))
            setattr(parent, leaf, self._wrapped[name])
        return self._wrapped[name]

    def _adapt(self, name: ModuleName, x: mx.array, y: mx.array) -> mx.array:
        step = self._current.step
        if step is None:
            return y
        adapted = y if step.adapter_rows is None else self._adapted(step.adapter_rows, name, x, y)
        return adapted if step.residual is None else step.residual.take(name, x, y, adapted)

    def _adapted(self, rows: AdapterRows, name: ModuleName, x: mx.array, y: mx.array) -> mx.array:
        pairs = [weights.matrices.get(name) for weights in rows.adapters]
        present = tuple(pair is not None for pair in pairs)
        if not any(present):
            return y
        if x.shape[:2] != rows.shape:
            raise BrokenInvariant(f"{name} was called with {x.shape}, not with the step's tokens {rows.shape}")
        mask = rows.mask(present)
        adapted = y + self._delta(rows, name, x, pairs).astype(y.dtype)
        return adapted if mask is None else mx.where(mask, adapted, y)

    def _delta(self, rows: AdapterRows, name: ModuleName, x: mx.array, pairs: Sequence[LowRank | None]) -> mx.array:
        acting = [pair for pair in pairs if pair is not None]
        if len(acting) == 1:
            return x @ acting[0].a @ acting[0].b
        if not self.stacks.covers(rows.adapters):
            parts = rows.parts(tuple(pair is not None for pair in pairs))
            deltas = [x[part] @ pair.a @ pair.b for part, pair in zip(parts.rows, acting, strict=True)]
            return mx.concatenate(deltas)[parts.indices]
        stack = self.stacks.get(name)
        index = rows.index(tuple(stack.indices.get(weights, 0) for weights in rows.adapters))
        return mx.gather_mm(mx.gather_mm(x, stack.a, rhs_indices=index), stack.b, rhs_indices=index)


class AdaptedLinear(Stand):
    """A linear module with adapters."""

    def __init__(self, original: nn.Module, adapt: partial[mx.array]) -> None:
        super().__init__(original)
        self._adapt = adapt

    def __call__(self, x: mx.array) -> mx.array:
        return self._adapt(x, self.original(x))

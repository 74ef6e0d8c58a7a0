"""LoRA beside the base weights: rows of one batch use different adapters, or none, from different tokens on.

Every adapted module of the model is wrapped once by an `AdaptedLinear`, which leaves the original as it is. Before each
forward pass `ModelAdapters.step` says who uses what; tokens without an adapter get the original's output bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from agentcache.errors import BrokenInvariant
from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import Adapter, AdapterContent, target_modules
from agentcache.models.attention import activation_dtype


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter's matrices on the device, in the dtype that each module computes in."""

    adapter: Adapter
    matrices: Mapping[ModuleName, LowRank]

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.matrices.values())


@dataclass(frozen=True)
class RowAdapter:
    """A row's adapter: it acts on tokens at absolute positions from `start` on; 0 for plain LoRA."""

    weights: AdapterWeights
    start: int = 0


@dataclass(frozen=True)
class RowParts:
    """A step's rows, adapter by adapter.

    Args:
        rows: of each adapter, int32.
        places: each row's place when the parts are put one behind the other, int32 [B]; 0 for rows that are masked
            anyway.
    """

    rows: Sequence[mx.array]
    places: mx.array


class StepRows:
    """Which adapter each row of a step uses, from which of the step's tokens on.

    Args:
        rows: one entry a row; None for base.
        lengths: tokens each row holds before the step.
        num_tokens: tokens a row in the step.

    Attributes:
        adapters: those that act on at least one token, each once.
    """

    def __init__(self, rows: Sequence[RowAdapter | None], lengths: Sequence[int], num_tokens: int) -> None:
        self.shape = (len(lengths), num_tokens)
        self.adapters: list[AdapterWeights] = []
        self._users: list[int | None] = []  # each row's place in `adapters`
        self._firsts: list[int] = []
        self._masks: dict[tuple[bool, ...], mx.array | None] = {}
        self._indices: dict[tuple[int, ...], mx.array] = {}
        self._parts: dict[tuple[bool, ...], RowParts] = {}
        for row, length in zip(rows, lengths, strict=True):
            self._add(row, num_tokens if row is None else max(0, row.start - length))

    def _add(self, row: RowAdapter | None, first: int) -> None:
        self._firsts.append(first)
        if row is None or first >= self.shape[1]:
            self._users.append(None)
            return
        if row.weights not in self.adapters:
            self.adapters.append(row.weights)
        self._users.append(self.adapters.index(row.weights))

    def mask(self, present: tuple[bool, ...]) -> mx.array | None:
        """Tokens that the adapters marked in `present` act on, bool [B, n, 1]; None if they act on all."""
        if present not in self._masks:
            self._masks[present] = self._mask(present)
        return self._masks[present]

    def _mask(self, present: tuple[bool, ...]) -> mx.array | None:
        num_tokens = self.shape[1]
        users = zip(self._users, self._firsts, strict=True)
        firsts = [first if user is not None and present[user] else num_tokens for user, first in users]
        if not any(firsts):
            return None
        return (mx.arange(num_tokens)[None] >= mx.array(firsts)[:, None])[..., None]

    def index(self, slots: tuple[int, ...]) -> mx.array:
        """Each row's slot, int32 [B], given each adapter's; 0 for rows that are masked anyway."""
        if slots not in self._indices:
            rows = [0 if user is None else slots[user] for user in self._users]
            self._indices[slots] = mx.array(rows, dtype=mx.int32)
        return self._indices[slots]

    def parts(self, present: tuple[bool, ...]) -> RowParts:
        """The rows of the adapters marked in `present`."""
        if present not in self._parts:
            marked = [place for place, is_present in enumerate(present) if is_present]
            rows = [[row for row, user in enumerate(self._users) if user == place] for place in marked]
            order = [row for part in rows for row in part]
            places = [order.index(row) if row in order else 0 for row in range(self.shape[0])]
            self._parts[present] = RowParts([mx.array(part, mx.int32) for part in rows], mx.array(places, mx.int32))
        return self._parts[present]


@dataclass(frozen=True)
class Stack:
    """One module's matrices of several adapters, padded with zeros to the largest rank: a [S, in, r], b [S, r, out]."""

    slots: Mapping[AdapterWeights, int]
    a: mx.array
    b: mx.array

    @classmethod
    def of(cls, pairs: Mapping[AdapterWeights, LowRank]) -> Stack:
        rank = max(pair.rank for pair in pairs.values())
        a = [mx.pad(pair.a, [(0, 0), (0, rank - pair.rank)]) for pair in pairs.values()]
        b = [mx.pad(pair.b, [(0, rank - pair.rank), (0, 0)]) for pair in pairs.values()]
        return cls({weights: slot for slot, weights in enumerate(pairs)}, mx.stack(a), mx.stack(b))


def stacked_bytes(adapters: Collection[AdapterWeights]) -> int:
    """What stacks of these take, of all modules that several of them act on."""
    counts = Counter(name for weights in adapters for name in weights.matrices)
    shared = [name for name, count in counts.items() if count > 1]
    return sum(_stack_bytes([each.matrices[name] for each in adapters if name in each.matrices]) for name in shared)


def _stack_bytes(pairs: Sequence[LowRank]) -> int:
    per_rank = (pairs[0].a.nbytes + pairs[0].b.nbytes) // pairs[0].rank
    return len(pairs) * max(pair.rank for pair in pairs) * per_rank


class Stacks:
    """Stacks of one set of adapters, made module by module when first needed, for steps that use a subset of it.

    Attributes:
        adapters: the set.
        nbytes: of all its stacks, made yet or not.
        built: counts sets.
    """

    def __init__(self) -> None:
        self.built = 0
        self.nbytes = 0
        self.adapters: frozenset[AdapterWeights] = frozenset()
        self._by_module: dict[ModuleName, Stack] = {}

    def cover(self, adapters: Collection[AdapterWeights]) -> None:
        """From now on have stacks of these."""
        self.clear()
        self.adapters, self.nbytes = frozenset(adapters), stacked_bytes(adapters)
        self.built += 1

    def covers(self, adapters: Collection[AdapterWeights]) -> bool:
        return self.adapters.issuperset(adapters)

    def clear(self) -> None:
        """Have none."""
        self.adapters, self.nbytes, self._by_module = frozenset(), 0, {}

    def get(self, name: ModuleName) -> Stack:
        """The stack of a module that several of the adapters act on."""
        if name not in self._by_module:
            pairs = {weights: weights.matrices[name] for weights in self.adapters if name in weights.matrices}
            self._by_module[name] = Stack.of(pairs)
        return self._by_module[name]


class ModelAdapters:
    """Adapters of one model. Wraps its modules, and owns who uses which adapter in the step under way.

    Attributes:
        modules: what adapters can act on.
        stacks: copies of adapters for steps that use several; steps do without where they are not covered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = target_modules(model.layers)
        self.stacks = Stacks()
        self._layers = list(model.layers)  # whatever stands in their places later
        self._wrapped: dict[ModuleName, AdaptedLinear] = {}
        self._step: StepRows | None = None

    def load(self, content: AdapterContent) -> AdapterWeights:
        """Put an adapter's matrices on the device, and wrap the modules that it is the first to act on."""
        matrices = {name: self._put(name, pair) for name, pair in content.matrices.items()}
        weights = AdapterWeights(content.adapter, matrices)
        mx.eval([(pair.a, pair.b) for pair in matrices.values()])
        return weights

    def _put(self, name: ModuleName, pair: LowRank) -> LowRank:
        dtype = activation_dtype(self._wrap(name).linear)
        return LowRank(mx.array(pair.a).astype(dtype), mx.array(pair.b).astype(dtype))

    def _wrap(self, name: ModuleName) -> AdaptedLinear:
        if name not in self._wrapped:
            before, _, leaf = name.path.rpartition(".")
            parent = dict(self._layers[name.layer].named_modules())[before]
            self._wrapped[name] = AdaptedLinear(parent[leaf], partial(self._adapt, name))
            setattr(parent, leaf, self._wrapped[name])
        return self._wrapped[name]

    @contextmanager
    def step(self, rows: Sequence[RowAdapter | None], lengths: Sequence[int], num_tokens: int) -> Iterator[None]:
        """Inside, the model runs with these adapters; the arguments are those of `StepRows`, no rows for base."""
        if any(rows):
            self._step = StepRows(rows, lengths, num_tokens)
        try:
            yield
        finally:
            self._step = None

    def _adapt(self, name: ModuleName, x: mx.array, y: mx.array) -> mx.array:
        """The original's output `y` [B, n, out], changed where an adapter acts on its input `x` [B, n, in]."""
        step = self._step
        if step is None:
            return y
        pairs = [weights.matrices.get(name) for weights in step.adapters]
        present = tuple(pair is not None for pair in pairs)
        if not any(present):
            return y
        if x.shape[:2] != step.shape:
            raise BrokenInvariant(f"{name} was called with {x.shape}, not with the step's tokens {step.shape}")
        mask = step.mask(present)
        adapted = y + self._delta(step, name, x, pairs).astype(y.dtype)
        return adapted if mask is None else mx.where(mask, adapted, y)

    def _delta(self, step: StepRows, name: ModuleName, x: mx.array, pairs: Sequence[LowRank | None]) -> mx.array:
        """x @ a @ b [B, n, out] with each row's own matrices; MLX adds up in float32 whatever the dtype."""
        acting = [pair for pair in pairs if pair is not None]
        if len(acting) == 1:
            return x @ acting[0].a @ acting[0].b
        if not self.stacks.covers(step.adapters):
            parts = step.parts(tuple(pair is not None for pair in pairs))
            deltas = [x[rows] @ pair.a @ pair.b for rows, pair in zip(parts.rows, acting, strict=True)]
            return mx.concatenate(deltas)[parts.places]
        stack = self.stacks.get(name)
        index = step.index(tuple(stack.slots.get(weights, 0) for weights in step.adapters))
        return mx.gather_mm(mx.gather_mm(x, stack.a, rhs_indices=index), stack.b, rhs_indices=index)


class AdaptedLinear(nn.Module):
    """A linear module and what adapters add to its output. Attributes of the original can be read here too.

    Args:
        original: used as it is.
        adapt: given the input and the original's output, the output.
    """

    def __init__(self, original: nn.Module, adapt: partial[mx.array]) -> None:
        super().__init__()
        self.linear = original
        self._adapt = adapt

    def __call__(self, x: mx.array) -> mx.array:
        return self._adapt(x, self.linear(x))

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        if "linear" in self:
            return getattr(self["linear"], key)
        raise AttributeError(key)

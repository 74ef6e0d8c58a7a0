"""Adapters of a step's rows, and the token from which each acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.models.adapter_files import LowRank, ModuleName
from agentcache.models.adapters import Adapter


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter's matrices on the device, in each module's type."""

    adapter: Adapter
    matrices: Mapping[ModuleName, LowRank]

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.matrices.values())


@dataclass(frozen=True)
class RowAdapter:
    """A row's adapter, which acts on positions from `start`; 0 for plain LoRA."""

    weights: AdapterWeights
    start: int = 0


@dataclass(frozen=True)
class RowParts:
    """A step's rows by adapter: their indices, int32; each row's index in the concatenation, int32 [B], 0 if masked."""

    rows: Sequence[mx.array]
    indices: mx.array


class AdapterRows:
    """Adapters of a step's rows; None for base.

    Args:
        lengths: tokens of each row before the step.

    Attributes:
        adapters: those that act on at least one token, without duplicates.
    """

    def __init__(self, rows: Sequence[RowAdapter | None], lengths: Sequence[int], num_tokens: int) -> None:
        self.shape = (len(lengths), num_tokens)
        self.adapters: list[AdapterWeights] = []
        self._users: list[int | None] = []  # each row's index into `adapters`
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
        """Tokens on which adapters marked in `present` act, bool [B, n, 1]; None if all."""
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

    def index(self, in_stack: tuple[int, ...]) -> mx.array:
        """Each row's index in a stack, int32 [B], from each adapter's; 0 for masked rows."""
        if in_stack not in self._indices:
            rows = [0 if user is None else in_stack[user] for user in self._users]
            self._indices[in_stack] = mx.array(rows, dtype=mx.int32)
        return self._indices[in_stack]

    def parts(self, present: tuple[bool, ...]) -> RowParts:
        if present not in self._parts:
            marked = [user for user, is_present in enumerate(present) if is_present]
            rows = [[row for row, user in enumerate(self._users) if user == each] for each in marked]
            order = [row for part in rows for row in part]
            indices = [order.index(row) if row in order else 0 for row in range(self.shape[0])]
            self._parts[present] = RowParts([mx.array(part, mx.int32) for part in rows], mx.array(indices, mx.int32))
        return self._parts[present]

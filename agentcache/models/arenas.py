"""RAM of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from agentcache.blocks.pool import Copy, full_partner
from agentcache.blocks.snapshots import Snapshots
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import GroupArena, TensorArena, make_arenas
from agentcache.kv.backing import note_resized
from agentcache.kv.block_layout import Array, GroupMemory
from agentcache.kv.measures import Extras, TokenMeasures
from agentcache.kv.spec import CacheSpec
from agentcache.kv.states import StateArena
from agentcache.models.step import RowState


class Slots(Protocol):
    """A cache group's slots: a `BlockPool`, or its stand-in on a worker rank."""

    @property
    def capacity(self) -> int: ...

    def take_moves(self) -> list[tuple[int, int]]: ...


class CacheArenas:
    """Arenas of one cache, for the model's thread.

    Host access waits until the device is idle: a running step may still write to slots of ended requests, and holds the
    arrays that a resize replaces. Up to `room` bytes a group grows without a copy, if the device can.
    """

    def __init__(
        self,
        spec: CacheSpec,
        pools: Sequence[Slots],
        wait: Callable[[], None],
        evaluate: Callable[[], None],
        *,
        room: int = 0,
    ) -> None:
        self.spec = spec
        self.evaluate = evaluate
        self.groups: list[GroupArena] = make_arenas(spec, room)
        self.measures: dict[int, TokenMeasures] = {}
        self.copied_blocks = 0
        self._pools = pools
        self._wait = wait

    @property
    def tensors(self) -> Iterator[TensorArena]:
        for group in self.groups:
            yield from group.tensors
        for measures in self.measures.values():
            yield measures.tokens

    def fit(self) -> None:
        """Follow the pools: move blocks, shrink groups, then grow."""
        self._follow_moves()
        pairs = list(zip(self.groups, self._pools, strict=True))
        if all(arena.capacity == pool.capacity for arena, pool in pairs):
            return
        self._wait()
        for arena, pool in pairs:
            arena.shrink(pool.capacity)
        for arena, pool in pairs:
            arena.grow(pool.capacity)
        for group, measures in self.measures.items():
            measures.fit(self._pools[group].capacity)
        note_resized()

    def _follow_moves(self) -> None:
        moves = [
            Copy(group, source, target)
            for group, (arena, pool) in enumerate(zip(self.groups, self._pools, strict=True))
            for source, target in pool.take_moves()
            if source < arena.capacity  # else it never had memory
        ]
        if moves:
            self.move_blocks(moves)

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy on write, in order with steps."""
        self.fit()
        for copy in copies:
            self._copy(copy)
            self.copied_blocks += 1

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        """Copy blocks to new slots, before `fit`."""
        self._follow_moves()
        for move in moves:
            self._copy(move)

    def _copy(self, copy: Copy) -> None:
        self._wait()
        if copy.reopens:
            self.groups[copy.group].reopen(copy.source, copy.target)
            if copy.group in self.measures:
                full = self.measures[full_partner(copy.group)]
                self.measures[copy.group].take(full, copy.source, copy.target)
            return
        self.groups[copy.group].copy(copy.source, copy.target)
        if copy.group in self.measures:
            self.measures[copy.group].copy(copy.source, copy.target)

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks, uint8 [n] each; they may change after the call."""
        self.fit()
        self._wait()
        self.groups[group].put(block_ids, blocks)

    def reopen_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write full blocks, uint8 [n] each of the group before, into open slots."""
        self.fit()
        self._wait()
        self.groups[group].put_full(block_ids, blocks)

    def memory(self, group: int) -> GroupMemory | None:
        """See `GroupArena.memory`. Compute nothing while it is used."""
        self.fit()
        self._wait()
        return self.groups[group].memory()

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        """A block's bytes, uint8 [n]."""
        self.fit()
        self._wait()
        return self.groups[group].snapshot(block_id, num_tokens)

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras:
        if group not in self.measures:
            return {}
        self._wait()
        return self.measures[group].extras(block_id, num_tokens)

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None:
        if group in self.measures:
            self.measures[group].put(block_id, num_tokens, extras)


class BaseArenas(CacheArenas):
    """Arenas of base's cache; a further last group has checkpoints of recurrent state."""

    def __init__(
        self,
        spec: CacheSpec,
        pools: Sequence[Slots],
        wait: Callable[[], None],
        evaluate: Callable[[], None],
        snapshots: Snapshots | None = None,
        *,
        room: int = 0,
        measures: bool = False,
    ) -> None:
        super().__init__(spec, pools, wait, evaluate, room=room)
        if measures:
            self.measures = {group: TokenMeasures("energy", 2) for group in range(len(self.groups))}
        self.states = None if snapshots is None else StateArena(spec, snapshots)

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        if group < len(self.groups):
            super().put_blocks(group, block_ids, blocks)
            return
        for slot, data in zip(block_ids, blocks, strict=True):
            self._states.put_bytes(slot, data)

    def memory(self, group: int) -> GroupMemory | None:
        return super().memory(group) if group < len(self.groups) else None

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        if group < len(self.groups):
            return super().snapshot(group, block_id, num_tokens)
        self.fit()
        self._wait()
        return self._states.snapshot(block_id)

    @property
    def _states(self) -> StateArena:
        if self.states is None:
            raise BrokenInvariant("this model has no recurrent state")
        return self.states

    def keep_state(self, slot: int, state: RowState) -> None:
        """Store a checkpoint, lazily."""
        self._states.put(slot, state.batch.arrays, state.index)

    def row_state(self, slot: int) -> RowState:
        return RowState.of(self._states.arrays(slot))

    def is_finite_state(self, slot: int) -> bool:
        return self._states.is_finite(slot)

    def free_states(self) -> None:
        if self.states is not None:
            self.states.sweep()

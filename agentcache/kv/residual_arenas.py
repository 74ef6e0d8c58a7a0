"""The RAM in which the residuals of one adapter, or of one family of adapters, lie beside the model's own cache.

It answers whoever reads, writes or saves blocks as `ModelRunner` does for base. One object each: ranks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import numpy as np

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.blocks.sequence import Copy
from agentcache.kv.block_layout import Array, GroupMemory
from agentcache.kv.group_arena import GroupArena, make_arenas
from agentcache.kv.measures import Extras, TokenMeasures
from agentcache.kv.reserved import note_resized
from agentcache.kv.spec import CacheSpec
from agentcache.kv.tensor_arena import TensorArena

LARGEST_FLOAT16 = 65504.0


class ResidualArenas:
    """Belongs to the thread that runs the model.

    Args:
        spec: see `residual_spec`.
        pools: one a group, whose slots these arenas hold.
        wait: returns when the device has done what was started last.
        evaluate: finishes every write that is due, these among them.
        room: bytes that a group may come to take.
        measures: whether it is kept how far each token's own keys and values were from base's.
        is_family: the residuals are those of a family of adapters. What is measured then is of whoever reads them, so
            it does not go with their files.

    Attributes:
        measures: those, of the group `measured`; None where they are not kept.
        saturated: int32 [], how many values have been too large for float16, or were no numbers.
    """

    def __init__(
        self,
        spec: CacheSpec,
        pools: Sequence[BlockPool],
        wait: Callable[[], None],
        evaluate: Callable[[], None],
        *,
        room: int = 0,
        measures: bool = False,
        is_family: bool = False,
    ) -> None:
        self.spec = spec
        self.is_family = is_family
        self.evaluate = evaluate
        self.saturated = mx.array(0, mx.int32)
        # One group stands for all: what is measured is summed over the whole model. Of a window's blocks few are left.
        self.measured = next((index for index, group in enumerate(spec.groups) if group.window is None), 0)
        self.measures = TokenMeasures("divergence", 4) if measures else None
        self._pools = pools
        self._wait = wait
        self._arenas: list[GroupArena] = make_arenas(spec, room)
        self._tensors = {
            tensor.spec.name: (group, tensor) for group, arena in enumerate(self._arenas) for tensor in arena.tensors
        }

    def tensor(self, name: str) -> tuple[int, TensorArena]:
        """A tensor by its name in the spec, with the index of its group; KeyError where the spec has none."""
        return self._tensors[name]

    def has(self, name: str) -> bool:
        """Whether the spec has a tensor of that name."""
        return name in self._tensors

    def saturate(self, x: mx.array) -> mx.array:
        """Float32 `x` as float16: a NaN becomes 0 and what is too large the largest there is; both are counted."""
        self.saturated = self.saturated + mx.logical_not(mx.abs(x) <= LARGEST_FLOAT16).sum()
        return mx.clip(mx.where(mx.isnan(x), 0, x), -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(mx.float16)

    def fit(self) -> None:
        """Follow the pools: blocks go where they have been moved to, memory of slots that were given up is given back,
        then new slots get theirs."""
        pairs = list(zip(self._arenas, self._pools, strict=True))
        self._follow_moves()
        if all(arena.capacity == pool.capacity for arena, pool in pairs):
            return
        self._wait()  # what is under way holds the old arrays
        for arena, pool in pairs:
            arena.shrink(pool.capacity)
        for arena, pool in pairs:
            arena.grow(pool.capacity)
        if self.measures is not None:
            self.measures.fit(self._pools[self.measured].capacity)
        note_resized()

    def _follow_moves(self) -> None:
        for group, (arena, pool) in enumerate(zip(self._arenas, self._pools, strict=True)):
            moves = pool.take_moves()
            # What lay behind the arena's end has never had any memory.
            self._copy(Copy(group, source, target) for source, target in moves if source < arena.capacity)

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy-on-write, in order with the steps around it."""
        self.fit()
        self._copy(copies)

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        """The same, of blocks that change their slots, before `fit` follows the pools."""
        self._follow_moves()  # those that come first
        self._copy(moves)

    def _copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._wait()
            self._arenas[copy.group].copy(copy.source, copy.target)
            if self.measures is not None and copy.group == self.measured:
                self.measures.copy(copy.source, copy.target)

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks that were read from files: uint8 [n] each, which may change as soon as this returns."""
        self.fit()
        self._wait()  # the step under way may still write to slots whose owner is gone
        self._arenas[group].put(block_ids, blocks)

    def memory(self, group: int) -> GroupMemory | None:
        """Where slots lie, to read files to there (`GroupArena.memory`); nothing may be computed meanwhile."""
        self.fit()
        self._wait()
        return self._arenas[group].memory()

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        """A copy of a block's bytes, for the writer: uint8 [n]."""
        self.fit()
        self._wait()
        return self._arenas[group].snapshot(block_id, num_tokens)

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras:
        """What is known of a block beside its bytes, to go with its file."""
        if self.measures is None or group != self.measured or self.is_family:
            return {}
        self._wait()
        return self.measures.extras(block_id, num_tokens)

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None:
        """Take over what came with a block's file."""
        if self.measures is not None and group == self.measured and not self.is_family:
            self.measures.put(block_id, num_tokens, extras)

    def measured_of(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[np.ndarray, int]:
        """Sums over a prompt of so many tokens, float64 [4], as far as they are known, and of how many tokens.

        Of a family's residuals, whoever reads them has computed the last token only.
        """
        if self.measures is None:
            return np.zeros(4), 0
        self.fit()
        self.evaluate()
        return self.measures.sums(tables[self.measured], num_tokens, num_tokens - 1 if self.is_family else 0)

    @property
    def tensors(self) -> list[TensorArena]:
        """All that steps write to."""
        measures = [] if self.measures is None else [self.measures.tokens]
        return [*measures, *(tensor for _, tensor in self._tensors.values())]

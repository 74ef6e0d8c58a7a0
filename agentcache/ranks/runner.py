from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import count

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.pool import BlockPool, Copy
from agentcache.kv.block_layout import Array
from agentcache.models.adapter_rows import AdapterWeights, RowAdapter
from agentcache.models.adapters import AdapterContent
from agentcache.models.inspection import Inspection
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.shards import ShardedAdapters, Shards
from agentcache.models.step import CurrentStep, StepInputs, StepOutputs
from agentcache.ranks.commands import (
    CopyBlocks,
    DropAdapter,
    Fit,
    Forward,
    GiveBack,
    LoadAdapter,
    PutBytes,
    RowUse,
    Start,
    TakeBytes,
)
from agentcache.ranks.remote_handles import RemoteHandles
from agentcache.ranks.worker_link import WorkerLink


class RankZeroAdapters(ShardedAdapters):
    """Rank 0's adapters. Workers load each under a number and drop it when rank 0's weights are freed."""

    def __init__(
        self, model: nn.Module, inspection: Inspection, current: CurrentStep, shards: Shards, link: WorkerLink
    ) -> None:
        super().__init__(model, inspection, current, shards)
        self._link = link
        self._next = count()
        self._numbers: weakref.WeakKeyDictionary[AdapterWeights, int] = weakref.WeakKeyDictionary()

    def load(self, content: AdapterContent) -> AdapterWeights:
        weights, number = super().load(content), next(self._next)
        self._link.tell(LoadAdapter.of(number, content.adapter.digest, content.matrices))
        self._numbers[weights] = number
        weakref.finalize(weights, self._link.tell, DropAdapter(number)).atexit = False
        return weights

    def number_of(self, weights: AdapterWeights) -> int:
        return self._numbers[weights]


class RankZeroRunner(ModelRunner):
    """Rank 0's `ModelRunner`, which also sends its operations to workers."""

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Sequence[BlockPool],
        adapters: RankZeroAdapters,
        link: WorkerLink,
        handles: RemoteHandles,
        room: int,
    ) -> None:
        super().__init__(loaded, pools, room=room)
        self._adapters = adapters
        self._link = link
        self._handles = handles
        link.is_computing = lambda: self.is_busy

    def forward(self, step: StepInputs) -> StepOutputs:
        self.fit()
        self._link.tell(Forward.of(step, [self._use(row) for row in step.adapters]))
        return super().forward(step)

    def _use(self, row: RowAdapter | None) -> RowUse | None:
        return None if row is None else RowUse(self._adapters.number_of(row.weights), row.start)

    @property
    def starts_alone(self) -> bool:
        """False: workers have the step's commands already, and no results may be applied between them and its start."""
        return False

    def start(self, *outputs: mx.array) -> Started:
        self.wait()  # this message contains the previous step's tokens
        self._link.tell(Start(whole=bool(outputs)))
        self._link.exchange()
        with self._link.waiting():  # MLX limits how far it runs ahead
            return super().start(*outputs)

    def follow(self, *outputs: mx.array) -> None:
        with self._link.waiting():
            super().follow(*outputs)

    def wait(self) -> None:
        if self.is_busy:
            with self._link.waiting():
                super().wait()
            self._link.go_on()

    def fit(self) -> None:
        self._follow_moves()
        capacities = [pool.capacity for pool in self._pools]
        if capacities != [arena.capacity for arena in self.arenas]:
            self._link.tell(Fit(capacities))
        super().fit()

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        copies = list(copies)
        self.fit()
        self._tell_of(copies)
        super().copy_blocks(copies)

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        moves = list(moves)
        self._follow_moves()
        self._tell_of(moves)
        super().move_blocks(moves)

    def _tell_of(self, copies: Sequence[Copy]) -> None:
        if copies:
            self._link.tell(CopyBlocks(copies))

    def give_back(self) -> None:
        super().give_back()
        self._link.tell(GiveBack())

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        self.fit()
        self._link.tell(PutBytes(group, list(block_ids), [self._handles.of(block) for block in blocks]))
        super().put_blocks(group, block_ids, blocks)

    def memory(self, group: int) -> None:
        """A block that is invalid on another rank must not be in its slot here."""
        return None

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        data = super().snapshot(group, block_id, num_tokens)
        self._handles.keep(data, lambda handle: TakeBytes(handle, group, block_id, num_tokens))
        return data

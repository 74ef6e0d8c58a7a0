"""Rank 0's runner, adapters and store, which also send their operations to the workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from agentcache.blocks.pool import BlockPool, Copy
from agentcache.errors import BlocksLost, BrokenInvariant, RankLost, StoreError
from agentcache.kv.block_layout import Array
from agentcache.models.adapters import AdapterContent, AdapterWeights, RowAdapter
from agentcache.models.arenas import BaseArenas
from agentcache.models.inspection import Inspection
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner, Started
from agentcache.models.shards import ShardedAdapters, Shards
from agentcache.models.step import CurrentStep, StepInputs, StepOutputs
from agentcache.ranks.commands import (
    Block,
    BringBytes,
    BringZeros,
    Command,
    CopyBlocks,
    Delete,
    DropAdapter,
    Fit,
    Forget,
    Forward,
    GiveBack,
    KeepOnly,
    LoadAdapter,
    PutBytes,
    ReadBlocks,
    Require,
    RowUse,
    Start,
    TakeBytes,
    TakeStock,
    WriteBlocks,
    pack_keys,
    unpack_keys,
)
from agentcache.ranks.worker_link import WorkerLink
from agentcache.store.block_file import BlockHeader, StoredBlock
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.store import Store


class RankZeroAdapters(ShardedAdapters):
    """Workers load each adapter under a number and drop it when rank 0's weights are freed."""

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


class RankZeroArenas(BaseArenas):
    def __init__(self, link: WorkerLink, handles: RemoteHandles, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link = link
        self._handles = handles

    def fit(self) -> None:
        self._follow_moves()
        capacities = [pool.capacity for pool in self._pools]
        if capacities != [arena.capacity for arena in self.groups]:
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

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        self.fit()
        self._tell_to_put(group, block_ids, blocks, reopens=False)
        super().put_blocks(group, block_ids, blocks)

    def reopen_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        self.fit()
        self._tell_to_put(group, block_ids, blocks, reopens=True)
        super().reopen_blocks(group, block_ids, blocks)

    def _tell_to_put(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array], *, reopens: bool) -> None:
        handles = [self._handles.of(block) for block in blocks]
        self._link.tell(PutBytes(group, list(block_ids), handles, reopens))

    def memory(self, group: int) -> None:
        """A block that is invalid on another rank must not be in its slot here."""
        return None

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        data = super().snapshot(group, block_id, num_tokens)
        self._handles.keep(data, lambda handle: TakeBytes(handle, group, block_id, num_tokens))
        return data


class RankZeroRunner(ModelRunner):
    def __init__(
        self,
        loaded: LoadedModel,
        pools: Sequence[BlockPool],
        adapters: RankZeroAdapters,
        link: WorkerLink,
        handles: RemoteHandles,
        room: int,
    ) -> None:
        super().__init__(loaded, pools, room=room, make_base=partial(RankZeroArenas, link, handles))
        self._adapters = adapters
        self._link = link

    def forward(self, step: StepInputs) -> StepOutputs:
        self.base.fit()
        self._link.tell(Forward.of(step, [self._use(row) for row in step.adapters]))
        return super().forward(step)

    def _use(self, row: RowAdapter | None) -> RowUse | None:
        return None if row is None else RowUse(self._adapters.number_of(row.weights), row.start)

    @property
    def starts_alone(self) -> bool:
        """Workers have the step's commands already: no results may be applied between them and its start."""
        return False

    def start(self, *outputs: mx.array) -> Started:
        self.wait()  # this message contains the previous step's tokens
        self._link.tell(Start(whole=bool(outputs)))
        self._link.exchange()
        self._link.step_begins()
        with self._link.waiting():  # MLX limits how far it runs ahead
            return super().start(*outputs)

    def follow(self, *outputs: mx.array) -> None:
        with self._link.waiting():
            super().follow(*outputs)

    def wait(self) -> None:
        if self.is_busy:
            with self._link.waiting():
                super().wait()
            self._link.step_ended()

    def give_back(self) -> None:
        super().give_back()
        self._link.tell(GiveBack())


class RankZeroStore(Store):
    """Store of rank 0's folder and, through `link`, of the workers'. Only rank 0 has manifests and transcripts.

    Writes count once all ranks have finished; a block missing or invalid on one rank is missing.
    """

    def __init__(self, *args: Any, link: WorkerLink, handles: RemoteHandles, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link = link
        self._handles = handles
        self._gone: set[str] = set()  # blocks with a file here, but not on every rank
        # After a crash a block may be on some ranks only: an orphan, or written again.
        own = set(self.blocks.keys())
        self._gone = own.difference(own.intersection(*(unpack_keys(answer) for answer in link.ask_now(TakeStock))))

    def has(self, block_key: str) -> bool:
        return super().has(block_key) and block_key not in self._gone

    def write_blocks(self, blocks: Sequence[BlockWrite | BlockCopy]) -> int:
        new = [block.header.block_key for block in blocks if not self.blocks.is_there(block.header.block_key)]
        told = [Block(self._handle_of(block), block.header) for block in _with_data(blocks)]
        written = super().write_blocks(blocks)
        try:
            answers = self._link.ask(lambda number: WriteBlocks(number, told)).result()
        except RankLost:  # a restart compares the ranks' blocks
            self._gone.update(block.header.block_key for block in blocks)
            raise
        errors = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers, 1) if answer]
        if errors:
            self.delete_blocks(new)
            self._gone.update(block.header.block_key for block in blocks)
            raise StoreError("; ".join(errors))
        self._gone.difference_update(block.header.block_key for block in blocks)
        return written

    def _handle_of(self, block: BlockWrite) -> int:
        if block.others and not self._handles.has(block.data):
            self._handles.keep(block.data, lambda handle: BringBytes(handle, block.others))
        return self._handles.of(block.data)

    def decode_zeros(self, header: BlockHeader, buffer: Array) -> Array:
        data = super().decode_zeros(header, buffer)
        self._handles.keep(data, lambda handle: BringZeros(handle, header.group))
        return data

    def read_blocks(
        self, headers: Sequence[BlockHeader], buffers: Sequence[Array] | None = None
    ) -> list[StoredBlock | None]:
        wanted = [Block(self._handles.new(), header) for header in headers]
        asked = self._link.ask(lambda number: ReadBlocks(number, wanted))
        own = super().read_blocks(headers, buffers)
        answers = asked.result()
        found: list[StoredBlock | None] = []
        for place, (block, stored) in enumerate(zip(wanted, own, strict=True)):
            if stored is not None and all(answer[place] for answer in answers):
                self._handles.bind(stored.data, block.handle)
                found.append(stored)
            else:
                self._handles.give_back(block.handle)
                self._gone.add(block.header.block_key)
                found.append(None)
        return found

    def require_blocks(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        super().require_blocks(keys)
        answers = self._link.ask(lambda number: Require(number, pack_keys(keys))).result()
        gone = {key for answer in answers for key in unpack_keys(answer)}
        if gone:
            self._gone |= gone
            self._when_lost()
            raise BlocksLost("blocks are gone from another rank's cache folder")

    def delete_blocks(self, keys: Iterable[str], *, for_room: bool = False) -> int:
        keys = self.claims.deletable(keys, for_room=for_room)
        self._link.tell(Delete(pack_keys(list(keys))))
        self._gone.difference_update(keys)
        return super().delete_blocks(keys, for_room=for_room)

    def collect_orphans(self) -> int:
        count = super().collect_orphans()
        named = self.claims.named()
        # An empty folder may mean a disk that is not mounted.
        if self.claims.knows_all_manifests and (named or count):
            self._link.tell(KeepOnly(pack_keys(sorted(named))))
        return count

    def close(self) -> None:
        super().close()
        self._link.stop()


def _with_data(blocks: Sequence[BlockWrite | BlockCopy]) -> list[BlockWrite]:
    if not all(isinstance(block, BlockWrite) for block in blocks):
        raise StoreError("residuals of adapters cannot be imported where several ranks share the model")
    return [block for block in blocks if isinstance(block, BlockWrite)]


class RemoteHandles:
    """Numbers of arrays of block bytes. Workers drop their parts once the array is freed. Thread-safe."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._numbers = count(1)
        self._by_id: dict[int, int] = {}

    def new(self) -> int:
        return next(self._numbers)

    def bind(self, data: Array, handle: int) -> None:
        assert isinstance(data, np.ndarray)
        self._by_id[id(data)] = handle
        weakref.finalize(data, self._forget, id(data), handle).atexit = False

    def keep(self, data: Array, command: Callable[[int], Command]) -> None:
        """Have workers keep their parts of `data` under a new handle."""
        handle = self.new()
        self._link.tell(command(handle))
        self.bind(data, handle)

    def _forget(self, array_id: int, handle: int) -> None:
        del self._by_id[array_id]
        self.give_back(handle)

    def give_back(self, handle: int) -> None:
        self._link.tell(Forget([handle]))

    def has(self, data: Array) -> bool:
        return id(data) in self._by_id

    def of(self, data: Array) -> int:
        """The handle of `data`. Raises BrokenInvariant without one."""
        if not self.has(data):
            raise BrokenInvariant("the bytes of a block have no handle: other ranks do not have their parts")
        return self._by_id[id(data)]

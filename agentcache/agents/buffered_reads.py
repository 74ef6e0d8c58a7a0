from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from agentcache.agents.caches import KeptCache
from agentcache.agents.restoring import Read, Restoring
from agentcache.blocks.block_tables import Load
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.slots import Group
from agentcache.kv.block_layout import Array, aligned
from agentcache.kv.tensor_arena import shares_memory
from agentcache.store.block_file import BlockHeader, make_header
from agentcache.store.store import Store

log = logging.getLogger("agentcache.restore")

# For the reads during one step and the copies before the next. Reused last in, first out, to stay in the processor's
# caches.
_BUFFERS_BYTES = 64 << 20
_BATCH_BLOCKS = 16
# All buffers fit a processor's caches. Where blocks are uploaded, fewer and larger transfers are better.
_BATCH_BYTES, _UPLOAD_BYTES = 2 << 20, 16 << 20


@dataclass(frozen=True)
class _Batch:
    restore: Restoring
    loads: Sequence[Load]
    headers: Sequence[BlockHeader]

    @property
    def group(self) -> int:
        return self.loads[0].group


class BufferedReads:
    """Reads blocks into a fixed set of buffers while the engine computes, and copies them to slots between steps.

    Engine thread only, unless noted.

    Args:
        base: cache that sets the buffer size.
        most_begun: limit of concurrent reads.
        post: schedules a callback on the engine thread; callable from any thread.
    """

    def __init__(
        self,
        base: KeptCache,
        store: Store,
        readers: Executor,
        most_begun: int,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._base = base
        self._store = store
        self._readers = readers
        self._most_begun = most_begun
        self._post = post
        self._batch_bytes = _BATCH_BYTES if shares_memory() else _UPLOAD_BYTES
        most = max(group.bytes_per_block * self._batch_blocks(group) for group in base.prefix.all_groups)
        count = max(2, _BUFFERS_BYTES // most)
        # Guards the fields below. Reentrant: a read that has already finished runs its callback inside `_begin_reads`.
        self._lock = threading.RLock()
        self._buffers = [np.frombuffer(mmap.mmap(-1, most), np.uint8) for _ in range(count)]
        self._due: deque[_Batch] = deque()
        self._begun = 0

    def warm_up(self, tables: Sequence[BlockTable]) -> None:
        """Fill base's slots of `tables` with zero blocks, along the path of real ones."""
        base = self._base
        for index, table in enumerate(tables):
            group = base.prefix.groups[index]
            header, at_once = make_header("", group.name, 0, range(BLOCK_SIZE)), self._batch_blocks(group)
            for start in range(0, len(table.block_ids), at_once):
                block_ids = table.block_ids[start : start + at_once]
                buffer = self._buffers[-1 - start // at_once % self._most_begun % len(self._buffers)]
                reads = [
                    self._readers.submit(self._store.decode_zeros, header, part)
                    for part in _parts(buffer, group.bytes_per_block, len(block_ids))
                ]
                base.arenas.put_blocks(index, block_ids, [read.result() for read in reads])
        base.arenas.evaluate()

    def _batch_blocks(self, group: Group) -> int:
        return max(1, min(_BATCH_BLOCKS, self._batch_bytes // group.bytes_per_block))

    def cease(self) -> None:
        with self._lock:
            self._due.clear()

    @property
    def are_under_way(self) -> bool:
        return self._begun > 0

    def read(self, restore: Restoring, loads: Sequence[Load]) -> None:
        batches: list[list[Load]] = []
        for group, same in groupby(loads, key=lambda load: load.group):
            members, size = list(same), self._batch_blocks(restore.cache.prefix.all_groups[group])
            batches += [members[start : start + size] for start in range(0, len(members), size)]
        due = [_Batch(restore, each, [restore.header(load) for load in each]) for each in batches]
        with self._lock:
            self._due.extend(due)
            self._begin_reads()

    def _begin_reads(self) -> None:
        """Any thread, under the lock."""
        while self._due and self._buffers and self._begun < self._most_begun:
            batch, buffer = self._due.popleft(), self._buffers.pop()
            self._begun += 1
            self._readers.submit(self._read_batch, batch, buffer).add_done_callback(
                partial(self._hand_over, batch, buffer)
            )

    def _read_batch(self, batch: _Batch, buffer: Array) -> list[Read]:
        try:
            return self._read_files(batch, buffer)
        except BaseException:  # computed instead
            log.exception("blocks could not be read")
            return [Read(load, None) for load in batch.loads]

    def _read_files(self, batch: _Batch, buffer: Array) -> list[Read]:
        size = batch.restore.block_bytes(batch.group)
        if size * len(batch.loads) > buffer.nbytes:  # residuals of very high rank
            buffer = aligned(size * len(batch.loads))
        parts = _parts(buffer, size, len(batch.loads))
        blocks = self._store.read_blocks(batch.headers, parts)
        return [
            Read(load, None) if block is None else Read(load, block.extras, block.data)
            for load, block in zip(batch.loads, blocks, strict=True)
        ]

    def _hand_over(self, batch: _Batch, buffer: Array, future: Future[list[Read]]) -> None:
        """Runs on a reader thread, or on the submitting one if the read has already finished."""
        with self._lock:
            self._begun -= 1
            self._begin_reads()
        self._post(lambda: self._take(batch, buffer, future.result()))

    def _take(self, batch: _Batch, buffer: Array, reads: Sequence[Read]) -> None:
        try:
            batch.restore.finish(self._put(batch, reads))
        finally:
            with self._lock:
                self._buffers.append(buffer)
                self._begin_reads()

    def _put(self, batch: _Batch, reads: Sequence[Read]) -> Sequence[Read]:
        good = [(read.load.block_id, read.data) for read in reads if read.data is not None]
        if good and not batch.restore.sequence.closed:
            block_ids, blocks = zip(*good, strict=True)
            try:
                batch.restore.cache.arenas.put_blocks(batch.group, block_ids, blocks)
            except BaseException:  # computed instead
                log.exception("blocks could not be put into the cache")
                return [Read(load, None) for load in batch.loads]
        return reads


def _parts(buffer: Array, size: int, count: int) -> list[Array]:
    return [buffer[start : start + size] for start in range(0, count * size, size)]

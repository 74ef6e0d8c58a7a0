"""Restores verified blocks from disk into RAM.

While no request computes, full blocks are read into their slots (`ReadsInPlace`), and each byte is moved once.
Otherwise, if partly filled, if reopened, or if the host cannot write device memory, blocks go through buffers
(`BufferedReads`).
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue

import numpy as np

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.blocks.block_tables import BlockTables, Load
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE
from agentcache.blocks.pool import BlockTable, Group
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.arena import shares_memory
from agentcache.kv.block_layout import Array, GroupMemory, Place, RestBuffer, aligned
from agentcache.store.block_file import BlockHeader, Extras, make_header
from agentcache.store.block_folder import BlockReader
from agentcache.store.store import Store

log = logging.getLogger("agentcache.restore")

# Reused last in, first out, to stay in the processor's caches.
_BUFFERS_BYTES = 64 << 20
_BATCH_BLOCKS = 16
# Buffers in use fit the processor's caches; uploads are better in fewer, larger transfers.
_BATCH_BYTES, _UPLOAD_BYTES = 2 << 20, 16 << 20

_AHEAD = 2  # jobs per reader before the engine thread reads one

READERS = min(4, os.cpu_count() or 4)  # more evict each other's files from the processor's caches
_LARGE_BLOCK_BYTES = 1 << 20  # below, a second thread only competes for the GIL
_READS_BEGUN = READERS + 2  # each reader finds its next batch
# Seconds to read before the inbox is checked. Resuming is slow: tensors are located again.
_LEAST_AT_ONCE = 0.02


@dataclass(frozen=True)
class Restored:
    """Outcome of a restore; incomplete if files were missing, damaged or unreadable."""

    num_bytes: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class Read:
    """Result of reading one file: `extras` is None if it failed, `data` if already in its slot."""

    load: Load
    extras: Extras | None
    data: Array | None = None


@dataclass
class Restoring:
    """A restore under way. Engine thread only."""

    cache: KeptCache
    sequence: BlockTables
    done: Callable[[Restored], None]
    blocks_due: int
    num_bytes: int = 0
    complete: bool = True
    started_at: float = field(default_factory=time.perf_counter)

    def block_bytes(self, group: int) -> int:
        return self.cache.prefix.all_groups[group].bytes_per_block

    def header(self, load: Load) -> BlockHeader:
        return self.cache.header(load.node, load.source_group)

    def finish(self, reads: Sequence[Read]) -> None:
        cache = self.cache
        for read in reads:
            load = read.load
            if read.extras is None:
                cache.prefix.mark_missing(load.node, load.source_group)
                self.complete = False
                continue
            self.num_bytes += cache.spec.all_groups[load.source_group].bytes_of(load.node.num_tokens)
            if not self.sequence.closed:
                cache.arenas.put_extras(load.group, load.block_id, load.node.num_tokens, read.extras)
                cache.prefix.loaded(self.sequence, load)
        self.drop(len(reads))

    def drop(self, num_blocks: int) -> None:
        self.blocks_due -= num_blocks
        if not self.blocks_due:
            self.done(Restored(self.num_bytes, time.perf_counter() - self.started_at, self.complete))


@dataclass(frozen=True)
class _Batch:
    restore: Restoring
    loads: Sequence[Load]
    headers: Sequence[BlockHeader]

    @property
    def group(self) -> int:
        return self.loads[0].group

    @property
    def source_group(self) -> int:
        return self.loads[0].source_group

    @property
    def reopens(self) -> bool:
        return self.loads[0].reopens


class BufferedReads:
    """Reads blocks into buffers while the engine computes; copies them to slots between steps.

    Engine thread only, unless noted.
    """

    def __init__(
        self,
        base: KeptCache,
        store: Store,
        readers: Executor,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._base = base
        self._store = store
        self._readers = readers
        self._post = post
        self._batch_bytes = _BATCH_BYTES if shares_memory() else _UPLOAD_BYTES
        most = max(group.bytes_per_block * self._batch_blocks(group) for group in base.prefix.all_groups)
        count = max(2, _BUFFERS_BYTES // most)
        # For the fields below. Reentrant: a read that has already finished runs its callback inside `_begin_reads`.
        self._lock = threading.RLock()
        self._buffers = [np.frombuffer(mmap.mmap(-1, most), np.uint8) for _ in range(count)]
        self._due: deque[_Batch] = deque()
        self._begun = 0

    def warm_up(self, tables: Sequence[BlockTable]) -> None:
        """Fill base's slots of `tables` with zeros, as real blocks are read."""
        base = self._base
        for index, table in enumerate(tables):
            group = base.prefix.groups[index]
            header, at_once = make_header("", group.name, 0, range(BLOCK_SIZE)), self._batch_blocks(group)
            slots = table.slots
            for start in range(0, len(slots), at_once):
                block_ids = slots[start : start + at_once]
                buffer = self._buffers[-1 - start // at_once % _READS_BEGUN % len(self._buffers)]
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
        for (_, source), same in groupby(loads, key=lambda load: (load.group, load.source_group)):
            members, size = list(same), self._batch_blocks(restore.cache.prefix.all_groups[source])
            batches += [members[start : start + size] for start in range(0, len(members), size)]
        due = [_Batch(restore, each, [restore.header(load) for load in each]) for each in batches]
        with self._lock:
            self._due.extend(due)
            self._begin_reads()

    def _begin_reads(self) -> None:
        """Any thread, under the lock."""
        while self._due and self._buffers and self._begun < _READS_BEGUN:
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
        size = batch.restore.block_bytes(batch.source_group)
        if size * len(batch.loads) > buffer.nbytes:  # residuals of very high rank
            buffer = aligned(size * len(batch.loads))
        parts = _parts(buffer, size, len(batch.loads))
        blocks = self._store.read_blocks(batch.headers, parts)
        return [
            Read(load, None) if block is None else Read(load, block.extras, block.data)
            for load, block in zip(batch.loads, blocks, strict=True)
        ]

    def _hand_over(self, batch: _Batch, buffer: Array, future: Future[list[Read]]) -> None:
        """On a reader thread, or on the submitting one if the read has already finished."""
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
                arenas = batch.restore.cache.arenas
                put = arenas.reopen_blocks if batch.reopens else arenas.put_blocks
                put(batch.group, block_ids, blocks)
            except BaseException:  # computed instead
                log.exception("blocks could not be put into the cache")
                return [Read(load, None) for load in batch.loads]
        return reads


def _parts(buffer: Array, size: int, count: int) -> list[Array]:
    return [buffer[start : start + size] for start in range(0, count * size, size)]


@dataclass(frozen=True, eq=False)
class Job:
    restore: Restoring
    load: Load
    place: Place


class ReadsInPlace:
    """Runs read jobs on `count` threads of `readers` and on the engine thread, which alone chooses blocks."""

    def __init__(self, store: Store, readers: Executor, count: int) -> None:
        self._store = store
        self._readers = readers
        self._count = count
        self._due: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: list[tuple[Restoring, Read]] = []
        self._buffers: list[RestBuffer] = []

    def carry_out(self, jobs: Iterable[Job]) -> list[tuple[Restoring, Read]]:
        """Carry out jobs, taken lazily; afterwards no thread touches their places. Failed blocks count as missing."""
        self._ended = []
        readers: list[Future[None]] = []
        try:
            readers += [self._readers.submit(self._read_all) for _ in range(self._count)]
            with self._store.blocks.reader() as blocks:
                for job in jobs:
                    self._due.put(job)
                    if self._due.qsize() > _AHEAD * self._count:
                        self._read_next(blocks)
                while self._read_next(blocks):
                    continue
        except BaseException:
            log.exception("blocks could not be read")
        finally:
            self._dismiss(readers)
        for reader in readers:
            if not reader.cancelled() and (error := reader.exception()) is not None:
                log.error("a reader has failed", exc_info=error)  # this thread has read the rest
        return self._ended

    def _read_next(self, blocks: BlockReader) -> bool:
        with suppress(Empty):
            job = self._due.get_nowait()
            assert job is not None
            self._read(blocks, job)
            return True
        return False

    def _read_all(self) -> None:
        """On a reader thread."""
        with self._store.blocks.reader() as blocks:
            while (job := self._due.get()) is not None:
                self._read(blocks, job)

    def _read(self, blocks: BlockReader, job: Job) -> None:
        rest, extras = None, None
        try:
            rest = self._buffer(job.place.rest_sizes)
            extras = blocks.read_apart(job.restore.header(job.load), job.place.integers, rest.data)
            job.place.put_rest(rest)
            self._buffers.append(rest)
        except (BlockMissing, BlockRejected, StoreError):  # logged and counted by the store
            pass
        except BaseException:  # computed instead
            extras = None
            log.exception("a block could not be read")
        finally:
            job.place.let_go()
        self._ended.append((job.restore, Read(job.load, extras)))

    def _buffer(self, sizes: tuple[int, ...]) -> RestBuffer:
        with suppress(IndexError):
            if (buffer := self._buffers.pop()).sizes == sizes:
                return buffer
        return RestBuffer(sizes)

    def _dismiss(self, readers: Collection[Future[None]]) -> None:
        with suppress(Empty):
            while (job := self._due.get_nowait()) is not None:  # only after an error
                job.place.let_go()
                self._ended.append((job.restore, Read(job.load, None)))
        for reader in readers:
            self._due.put(None)
            reader.cancel()
        wait(readers)
        self._due = SimpleQueue()


class Restorer:
    """Carries out the `loads` of block tables. Engine thread only.

    `is_idle`: no request computes. `is_awaited`: the engine thread has messages.
    """

    def __init__(
        self,
        caches: KeptCaches,
        store: Store,
        post: Callable[[Callable[[], None]], None],
        is_idle: Callable[[], bool],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._caches = caches
        self._store = store
        self._post = post
        self._is_idle = is_idle
        self._is_awaited = is_awaited
        self._whole: deque[tuple[Restoring, Load]] = deque()  # full blocks
        sizes = [group.bytes_per_block for group in caches.base.prefix.all_groups]
        readers = READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="agentcache-reader")
        self._in_place = ReadsInPlace(store, self._readers, readers - 1)
        self.buffered = BufferedReads(caches.base, store, self._readers, post)

    def cease(self) -> None:
        self._whole.clear()
        self.buffered.cease()

    @property
    def is_reading(self) -> bool:
        return self.buffered.are_under_way

    def close(self) -> None:
        self.cease()
        self._readers.shutdown(wait=True)

    def restore(self, sequence: BlockTables, done: Callable[[Restored], None], cache: str = BASE_CACHE) -> None:
        """Load a sequence's blocks into RAM; call `done` even if the sequence has ended."""
        kept, loads = self._caches.get(cache), sorted(sequence.loads, key=lambda load: (load.group, load.reopens))
        restore = Restoring(kept, sequence, done, blocks_due=len(loads))
        self.buffered.read(restore, [load for load in loads if not _may_be_in_place(load)])
        self._whole.extend((restore, load) for load in loads if _may_be_in_place(load))
        if self._whole:
            self._post(self._go_on)
        kept.arenas.fit()  # allocate new slots during the first reads
        if not loads:
            done(Restored(0, 0.0, complete=True))

    def _go_on(self) -> None:
        """Read in place until a request computes; then use buffers."""
        reads = self._whole and self._is_idle() and self._read_in_place()
        if reads and self._whole and self._is_idle():
            self._post(self._go_on)
            return
        left = _by_group(self._whole)
        self._whole.clear()
        for restore, loads in left:
            self.buffered.read(restore, loads)

    def _read_in_place(self) -> bool:
        others: list[tuple[Restoring, Load]] = []
        memories = self._memories()
        try:
            ended = self._in_place.carry_out(self._jobs(memories, others))
        finally:
            for memory in memories.values():
                if memory is not None:
                    memory.let_go()
        for restore, loads in _by_group(others):
            if restore.sequence.closed:
                restore.drop(len(loads))
            else:
                self.buffered.read(restore, loads)
        for restore, read in ended:
            restore.finish([read])
        return bool(others or ended)

    def _memories(self) -> dict[tuple[str, int], GroupMemory | None]:
        # Before readers start: MLX releases the GIL per tensor and would wait to get it back.
        awaited = ((restore.cache, load) for restore, load in self._whole if not restore.sequence.closed)
        due = {(cache.name, load.group): cache for cache, load in awaited}
        return {(name, group): cache.arenas.memory(group) for (name, group), cache in due.items()}

    def _jobs(
        self, memories: Mapping[tuple[str, int], GroupMemory | None], others: list[tuple[Restoring, Load]]
    ) -> Iterator[Job]:
        """Yield jobs until time is up and a message waits; collect blocks without a place."""
        may_end_at = time.perf_counter() + _LEAST_AT_ONCE
        while self._whole:
            restore, load = self._whole.popleft()
            memory = memories.get((restore.cache.name, load.group))
            if memory is not None and not restore.sequence.closed:  # slots of a closed sequence have new owners
                yield Job(restore, load, memory.place(load.block_id))
            else:
                others.append((restore, load))
            if time.perf_counter() >= may_end_at and self._is_awaited():
                return


def _may_be_in_place(load: Load) -> bool:
    return load.node.is_full and not load.reopens


def _by_group(taken: Iterable[tuple[Restoring, Load]]) -> list[tuple[Restoring, list[Load]]]:
    runs = groupby(taken, key=lambda each: (id(each[0]), each[1].group))
    members = [list(run) for _, run in runs]
    return [(run[0][0], [load for _, load in run]) for run in members]

"""From disk into RAM: reader threads read and verify files, and only verified blocks are published.

While nothing is computed, files are read to where their blocks belong in the arenas, and verified there: each byte is
moved once. Nobody reads these slots until they are published, and the engine thread, which would only wait meanwhile,
reads with the readers: a few files at a time, after which it sees to what else has come.

Beside requests that compute, batches of files are read into buffers, verified where they lie there, and copied to their
slots by the engine thread between two steps; meanwhile the next ones are being read. So no memory is new but the slots,
however much is restored. So it is with blocks that are not full, and where the device's memory is not ours.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, block_key
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence, Load
from agentcache.blocks.slots import Group
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.arena import shares_memory
from agentcache.kv.block_layout import Array, Place
from agentcache.store.block_extras import Extras
from agentcache.store.block_file import BlockHeader, make_header
from agentcache.store.block_folder import BlockFolder
from agentcache.store.store import Store

READERS = min(4, os.cpu_count() or 4)  # more would only push each other's files out of the processor's caches
_LARGE_BLOCK_BYTES = 1 << 20  # smaller ones are mostly Python: a second thread would only be in the way
_READS_BEGUN = READERS + 2  # so that a reader that is done finds its next batch
# All buffers: what is read while a step keeps the engine thread busy, and what it copies before the next one. Those
# used last are used next: beside an idle engine a few do, and stay in the processor's caches.
_BUFFERS_BYTES = 64 << 20
_BATCH_BLOCKS = 16  # blocks that are put into their slots at once
# A processor's caches hold all buffers. Where bytes are uploaded, fewer and larger transfers are better.
_BATCH_BYTES, _UPLOAD_BYTES = 2 << 20, 16 << 20
# What the engine thread waits for at a time: some 5 ms of a fast disk.
_MOST_AT_ONCE = 32 << 20


def header_of(node: Node, index: int, cache: KeptCache) -> BlockHeader:
    """What the file of one cache group's part of a node has to say of itself."""
    assert node.parent is not None
    group = cache.prefix.all_groups[index].name
    return BlockHeader(
        block_key=block_key(node.chain, group),
        chain=node.chain,
        parent=node.parent.chain,
        group=group,
        position=node.position,
        token_ids=node.token_ids,
        producer=node.producer,
        cache=cache.name,
    )


@dataclass(frozen=True)
class Restored:
    """How a restore ended.

    Args:
        num_bytes: bytes of keys and values read.
        seconds: from the start to the last block in place.
        complete: False where a file was missing or wrong (it is in quarantine then, and no longer known).
    """

    num_bytes: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class _Read:
    """What came of a block's file; `extras` is None if that was missing or wrong.

    `data` is the block as the file has it; None where it lies in its slot already.
    """

    load: Load
    extras: Extras | None
    data: Array | None = None


@dataclass
class _Restore:
    """A restore under way."""

    cache: KeptCache
    sequence: CacheSequence
    done: Callable[[Restored], None]
    blocks_due: int
    num_bytes: int = 0
    complete: bool = True
    started_at: float = field(default_factory=time.perf_counter)

    def block_bytes(self, group: int) -> int:
        """Of a full block."""
        return self.cache.prefix.all_groups[group].bytes_per_block


@dataclass(frozen=True)
class _Batch:
    """Blocks of one group, read together, and what their files have to say of themselves."""

    restore: _Restore
    loads: Sequence[Load]
    headers: Sequence[BlockHeader]

    @property
    def group(self) -> int:
        return self.loads[0].group


@dataclass(frozen=True, eq=False)
class _Job:
    """One block, to be read to where it belongs."""

    restore: _Restore
    load: Load
    header: BlockHeader
    place: Place


class Restorer:
    """Carries out the `loads` of sequences. Its methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        is_idle: whether no request computes anything.
    """

    def __init__(
        self,
        caches: KeptCaches,
        store: Store,
        post: Callable[[Callable[[], None]], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._caches = caches
        self._store = store
        self._post = post
        self._is_idle = is_idle
        self._batch_bytes = _BATCH_BYTES if shares_memory() else _UPLOAD_BYTES
        groups = caches.base.prefix.all_groups
        sizes = [group.bytes_per_block for group in groups]
        # Their pages are touched when they are used: an idle process has them for nothing.
        most = max(group.bytes_per_block * self._batch_blocks(group) for group in groups)
        count = max(2, _BUFFERS_BYTES // most)
        self._whole: deque[tuple[_Restore, Load]] = deque()  # full blocks, to be read to where they belong
        self._of_thread = threading.local()
        # What follows is the readers' too, under this lock. A read may be over as soon as it is begun: its callback
        # runs where it was begun then, inside the lock.
        self._lock = threading.RLock()
        self._buffers = [np.frombuffer(mmap.mmap(-1, most), np.uint8) for _ in range(count)]
        self._due: deque[_Batch] = deque()
        self._begun = 0
        readers = READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1
        self._others = readers - 1  # who read beside the engine thread, where that would only wait
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="agentcache-reader")

    def warm_up(self, tables: Sequence[BlockTable]) -> None:
        """Fill base's slots of `tables`, one a group, with made-up blocks, by the way that blocks from files take."""
        base = self._caches.base
        for index, table in enumerate(tables):
            group = base.prefix.groups[index]
            header, at_once = make_header("", group.name, 0, range(BLOCK_SIZE)), self._batch_blocks(group)
            for start in range(0, len(table.block_ids), at_once):
                block_ids = table.block_ids[start : start + at_once]
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
        """Begin no further reads."""
        self._whole.clear()
        with self._lock:
            self._due.clear()

    @property
    def is_reading(self) -> bool:
        """Whether reads are under way."""
        return self._begun > 0

    def close(self) -> None:
        """Wait for the reads under way; no others begin."""
        self.cease()
        self._readers.shutdown(wait=True)

    def restore(self, sequence: CacheSequence, done: Callable[[Restored], None], cache: str = BASE_CACHE) -> None:
        """Bring a sequence's blocks into RAM; `done` gets the outcome later, even if the sequence has ended.

        Args:
            cache: whose the sequence is.
        """
        kept, loads = self._caches.get(cache), sorted(sequence.loads, key=lambda load: load.group)
        restore = _Restore(kept, sequence, done, blocks_due=len(loads))
        self._read_later(restore, [load for load in loads if not load.node.is_full])
        self._whole.extend((restore, load) for load in loads if load.node.is_full)
        if self._whole:
            self._post(self._go_on)
        kept.arenas.fit()  # slots that are new get their memory while the first files are read
        if not loads:
            done(Restored(0, 0.0, complete=True))

    # -- to where they belong -----------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Read some of the full blocks to where they belong; if something is computed now, the others into buffers."""
        taken, num_bytes = list[tuple[_Restore, Load]](), 0
        while self._whole and num_bytes < _MOST_AT_ONCE and self._is_idle():
            restore, load = self._whole.popleft()
            taken.append((restore, load))
            num_bytes += restore.block_bytes(load.group)
        self._read_in_place(_by_group(taken))
        if self._whole and self._is_idle():
            self._post(self._go_on)
            return
        left = _by_group(self._whole)
        self._whole.clear()
        for restore, loads in left:
            self._read_later(restore, loads)

    def _read_in_place(self, groups: Sequence[tuple[_Restore, list[Load]]]) -> None:
        """Publish what is sound of these; nothing else happens on the engine thread meanwhile, which reads too."""
        jobs: list[_Job] = []
        results: dict[_Job, Extras | None] = {}
        try:
            for restore, loads in groups:
                jobs += self._jobs(restore, loads)
            due = deque(jobs)
            count = min(self._others, len(jobs) - 1)
            others = [self._readers.submit(self._read_each, due, results) for _ in range(count)]
            try:
                self._read_each(due, results)
            finally:
                due.clear()
                wait(others)
        finally:
            for job in jobs:
                job.place.let_go()
        for other in others:
            other.result()
        for job in jobs:
            self._settle(job.restore, [_Read(job.load, results[job])])

    def _jobs(self, restore: _Restore, loads: Sequence[Load]) -> list[_Job]:
        """Of blocks of one group. None where they have to be read into buffers, or not at all."""
        if restore.sequence.closed:  # its slots are others' now
            self._end(restore, len(loads))
            return []
        places = restore.cache.arenas.places(loads[0].group, [load.block_id for load in loads])
        if not places:
            self._read_later(restore, loads)
            return []
        return [
            _Job(restore, load, header_of(load.node, load.group, restore.cache), place)
            for load, place in zip(loads, places, strict=True)
        ]

    def _read_each(self, due: deque[_Job], results: dict[_Job, Extras | None]) -> None:
        """Take one after the other, on any of several threads, until there are none left."""
        with self._store.reader() as blocks:
            while True:
                try:
                    job = due.popleft()
                except IndexError:
                    return
                results[job] = self._read_to(blocks, job)

    def _read_to(self, blocks: BlockFolder, job: _Job) -> Extras | None:
        rest = self._scratch(job.place.rest_bytes)
        try:
            extras = blocks.read_apart(job.header, job.place.integers, rest)
        except (BlockMissing, BlockRejected, StoreError):
            return None  # the store has logged and counted it
        job.place.put_rest(rest)
        return extras

    def _scratch(self, size: int) -> Array:
        """Of this thread."""
        buffer: Array | None = getattr(self._of_thread, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self._of_thread.buffer = np.empty(size, np.uint8)
        return buffer[:size]

    # -- into buffers, and from there to where they belong ------------------------------------------------------------

    def _read_later(self, restore: _Restore, loads: Sequence[Load]) -> None:
        """Into buffers, as soon as there are some."""
        batches: list[list[Load]] = []
        for group, same in groupby(loads, key=lambda load: load.group):
            members, size = list(same), self._batch_blocks(restore.cache.prefix.all_groups[group])
            batches += [members[start : start + size] for start in range(0, len(members), size)]
        due = [
            _Batch(restore, each, [header_of(load.node, load.group, restore.cache) for load in each])
            for each in batches
        ]
        with self._lock:
            self._due.extend(due)
            self._begin_reads()

    def _begin_reads(self) -> None:
        """Read what is due, as far as there are buffers. Under the lock, on any thread."""
        while self._due and self._buffers and self._begun < _READS_BEGUN:
            batch, buffer = self._due.popleft(), self._buffers.pop()
            self._begun += 1
            self._readers.submit(self._read, batch, buffer).add_done_callback(partial(self._hand_over, batch, buffer))

    def _read(self, batch: _Batch, buffer: Array) -> list[_Read]:
        """On a reader thread."""
        size = batch.restore.block_bytes(batch.group)
        if size * len(batch.loads) > buffer.nbytes:  # residuals of a rank so high that they are larger than base
            buffer = np.empty(size * len(batch.loads), np.uint8)
        parts = _parts(buffer, size, len(batch.loads))
        blocks = self._store.read_blocks(batch.headers, parts)
        return [
            _Read(load, None) if block is None else _Read(load, block.extras, block.data)
            for load, block in zip(batch.loads, blocks, strict=True)
        ]

    def _hand_over(self, batch: _Batch, buffer: Array, future: Future[list[_Read]]) -> None:
        """On a reader thread."""
        with self._lock:
            self._begun -= 1
            self._begin_reads()
        self._post(lambda: self._take(batch, buffer, future.result()))

    def _take(self, batch: _Batch, buffer: Array, reads: Sequence[_Read]) -> None:
        good = [(read.load.block_id, read.data) for read in reads if read.data is not None]
        if good and not batch.restore.sequence.closed:
            block_ids, blocks = zip(*good, strict=True)
            batch.restore.cache.arenas.put_blocks(batch.group, block_ids, blocks)
        self._settle(batch.restore, reads)
        with self._lock:
            self._buffers.append(buffer)
            self._begin_reads()

    def _settle(self, restore: _Restore, reads: Sequence[_Read]) -> None:
        """What has been read lies in its slots."""
        cache = restore.cache
        for read in reads:
            load = read.load
            if read.extras is None:
                cache.prefix.mark_missing(load.node, load.group)
                restore.complete = False
                continue
            restore.num_bytes += cache.spec.all_groups[load.group].bytes_of(load.node.num_tokens)
            if not restore.sequence.closed:
                cache.arenas.put_extras(load.group, load.block_id, load.node.num_tokens, read.extras)
                cache.prefix.loaded(restore.sequence, load)
        self._end(restore, len(reads))

    def _end(self, restore: _Restore, num_blocks: int) -> None:
        """So many of its blocks are no longer due."""
        restore.blocks_due -= num_blocks
        if not restore.blocks_due:
            restore.done(Restored(restore.num_bytes, time.perf_counter() - restore.started_at, restore.complete))


def _by_group(taken: Iterable[tuple[_Restore, Load]]) -> list[tuple[_Restore, list[Load]]]:
    """What follows each other and is of one restore and one group, together."""
    runs = groupby(taken, key=lambda each: (id(each[0]), each[1].group))
    members = [list(run) for _, run in runs]
    return [(run[0][0], [load for _, load in run]) for run in members]


def _parts(buffer: Array, size: int, count: int) -> list[Array]:
    """The first `count` parts of a buffer, of `size` bytes each."""
    return [buffer[start : start + size] for start in range(0, count * size, size)]

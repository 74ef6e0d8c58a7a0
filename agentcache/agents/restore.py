"""From disk into RAM: reader threads read and verify files, and only verified bytes come to the engine thread.

There are buffers, each for the blocks of one batch. A batch is read once there is one for it, verified where it lies
there, and copied to its slots by the engine thread between two steps; meanwhile the next ones are being read. So no
memory is new but the slots, however much is restored, and slots are not touched before their bytes are sound.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE, block_key
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence, Load
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.arena import shares_memory
from agentcache.kv.block_layout import Array
from agentcache.models.runner import ModelRunner
from agentcache.store.block_file import BlockHeader, make_header
from agentcache.store.store import Store

_READERS = 4
_LARGE_BLOCK_BYTES = 1 << 20  # smaller ones are mostly Python: a second thread would only be in the way
_READS_BEGUN = _READERS + 2  # so that a reader that is done finds its next batch
# All buffers: what is read while a step keeps the engine thread busy, and what it copies before the next one. Those
# used last are used next: beside an idle engine a few do, and stay in the processor's caches.
_BUFFERS_BYTES = 64 << 20
_BATCH_BLOCKS = 16  # blocks that are put into their slots at once
# A processor's caches hold all buffers. Where bytes are uploaded, fewer and larger transfers are better.
_BATCH_BYTES, _UPLOAD_BYTES = 2 << 20, 16 << 20


def header_of(node: Node, group: str) -> BlockHeader:
    """What the file of `group`'s part of a node has to say of itself."""
    assert node.parent is not None
    return BlockHeader(
        block_key=block_key(node.chain, group),
        chain=node.chain,
        parent=node.parent.chain,
        group=group,
        position=node.position,
        token_ids=node.token_ids,
        producer=node.producer,
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
    """One block's bytes, uint8 [n]; None if its file was missing or wrong."""

    load: Load
    data: Array | None


@dataclass
class _Restore:
    """A restore under way."""

    sequence: CacheSequence
    done: Callable[[Restored], None]
    batches_due: int
    num_bytes: int = 0
    complete: bool = True
    started_at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class _Batch:
    """Blocks of one group, read together, and what their files have to say of themselves."""

    restore: _Restore
    loads: Sequence[Load]
    headers: Sequence[BlockHeader]


class Restorer:
    """Carries out the `loads` of sequences. Its methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
    """

    def __init__(
        self, cache: PrefixCache, runner: ModelRunner, store: Store, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._store = store
        self._post = post
        self._groups = cache.all_groups
        sizes = [group.bytes_per_block for group in self._groups]
        batch_bytes = _BATCH_BYTES if shares_memory() else _UPLOAD_BYTES
        self._batch_blocks = [max(1, min(_BATCH_BLOCKS, batch_bytes // size)) for size in sizes]
        # Their pages are touched when they are used: an idle process has them for nothing.
        most = max(size * count for size, count in zip(sizes, self._batch_blocks, strict=True))
        count = max(2, _BUFFERS_BYTES // most)
        # What follows is the readers' too, under this lock. A read may be over as soon as it is begun: its callback
        # runs where it was begun then, inside the lock.
        self._lock = threading.RLock()
        self._buffers = [np.frombuffer(mmap.mmap(-1, most), np.uint8) for _ in range(count)]
        self._due: deque[_Batch] = deque()
        self._begun = 0
        self._readers = ThreadPoolExecutor(
            _READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1, thread_name_prefix="agentcache-reader"
        )

    def warm_up(self, tables: Sequence[BlockTable]) -> None:
        """Fill the slots of `tables`, one a group, with made-up blocks, by the way that blocks from files take."""
        for index, table in enumerate(tables):
            header = make_header("", self._cache.groups[index].name, 0, range(BLOCK_SIZE))
            for start in range(0, len(table.block_ids), self._batch_blocks[index]):
                block_ids = table.block_ids[start : start + self._batch_blocks[index]]
                buffer = self._buffers[-1 - start // self._batch_blocks[index] % _READS_BEGUN % len(self._buffers)]
                reads = [
                    self._readers.submit(self._store.decode_zeros, header, part)
                    for part in self._parts(buffer, index, len(block_ids))
                ]
                self._runner.put_blocks(index, block_ids, [read.result() for read in reads])
        self._runner.evaluate()

    def close(self) -> None:
        """Wait for the reads under way; no others begin."""
        with self._lock:
            self._due.clear()
        self._readers.shutdown(wait=True)

    def restore(self, sequence: CacheSequence, done: Callable[[Restored], None]) -> None:
        """Bring a sequence's blocks into RAM; `done` gets the outcome later, even if the sequence has ended."""
        batches = list(self._batches(sequence.loads))
        restore = _Restore(sequence, done, batches_due=len(batches))
        with self._lock:
            self._due.extend(_Batch(restore, loads, list(map(self._header, loads))) for loads in batches)
            self._begin_reads()
        self._runner.fit()  # slots that are new get their memory while the first files are read
        if not batches:
            done(Restored(0, 0.0, complete=True))

    def _header(self, load: Load) -> BlockHeader:
        return header_of(load.node, self._groups[load.group].name)

    def _batches(self, loads: Sequence[Load]) -> Iterator[list[Load]]:
        for group, same in groupby(sorted(loads, key=lambda load: load.group), key=lambda load: load.group):
            members, size = list(same), self._batch_blocks[group]
            yield from (members[start : start + size] for start in range(0, len(members), size))

    def _begin_reads(self) -> None:
        """Read what is due, as far as there are buffers. Under the lock, on any thread."""
        while self._due and self._buffers and self._begun < _READS_BEGUN:
            batch, buffer = self._due.popleft(), self._buffers.pop()
            self._begun += 1
            self._readers.submit(self._read, batch, buffer).add_done_callback(partial(self._hand_over, batch, buffer))

    def _parts(self, buffer: Array, group: int, count: int) -> list[Array]:
        """The first parts of a buffer, a block's room each."""
        size = self._groups[group].bytes_per_block
        return [buffer[start : start + size] for start in range(0, count * size, size)]

    def _read(self, batch: _Batch, buffer: Array) -> list[_Read]:
        """On a reader thread."""
        parts = self._parts(buffer, batch.loads[0].group, len(batch.loads))
        return [
            _Read(load, self._read_one(header, part))
            for load, header, part in zip(batch.loads, batch.headers, parts, strict=True)
        ]

    def _read_one(self, header: BlockHeader, part: Array) -> Array | None:
        try:
            return self._store.read_block(header, part).data
        except (BlockMissing, BlockRejected, StoreError):
            return None  # the store has logged and counted it

    def _hand_over(self, batch: _Batch, buffer: Array, future: Future[list[_Read]]) -> None:
        """On a reader thread."""
        with self._lock:
            self._begun -= 1
            self._begin_reads()
        self._post(lambda: self._take(batch, buffer, future.result()))

    def _take(self, batch: _Batch, buffer: Array, reads: Sequence[_Read]) -> None:
        self._put(batch.restore, reads)
        with self._lock:
            self._buffers.append(buffer)
            self._begin_reads()

    def _put(self, restore: _Restore, reads: Sequence[_Read]) -> None:
        good = [(read.load, read.data) for read in reads if read.data is not None]
        for read in reads:
            if read.data is None:
                self._cache.mark_missing(read.load.node, read.load.group)
                restore.complete = False
        if good and not restore.sequence.closed:
            self._put_into_arena(restore.sequence, good)
        restore.num_bytes += sum(data.nbytes for _, data in good)
        restore.batches_due -= 1
        if not restore.batches_due:
            restore.done(Restored(restore.num_bytes, time.perf_counter() - restore.started_at, restore.complete))

    def _put_into_arena(self, sequence: CacheSequence, blocks: Sequence[tuple[Load, Array]]) -> None:
        group = blocks[0][0].group
        self._runner.put_blocks(group, [load.block_id for load, _ in blocks], [data for _, data in blocks])
        for load, _ in blocks:
            self._cache.loaded(sequence, load)

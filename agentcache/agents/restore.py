"""From disk into RAM: reader threads read and verify files, and only verified bytes come to the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from agentcache.blocks.keys import BLOCK_SIZE, block_key
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import Load
from agentcache.blocks.sequence import Sequence as CacheSequence
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.block_layout import Array
from agentcache.models.runner import ModelRunner
from agentcache.store.block_file import BlockHeader, make_header
from agentcache.store.store import Store

_READERS = 4
_LARGE_BLOCK_BYTES = 1 << 20  # smaller ones are mostly Python: a second thread would only be in the way
_BATCH_BLOCKS = 16  # blocks that are put into the arena at once: fewer, larger writes
_BATCH_BYTES = 32 << 20


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
        large = max(group.bytes_per_block for group in self._groups) >= _LARGE_BLOCK_BYTES
        self._readers = ThreadPoolExecutor(_READERS if large else 1, thread_name_prefix="agentcache-reader")

    def warm_up(self, tables: Sequence[BlockTable]) -> None:
        """Fill the slots of `tables`, one a group, with made-up blocks, by the way that blocks from files take."""
        for index, table in enumerate(tables):
            header = make_header("", self._cache.groups[index].name, 0, range(BLOCK_SIZE))
            blocks = self._readers.submit(self._store.decode_zeros, header, len(table.block_ids)).result()
            self._runner.put_blocks(index, table.block_ids, blocks)
        self._runner.evaluate()

    def close(self) -> None:
        """Wait for the reads under way."""
        self._readers.shutdown(wait=True)

    def restore(self, sequence: CacheSequence, done: Callable[[Restored], None]) -> None:
        """Bring a sequence's blocks into RAM; `done` gets the outcome later, even if the sequence has ended."""
        batches = list(self._batches(sequence.loads))
        restore = _Restore(sequence, done, batches_due=len(batches))
        for batch in batches:
            headers = [header_of(load.node, self._groups[load.group].name) for load in batch]
            future = self._readers.submit(self._read, batch, headers)
            future.add_done_callback(partial(self._hand_over, restore))
        if not batches:
            done(Restored(0, 0.0, complete=True))

    def _batches(self, loads: Sequence[Load]) -> Iterator[list[Load]]:
        for group, same in groupby(sorted(loads, key=lambda load: load.group), key=lambda load: load.group):
            members = list(same)
            size = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._groups[group].bytes_per_block))
            yield from (members[start : start + size] for start in range(0, len(members), size))

    def _read(self, batch: Sequence[Load], headers: Sequence[BlockHeader]) -> list[_Read]:
        """On a reader thread."""
        return [_Read(load, self._read_one(header)) for load, header in zip(batch, headers, strict=True)]

    def _read_one(self, header: BlockHeader) -> Array | None:
        try:
            return self._store.read_block(header).data
        except (BlockMissing, BlockRejected, StoreError):
            return None  # the store has logged and counted it

    def _hand_over(self, restore: _Restore, future: Future[list[_Read]]) -> None:
        """On a reader thread."""
        self._post(lambda: self._put(restore, future.result()))

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

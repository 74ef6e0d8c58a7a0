"""Restores blocks from disk into RAM. Only verified blocks are published.

While no request computes, the readers and the engine thread read full blocks into their slots (`reads_in_place`).
Otherwise blocks go through buffers (`buffered_reads`). So do partly filled blocks, and all blocks if the host cannot
write device memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from agentcache.agents.buffered_reads import BufferedReads
from agentcache.agents.caches import KeptCaches
from agentcache.agents.reads_in_place import Job, ReadsInPlace
from agentcache.agents.restoring import Restored, Restoring
from agentcache.blocks.block_tables import BlockTables, Load
from agentcache.blocks.keys import BASE_CACHE
from agentcache.kv.block_layout import GroupMemory
from agentcache.store.store import Store

READERS = min(4, os.cpu_count() or 4)  # more evict each other's files from the processor's caches
_LARGE_BLOCK_BYTES = 1 << 20  # below, a second thread only competes for the GIL
_READS_BEGUN = READERS + 2  # so that each reader finds its next batch
# Minimum seconds to read before the inbox is checked. Resuming is slow: tensors are located again.
_LEAST_AT_ONCE = 0.02


class Restorer:
    """Carries out the `loads` of block tables. Engine thread only.

    Args:
        post: schedules a callback on the engine thread; callable from any thread.
        is_idle: whether no request computes.
        is_awaited: whether the engine thread has messages.
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
        self._whole: deque[tuple[Restoring, Load]] = deque()  # full blocks, to be read in place
        sizes = [group.bytes_per_block for group in caches.base.prefix.all_groups]
        readers = READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="agentcache-reader")
        self._in_place = ReadsInPlace(store, self._readers, readers - 1)
        self.buffered = BufferedReads(caches.base, store, self._readers, _READS_BEGUN, post)

    def cease(self) -> None:
        self._whole.clear()
        self.buffered.cease()

    @property
    def is_reading(self) -> bool:
        return self.buffered.are_under_way

    def close(self) -> None:
        """Wait for running reads; start no further ones."""
        self.cease()
        self._readers.shutdown(wait=True)

    def restore(self, sequence: BlockTables, done: Callable[[Restored], None], cache: str = BASE_CACHE) -> None:
        """Load a sequence's blocks into RAM. `done` gets the outcome later, even if the sequence has ended."""
        kept, loads = self._caches.get(cache), sorted(sequence.loads, key=lambda load: load.group)
        restore = Restoring(kept, sequence, done, blocks_due=len(loads))
        self.buffered.read(restore, [load for load in loads if not load.node.is_full])
        self._whole.extend((restore, load) for load in loads if load.node.is_full)
        if self._whole:
            self._post(self._go_on)
        kept.arenas.fit()  # allocate new slots during the first reads
        if not loads:
            done(Restored(0, 0.0, complete=True))

    def _go_on(self) -> None:
        """Read in place for a while; once a request computes, use buffers."""
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
        """Called before readers start: MLX releases the GIL per tensor and would wait to get it back."""
        awaited = ((restore.cache, load) for restore, load in self._whole if not restore.sequence.closed)
        due = {(cache.name, load.group): cache for cache, load in awaited}
        return {(name, group): cache.arenas.memory(group) for (name, group), cache in due.items()}

    def _jobs(
        self, memories: Mapping[tuple[str, int], GroupMemory | None], others: list[tuple[Restoring, Load]]
    ) -> Iterator[Job]:
        """Yield jobs for queued blocks, until time is up and a message waits.

        `others` receives blocks of closed sequences or without a place.
        """
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


def _by_group(taken: Iterable[tuple[Restoring, Load]]) -> list[tuple[Restoring, list[Load]]]:
    runs = groupby(taken, key=lambda each: (id(each[0]), each[1].group))
    members = [list(run) for _, run in runs]
    return [(run[0][0], [load for _, load in run]) for run in members]

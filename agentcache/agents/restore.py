"""From disk into RAM: block files are read and verified, and only verified blocks are published.

While nothing is computed, files are read to where their blocks belong in the arenas, and verified there
(`reads_in_place`). Nobody reads these slots until they are published, and the engine thread, which would only wait
meanwhile, works with the readers: for some ms, and on until something else has come for it.

Beside requests that compute, blocks are read into buffers (`buffered_reads`). So are blocks that are not full, and all
where the device's memory is not ours.
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
from agentcache.blocks.keys import BASE_CACHE
from agentcache.blocks.sequence import CacheSequence, Load
from agentcache.kv.block_layout import GroupMemory
from agentcache.store.store import Store

READERS = min(4, os.cpu_count() or 4)  # more would only push each other's files out of the processor's caches
_LARGE_BLOCK_BYTES = 1 << 20  # smaller ones are mostly Python: a second thread would only be in the way
_READS_BEGUN = READERS + 2  # so that a reader that is done finds its next batch
# Seconds for which the engine thread begins reads whatever has come: to stop and to go on takes time, as it then
# finds out anew where each tensor lies.
_LEAST_AT_ONCE = 0.02


class Restorer:
    """Carries out the `loads` of sequences. Its methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        is_idle: whether no request computes anything.
        is_awaited: whether something has come for the engine thread to do.

    Attributes:
        buffered: what reads while something is computed.
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
        self._whole: deque[tuple[Restoring, Load]] = deque()  # full blocks, to be read to where they belong
        sizes = [group.bytes_per_block for group in caches.base.prefix.all_groups]
        readers = READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="agentcache-reader")
        # One less: the engine thread reads beside them, where it would only wait.
        self._in_place = ReadsInPlace(store, self._readers, readers - 1)
        self.buffered = BufferedReads(caches.base, store, self._readers, _READS_BEGUN, post)

    def cease(self) -> None:
        """Begin no further reads."""
        self._whole.clear()
        self.buffered.cease()

    @property
    def is_reading(self) -> bool:
        """Whether reads are under way."""
        return self.buffered.are_under_way

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
        restore = Restoring(kept, sequence, done, blocks_due=len(loads))
        self.buffered.read(restore, [load for load in loads if not load.node.is_full])
        self._whole.extend((restore, load) for load in loads if load.node.is_full)
        if self._whole:
            self._post(self._go_on)
        kept.arenas.fit()  # slots that are new get their memory while the first files are read
        if not loads:
            done(Restored(0, 0.0, complete=True))

    # -- to where they belong -----------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Read full blocks to where they belong, for a while; if something is computed now, all into buffers."""
        reads = self._whole and self._is_idle() and self._read_in_place()
        if reads and self._whole and self._is_idle():
            self._post(self._go_on)
            return
        left = _by_group(self._whole)
        self._whole.clear()
        for restore, loads in left:
            self.buffered.read(restore, loads)

    def _read_in_place(self) -> bool:
        """Publish what is sound of the next blocks; nothing else happens on the engine thread meanwhile.

        Returns whether any was read, or given to other readers.
        """
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
            restore.settle([read])
        return bool(others or ended)

    def _memories(self) -> dict[tuple[str, int], GroupMemory | None]:
        """Of each cache's groups that blocks are due of.

        Before any thread reads: MLX lets go of Python's lock for every tensor, and gets it back when another has
        nothing more to do with it.
        """
        awaited = ((restore.cache, load) for restore, load in self._whole if not restore.sequence.closed)
        due = {(cache.name, load.group): cache for cache, load in awaited}
        return {(name, group): cache.arenas.memory(group) for (name, group), cache in due.items()}

    def _jobs(
        self, memories: Mapping[tuple[str, int], GroupMemory | None], others: list[tuple[Restoring, Load]]
    ) -> Iterator[Job]:
        """Of the next blocks that are due, for a while.

        Args:
            others: gets blocks that have no places, or nobody who waits for them.
        """
        may_end_at = time.perf_counter() + _LEAST_AT_ONCE
        while self._whole:
            restore, load = self._whole.popleft()
            memory = memories.get((restore.cache.name, load.group))
            if memory is not None and not restore.sequence.closed:  # or its slots are others' now
                yield Job(restore, load, memory.place(load.block_id))
            else:
                others.append((restore, load))
            if time.perf_counter() >= may_end_at and self._is_awaited():
                return


def _by_group(taken: Iterable[tuple[Restoring, Load]]) -> list[tuple[Restoring, list[Load]]]:
    """What follows each other and is of one restore and one group, together."""
    runs = groupby(taken, key=lambda each: (id(each[0]), each[1].group))
    members = [list(run) for _, run in runs]
    return [(run[0][0], [load for _, load in run]) for run in members]

"""From disk into RAM: reader threads read and verify files, and only verified blocks are published.

While nothing is computed, files are read to where their blocks belong in the arenas, and verified there: each byte is
moved once. Nobody reads these slots until they are published, and the engine thread, which would only wait meanwhile,
reads with the readers: a few files at a time, after which it sees to what else has come.

Beside requests that compute, blocks are read into buffers (`buffered_reads`). So are blocks that are not full, and all
where the device's memory is not ours.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from agentcache.agents.buffered_reads import BufferedReads
from agentcache.agents.caches import KeptCaches
from agentcache.agents.restoring import Read, Restored, Restoring
from agentcache.blocks.keys import BASE_CACHE
from agentcache.blocks.sequence import CacheSequence, Load
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.block_layout import Array, Place
from agentcache.store.block_extras import Extras
from agentcache.store.block_file import BlockHeader
from agentcache.store.block_folder import BlockFolder
from agentcache.store.store import Store

READERS = min(4, os.cpu_count() or 4)  # more would only push each other's files out of the processor's caches
_LARGE_BLOCK_BYTES = 1 << 20  # smaller ones are mostly Python: a second thread would only be in the way
_READS_BEGUN = READERS + 2  # so that a reader that is done finds its next batch
# What the engine thread waits for at a time: some 5 ms of a fast disk.
_MOST_AT_ONCE = 32 << 20


@dataclass(frozen=True, eq=False)
class _Job:
    """One block, to be read to where it belongs."""

    restore: Restoring
    load: Load
    header: BlockHeader
    place: Place


class Restorer:
    """Carries out the `loads` of sequences. Its methods belong to the engine thread.

    Args:
        post: runs a function on the engine thread soon; callable from any thread.
        is_idle: whether no request computes anything.

    Attributes:
        buffered: what reads while something is computed.
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
        self._whole: deque[tuple[Restoring, Load]] = deque()  # full blocks, to be read to where they belong
        self._of_thread = threading.local()
        sizes = [group.bytes_per_block for group in caches.base.prefix.all_groups]
        readers = READERS if max(sizes) >= _LARGE_BLOCK_BYTES else 1
        self._others = readers - 1  # who read beside the engine thread, where that would only wait
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="agentcache-reader")
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
        """Read some of the full blocks to where they belong; if something is computed now, the others into buffers."""
        taken, num_bytes = list[tuple[Restoring, Load]](), 0
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
            self.buffered.read(restore, loads)

    def _read_in_place(self, groups: Sequence[tuple[Restoring, list[Load]]]) -> None:
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
            job.restore.settle([Read(job.load, results[job])])

    def _jobs(self, restore: Restoring, loads: Sequence[Load]) -> list[_Job]:
        """Of blocks of one group. None where they have to be read into buffers, or not at all."""
        if restore.sequence.closed:  # its slots are others' now
            restore.drop(len(loads))
            return []
        places = restore.cache.arenas.places(loads[0].group, [load.block_id for load in loads])
        if not places:
            self.buffered.read(restore, loads)
            return []
        return [_Job(restore, load, restore.header(load), place) for load, place in zip(loads, places, strict=True)]

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


def _by_group(taken: Iterable[tuple[Restoring, Load]]) -> list[tuple[Restoring, list[Load]]]:
    """What follows each other and is of one restore and one group, together."""
    runs = groupby(taken, key=lambda each: (id(each[0]), each[1].group))
    members = [list(run) for _, run in runs]
    return [(run[0][0], [load for _, load in run]) for run in members]

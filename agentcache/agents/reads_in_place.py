"""Blocks read from files to where they belong in the arenas: each byte is moved once.

Reader threads do nothing but read. The engine thread, which would only wait meanwhile, opens files for them and
verifies what they have read; while there is nothing to verify, it reads too. So bytes are moved and verified side by
side, and the two seldom ask for Python's lock at once: a file is opened and verified in thirty calls, and read in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from agentcache.agents.restoring import Read, Restoring
from agentcache.blocks.sequence import Load
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.block_layout import Array, Place
from agentcache.store.block_folder import BlockFolder, BlockReading
from agentcache.store.store import Store


@dataclass(frozen=True, eq=False)
class Job:
    """One block, to be read to where it belongs."""

    restore: Restoring
    load: Load
    place: Place


@dataclass(frozen=True, eq=False)
class _Opened:
    """A job whose file is open.

    Args:
        rest: what must not come to its place before it has been verified.
    """

    job: Job
    reading: BlockReading
    rest: Array


class ReadsInPlace:
    """Carries out jobs while nothing else happens on the engine thread, which all of this is for but `_fill_each`.

    Args:
        readers: its threads read files.
        count: how many of them.
    """

    def __init__(self, store: Store, readers: Executor, count: int) -> None:
        self._store = store
        self._readers = readers
        self._count = count
        # For each reader a file that it reads, the next one, and one that it has read; one for the engine thread.
        self._most_open = 3 * count + 1
        self._waiting: deque[Job] = deque()
        self._opened: set[_Opened] = set()
        self._due: SimpleQueue[_Opened | None] = SimpleQueue()
        self._filled: SimpleQueue[_Opened] = SimpleQueue()
        self._rests: list[Array] = []  # not in use; each was touched before, and may still be in the processor's caches

    def carry_out(self, take: Callable[[], Sequence[Job]]) -> list[tuple[Restoring, Read]]:
        """Carry out the jobs that `take` gives until it gives none; what came of them.

        Nobody touches their places when this returns.
        """
        readers = [self._readers.submit(self._fill_each) for _ in range(self._count)]
        try:
            with self._store.reader() as blocks:
                return self._work(blocks, take)
        finally:
            self._dismiss(readers)
            self._let_go()

    def _work(self, blocks: BlockFolder, take: Callable[[], Sequence[Job]]) -> list[tuple[Restoring, Read]]:
        ended: list[tuple[Restoring, Read]] = []
        may_be_more = True
        while True:
            if may_be_more and len(self._waiting) < self._most_open:
                jobs = take()
                self._waiting.extend(jobs)
                may_be_more = bool(jobs)
            while self._waiting and len(self._opened) < self._most_open:
                job = self._waiting[0]
                if not self._open(blocks, job):
                    ended.append((job.restore, Read(job.load, None)))
                self._waiting.popleft()
            if self._opened:
                opened = self._next()
                ended.append((opened.job.restore, self._end(opened)))
            elif not self._waiting and not may_be_more:
                return ended

    def _open(self, blocks: BlockFolder, job: Job) -> bool:
        """Whether there is a file, for whoever comes first to read it."""
        size = job.place.rest_bytes
        rest = self._rests.pop() if self._rests else np.empty(size, np.uint8)
        if rest.nbytes < size:
            rest = np.empty(size, np.uint8)
        try:
            reading = blocks.open_block(job.restore.header(job.load), job.place.integers, rest[:size])
        except (BlockMissing, BlockRejected, StoreError):  # the store has logged and counted it
            job.place.let_go()
            return False
        opened = _Opened(job, reading, rest)
        self._opened.add(opened)
        self._due.put(opened)
        return True

    def _next(self) -> _Opened:
        """One whose file has been read."""
        with suppress(Empty):
            return self._filled.get_nowait()
        with suppress(Empty):
            opened = self._due.get_nowait()
            assert opened is not None
            opened.reading.fill()
            return opened
        return self._filled.get()

    def _end(self, opened: _Opened) -> Read:
        """Verify it, and let go of its place."""
        job = opened.job
        self._opened.remove(opened)
        try:
            extras = opened.reading.verify()
            job.place.put_rest(opened.rest)
        except BlockRejected:
            extras = None
        finally:
            job.place.let_go()
        self._rests.append(opened.rest)
        return Read(job.load, extras)

    def _fill_each(self) -> None:
        """On a reader thread: one after the other, until nothing is to come any more."""
        while (opened := self._due.get()) is not None:
            opened.reading.fill()
            self._filled.put(opened)

    def _dismiss(self, readers: Sequence[Future[None]]) -> None:
        """They read nothing more, and those that have yet to begin do not."""
        with suppress(Empty):
            while True:
                self._due.get_nowait()
        for reader in readers:
            self._due.put(None)
            reader.cancel()
        wait(readers)
        self._due, self._filled = SimpleQueue(), SimpleQueue()

    def _let_go(self) -> None:
        """Of what has not ended: there is something only where an error has."""
        for opened in self._opened:
            opened.reading.close()
        for job in (*self._waiting, *(opened.job for opened in self._opened)):
            job.place.let_go()
        self._waiting.clear()
        self._opened.clear()

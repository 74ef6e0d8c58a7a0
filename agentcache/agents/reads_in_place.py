"""Blocks read from files to where they belong in the arenas: each byte is moved once.

The engine thread, which would only wait meanwhile, does as the reader threads do: it takes the next block, reads its
file and verifies it, while that is still in the processor's caches. It alone says which block is next.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from agentcache.agents.processors import kept_to, share_processors
from agentcache.agents.restoring import Read, Restoring
from agentcache.blocks.sequence import Load
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.block_layout import Place, RestBuffer
from agentcache.store.block_folder import BlockFolder
from agentcache.store.store import Store

log = logging.getLogger("agentcache.restore")

_AHEAD = 2  # jobs for each reader that wait for it while the engine thread reads one


@dataclass(frozen=True, eq=False)
class Job:
    """One block, to be read to where it belongs."""

    restore: Restoring
    load: Load
    place: Place


class ReadsInPlace:
    """Carries out jobs while nothing else happens on the engine thread.

    Args:
        readers: its threads read files.
        count: how many of them.
    """

    def __init__(self, store: Store, readers: Executor, count: int) -> None:
        self._store = store
        self._readers = readers
        self._count = count
        self._due: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: list[tuple[Restoring, Read]] = []
        self._buffers: list[RestBuffer] = []  # not in use; touched before, they may be in the processor's caches

    def carry_out(self, jobs: Iterable[Job]) -> list[tuple[Restoring, Read]]:
        """Carry out the jobs, which are asked for as they are needed, on this thread; what came of them.

        No thread touches their places when this returns. A failure is logged, and what it kept from being read counts
        as missing; jobs that were not asked for are as before.
        """
        self._ended = []
        own, others = share_processors(self._count)
        readers: list[Future[None]] = []
        try:
            readers += [self._readers.submit(self._read_all, others) for _ in range(self._count)]
            with kept_to(own), self._store.reader() as blocks:
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
                log.error("a reader has failed", exc_info=error)  # this thread has read what was left
        return self._ended

    def _read_next(self, blocks: BlockFolder) -> bool:
        """Whether there was one."""
        with suppress(Empty):
            job = self._due.get_nowait()
            assert job is not None
            self._read(blocks, job)
            return True
        return False

    def _read_all(self, processors: Collection[int]) -> None:
        """On a reader thread: one after the other, until nothing is to come any more."""
        with kept_to(processors), self._store.reader() as blocks:
            while (job := self._due.get()) is not None:
                self._read(blocks, job)

    def _read(self, blocks: BlockFolder, job: Job) -> None:
        """Bring the block to its place, verified, and let go of that."""
        rest, extras = None, None
        try:
            rest = self._buffer(job.place.rest_sizes)
            extras = blocks.read_apart(job.restore.header(job.load), job.place.integers, rest.data)
            job.place.put_rest(rest)
            self._buffers.append(rest)
        except (BlockMissing, BlockRejected, StoreError):  # the store has logged and counted it
            pass
        except BaseException:  # a block that cannot be read is computed
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
        """They read nothing more, and those that have yet to begin do not."""
        with suppress(Empty):
            while (job := self._due.get_nowait()) is not None:  # there is one only where an error has come before it
                job.place.let_go()
                self._ended.append((job.restore, Read(job.load, None)))
        for reader in readers:
            self._due.put(None)
            reader.cancel()
        wait(readers)
        self._due = SimpleQueue()

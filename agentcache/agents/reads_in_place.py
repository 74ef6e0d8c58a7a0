"""Reads blocks directly into the arenas, so that each byte is moved once.

The engine thread reads and verifies as the readers do. It alone chooses the next block.
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
from agentcache.blocks.block_tables import Load
from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.kv.block_layout import Place, RestBuffer
from agentcache.store.block_folder import BlockFolder
from agentcache.store.store import Store

log = logging.getLogger("agentcache.restore")

_AHEAD = 2  # queued jobs per reader before the engine thread reads one


@dataclass(frozen=True, eq=False)
class Job:
    restore: Restoring
    load: Load
    place: Place


class ReadsInPlace:
    """Runs read jobs while the engine thread does nothing else. `count`: threads of `readers`."""

    def __init__(self, store: Store, readers: Executor, count: int) -> None:
        self._store = store
        self._readers = readers
        self._count = count
        self._due: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: list[tuple[Restoring, Read]] = []
        self._buffers: list[RestBuffer] = []  # free ones, likely in the processor's caches

    def carry_out(self, jobs: Iterable[Job]) -> list[tuple[Restoring, Read]]:
        """Carry out jobs, taken lazily, on this thread and the readers.

        Afterwards no thread touches their places. Failed blocks count as missing.
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
                log.error("a reader has failed", exc_info=error)  # this thread has read the rest
        return self._ended

    def _read_next(self, blocks: BlockFolder) -> bool:
        with suppress(Empty):
            job = self._due.get_nowait()
            assert job is not None
            self._read(blocks, job)
            return True
        return False

    def _read_all(self, processors: Collection[int]) -> None:
        """Runs on a reader thread."""
        with kept_to(processors), self._store.reader() as blocks:
            while (job := self._due.get()) is not None:
                self._read(blocks, job)

    def _read(self, blocks: BlockFolder, job: Job) -> None:
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

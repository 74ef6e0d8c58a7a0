"""Two ranks as two threads, with a wire between them: only the transport is not MLX's. Both ranks' files are real."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from agentcache.blocks.keys import Namespace
from agentcache.errors import RankLost
from agentcache.ranks.rank_zero import RankZeroStore, RemoteHandles
from agentcache.ranks.worker import Worker
from agentcache.ranks.worker_link import WorkerLink
from agentcache.store.store import BlockWrite, Store
from tests.store.store_cases import BUDGET, MODEL, SPEC, make_block, make_data

SPECS = [replace(SPEC, rank=f"{rank} of 2") for rank in range(2)]
ROOT = Namespace(MODEL, SPECS[0].digest).root
SECONDS = 60.0
NOTHING_COMPUTES = SimpleNamespace(wait=lambda: None)


class ThreadWire:
    """What `Wire` is between processes, between two threads."""

    def __init__(self) -> None:
        self.size, self.messages, self.rank = 2, 0, 0
        self._barrier = threading.Barrier(2, timeout=SECONDS)
        self._said = [b"", b""]

    def of_follower(self) -> ThreadWire:
        other = ThreadWire()
        other.rank, other._barrier, other._said = 1, self._barrier, self._said
        return other

    def exchange(self, own: bytes) -> list[bytes]:
        self.messages += 1
        try:
            self._said[self.rank] = own
            self._barrier.wait()
            heard = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("another process is gone") from error
        return heard

    def cut(self) -> None:
        """A rank is gone."""
        self._barrier.abort()


@dataclass
class TwoRanks:
    """Rank 0's store and what belongs to it; this thread is its writer, readers and all that asks."""

    folder: Path
    wire: ThreadWire = field(default_factory=ThreadWire)
    posted: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    lost: list[RankLost] = field(default_factory=list)
    patience: float = SECONDS
    budget: int | None = BUDGET
    when_lost: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        theirs = Store(self.folder / "rank-1-of-2", SPECS[1], MODEL, disk_budget=BUDGET)
        self.follower = Worker(self.wire.of_follower(), None, NOTHING_COMPUTES, [], theirs)  # type: ignore[arg-type]
        self.following = threading.Thread(target=self._follow)
        self.following.start()
        self.link = WorkerLink(self.wire, self.posted.put, self.lost.append, self.patience)  # type: ignore[arg-type]
        self.handles = RemoteHandles(self.link)
        self.store = RankZeroStore(
            self.folder / "rank-0-of-2",
            SPECS[0],
            MODEL,
            disk_budget=self.budget,
            when_lost=lambda: self.when_lost(),
            link=self.link,
            handles=self.handles,
        )
        self.engine = threading.Thread(target=self._run_posted)
        self.engine.start()

    def _follow(self) -> None:
        try:
            self.follower.run()
        except RankLost:
            return
        finally:
            self.follower.close()

    def _run_posted(self) -> None:
        while (function := self.posted.get(timeout=SECONDS)) is not None:
            try:
                function()
            except RankLost:
                return

    def block(self, first: int, **fields: int) -> BlockWrite:
        """A block of rank 0, of which rank 1 has its part in RAM."""
        block = make_block((first, 2, 3), parent=ROOT, **fields)
        self.hold(block)
        return block

    def hold(self, block: BlockWrite) -> None:
        """Give rank 1 its part of a block."""
        handle = self.handles.new()
        self.handles.bind(block.data, handle)
        self.follower._held[handle] = make_data(SPECS[1], block.header, seed=7)

    def path(self, rank: int, block: BlockWrite) -> Path:
        key = block.header.block_key
        return self.folder / f"rank-{rank}-of-2" / "blocks" / key[:2] / f"{key}.safetensors"

    def close(self) -> None:
        self.posted.put(None)
        self.engine.join()
        self.store.close()
        self.following.join()

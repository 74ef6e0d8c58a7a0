from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from agentcache.blocks.keys import BlockName

T = TypeVar("T")


class Pins:
    """Thread-safe pins that keep files of lineages in use, and blocks of unsaved turns, on disk.

    The engine thread pins and unpins. The writer thread reads pins, unpins a finished job's blocks, and pins lineages
    that it has read again.
    """

    def __init__(self) -> None:
        self._lineages: Counter[str] = Counter()
        self._blocks: Counter[BlockName] = Counter()
        self._lock = threading.Lock()

    def pin_lineage(self, name: str) -> None:
        """Pin a lineage, which need not exist yet."""
        with self._lock:
            self._lineages[name] += 1

    def let_lineage_go(self, name: str) -> None:
        with self._lock:
            subtract(self._lineages, [name])

    def hold_blocks(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._blocks.update(names)

    def let_blocks_go(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            subtract(self._blocks, names)

    @contextmanager
    def holding(self, lineages: Sequence[str] = (), blocks: Sequence[BlockName] = ()) -> Iterator[None]:
        """Pin for a job queued inside, which unpins at its end; an exception unpins at once."""
        for name in lineages:
            self.pin_lineage(name)
        self.hold_blocks(blocks)
        try:
            yield
        except BaseException:
            for name in lineages:
                self.let_lineage_go(name)
            self.let_blocks_go(blocks)
            raise

    def has_lineage(self, name: str) -> bool:
        with self._lock:
            return name in self._lineages

    def has_block(self, name: BlockName) -> bool:
        with self._lock:
            return name in self._blocks

    def lineages(self) -> list[str]:
        with self._lock:
            return list(self._lineages)

    def blocks(self) -> set[BlockName]:
        with self._lock:
            return set(self._blocks)


def subtract(counts: Counter[T], names: Iterable[T]) -> None:
    """Subtract one from each count; drop counts of 0."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]

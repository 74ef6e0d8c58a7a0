"""What has to stay on disk, whatever room is needed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from agentcache.blocks.keys import BlockName

T = TypeVar("T")


class InUse:
    """Lineages that somebody is at work on, and blocks that turns not saved yet count on. Both are counted.

    The engine's thread holds; the writer's thread reads, and lets go of blocks. Every method may be called from both.
    """

    def __init__(self) -> None:
        self._lineages: Counter[str] = Counter()
        self._blocks: Counter[BlockName] = Counter()
        self._lock = threading.Lock()

    def hold_lineage(self, name: str) -> None:
        """Somebody is at work on this lineage, which may be about to be made."""
        with self._lock:
            self._lineages[name] += 1

    def let_lineage_go(self, name: str) -> None:
        """One `hold_lineage` is over."""
        with self._lock:
            subtract(self._lineages, [name])

    def hold_blocks(self, names: Iterable[BlockName]) -> None:
        """A turn that is not saved yet writes these, or counts on them."""
        with self._lock:
            self._blocks.update(names)

    def let_blocks_go(self, names: Iterable[BlockName]) -> None:
        """One `hold_blocks` of these is over."""
        with self._lock:
            subtract(self._blocks, names)

    def has_lineage(self, name: str) -> bool:
        """Whether somebody is at work on it."""
        with self._lock:
            return name in self._lineages

    def has_block(self, name: BlockName) -> bool:
        """Whether some turn counts on it."""
        with self._lock:
            return name in self._blocks

    def lineages(self) -> list[str]:
        """Their names."""
        with self._lock:
            return list(self._lineages)

    def blocks(self) -> set[BlockName]:
        """All that turns count on."""
        with self._lock:
            return set(self._blocks)


def subtract(counts: Counter[T], names: Iterable[T]) -> None:
    """One less of each; what there is none of is not listed."""
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]

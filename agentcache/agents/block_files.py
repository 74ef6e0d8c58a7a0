"""Keys and sizes of block files, and pins that keep them on disk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, BlockName, block_key
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.kv.spec import CacheSpec, GroupSpec
from agentcache.store.manifest import AgentRecord, ResidualBlocks
from agentcache.store.store import Store

T = TypeVar("T")


class Pins:
    """Keeps files of lineages in use, and blocks of unsaved turns, on disk. Thread-safe.

    The engine thread pins; the writer thread unpins a finished job's blocks, and pins lineages read again.
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
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]


def names_of(blocks: Iterable[NamedBlock]) -> list[BlockName]:
    """Names of block files, one per cache group."""
    return [name for block in blocks for name in block.names]


_HEADER_BYTES = 1536  # with tokens; estimated


class BlockFiles:
    """Maps block names to block files. Thread-safe; touches no file."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._group_names = {BASE_CACHE: [group.name for group in store.groups]}
        self._residuals: dict[str, CacheSpec] = {}  # includes caches closed since start

    def know_cache(self, name: str, spec: CacheSpec) -> None:
        self._store.blocks.know_cache(name, spec)
        self._group_names[name] = [group.name for group in spec.all_groups]
        self._residuals[name] = spec

    def learn_names(self, record: AgentRecord) -> None:
        for residual in record.residuals:
            self._group_names.setdefault(residual.cache, list(residual.groups))

    def disagrees_with(self, record: AgentRecord) -> bool:
        return any(
            self._group_names.get(each.cache, list(each.groups)) != list(each.groups) for each in record.residuals
        )

    def key(self, name: BlockName) -> str:
        names = self._group_names[name.cache]  # a group that the cache lacks has no file
        return block_key(name.chain, names[name.group] if name.group < len(names) else f"unknown.{name.group}")

    def has(self, name: BlockName) -> bool:
        return self._store.has(self.key(name))

    def bytes_of(self, names: Iterable[BlockName]) -> int:
        return sum(self._store.blocks.size_of(self.key(name)) for name in names)

    def estimate(self, record: AgentRecord, num_tokens: int) -> int:
        """Estimate a lineage's bytes, slightly too high."""
        blocks = _bytes_of((group for group in self._store.groups if not group.is_state), num_tokens)
        snapshots = sum(self._store.groups[each.group].bytes_per_block + _HEADER_BYTES for each in record.snapshots)
        return blocks + snapshots + sum(map(self._residual_bytes, record.residuals))

    def _residual_bytes(self, residual: ResidualBlocks) -> int:
        spec = self._residuals.get(residual.cache)
        if spec is None:  # not loaded, so the files do not grow
            return self.bytes_of(names_of(residual.blocks))
        return _bytes_of(spec.groups, residual.num_saved)


def _bytes_of(groups: Iterable[GroupSpec], num_tokens: int) -> int:
    return sum(_group_bytes(group, *divmod(num_tokens, BLOCK_SIZE)) for group in groups)


def _group_bytes(group: GroupSpec, full: int, rest: int) -> int:
    num_bytes = len(range(full)[group.holds.of_full_blocks(0)]) * (group.bytes_per_block + _HEADER_BYTES)
    return num_bytes + (group.bytes_of(rest) + _HEADER_BYTES if rest and group.holds.has(is_sealed=False) else 0)

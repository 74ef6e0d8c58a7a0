"""Agents with residuals on the floors below the engine: caches in RAM, files, and no model.

A block's bytes follow from its address, so that whoever has one knows what has to be in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np

from agentcache.agents.block_files import Pins
from agentcache.agents.caches import KeptCache, KeptCaches, load_agents
from agentcache.agents.disk import Saved
from agentcache.agents.operations import AgentOperations, Eviction
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.agents.turn_write import CacheTurn
from agentcache.api.report import AgentInfo
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BASE_CACHE, Namespace, block_key, residual_cache
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.transcript import Transcript
from agentcache.kv.arena import take_due
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import CacheSpec
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.store.manifest import AgentRecord
from agentcache.store.store import Store, no_fault
from agentcache.store.writing import Fault
from tests.store.store_cases import BUDGET, MODEL, RESIDUAL_SPEC, SPEC

MATH, POET = residual_cache("5e"), residual_cache("6f")


def expected(spec: CacheSpec, chain: str, group: int, num_tokens: int) -> Array:
    """The bytes of a block with this address."""
    seed = int(block_key(chain, spec.groups[group].name)[:15], 16)
    data = np.random.default_rng(seed).integers(0, 256, spec.groups[group].bytes_of(num_tokens), np.uint8)
    return data & 0x3B  # every two bytes of them are a finite float16


class Desk:
    """A cache folder, and the caches in RAM over it. What the writer and readers post runs in `settle`.

    Args:
        adapters: names of the residual caches that are open.
        spec: of base's cache.

    Attributes:
        is_idle: whether the device computes nothing.
        is_awaited: whether something has come for the engine thread, which is the test's.
    """

    is_idle = True
    is_awaited = False

    def __init__(
        self,
        folder: Path,
        adapters: Sequence[str] = (MATH,),
        *,
        disk_budget: int = BUDGET,
        fault: Fault = no_fault,
        spec: CacheSpec = SPEC,
    ) -> None:
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.store = Store(
            folder,
            spec,
            MODEL,
            disk_budget=disk_budget,
            fault=fault,
            when_lost=lambda: self.posted.put(self.persistence.jobs.forget_lost),
        )
        self.pins = Pins()
        self.agents = AgentTable(MODEL, pins=self.pins)
        self._ledger = Ledger(1 << 30)
        base = self._cache(BASE_CACHE, spec)
        self.caches = KeptCaches(base, lambda salt: Namespace(MODEL, spec.digest, salt))
        load_agents(self.store, self.caches, self.agents, 8)
        arenas: Any = base.arenas  # asked about recurrent state only
        self.persistence = Persistence(
            self.caches,
            arenas,
            self.store,
            self.agents,
            self.pins,
            self.posted.put,
            max_lineages=8,
            first_thought=lambda transcript: None,
            unsaved={},
        )
        self.restorer = Restorer(
            self.caches, self.store, self.posted.put, lambda: self.is_idle, lambda: self.is_awaited
        )
        self.eviction = Eviction(self.caches, self.agents, self.persistence)
        self.operations = AgentOperations(self.caches, self.agents, self.persistence, self.pins, self.restorer)
        self.persistence.tidy()
        for name in adapters:
            self.open(name)

    def _cache(self, name: str, spec: CacheSpec) -> KeptCache:
        prefix = PrefixCache(spec.groups, self._ledger, name=name)
        arenas = ResidualArenas(
            spec, prefix.slots.pools, lambda: None, lambda: mx.eval(arenas.saturated, take_due(arenas.tensors))
        )
        return KeptCache(name, spec, prefix, arenas)

    def open(self, adapter: str) -> None:
        self.persistence.open_cache(self._cache(adapter, RESIDUAL_SPEC))

    def unload(self, adapter: str) -> None:
        prefix = self.caches.get(adapter).prefix
        self.persistence.close_cache(adapter)
        prefix.allocator.close()

    def close(self) -> None:
        self.settle()
        self.restorer.close()
        self.persistence.close()

    def settle(self, done: Callable[[], bool] = lambda: True) -> None:
        """Run what is posted until nothing is on its way, and `done`."""
        while self.persistence.jobs.is_writing or not self.posted.empty() or not done():
            self.posted.get(timeout=60)()
        self.persistence.jobs.flush()  # what a turn has superseded goes after its end

    # -- what a request does ----------------------------------------------------------------------------------------

    def turn(
        self, agent: str, ids: Sequence[int], adapter: str | None = MATH, *, residual_tokens: int | None = None
    ) -> Saved:
        """An agent's turn, whose prompt and answer are `ids`; with an adapter, its residuals too."""
        known = self.agents.known(agent)
        record = known[0] if known else self.agents.new(agent)
        self.pins.pin_lineage(record.name)
        blocks, early = self._compute(self.caches.base, ids)
        residuals = []
        if adapter is not None:
            tokens = ids if residual_tokens is None else ids[:residual_tokens]
            own, own_early = self._compute(self.caches.get(adapter), tokens)
            residuals.append(CacheTurn(adapter, len(tokens), own, own_early))
        record = replace(
            record,
            adapter=adapter,
            last_used=record.last_used + 1,
            transcript=transcript_of(ids),
            num_saved=len(ids),
            blocks=tuple(block.named for block in blocks),
        )
        saved: list[Saved] = []
        base = CacheTurn(BASE_CACHE, len(ids), blocks, early)
        self.persistence.commit(record, [base, *residuals], saved.append)
        self.settle(lambda: bool(saved))
        self.pins.let_lineage_go(record.name)
        return saved[0]

    def _compute(self, cache: KeptCache, ids: Sequence[int]) -> tuple[list[PathBlock], list[PathBlock]]:
        """A sequence over the tokens: what is cached is used, what is not is made up and, block by block, saved."""
        root = self.caches.root(cache, "")
        sequence = cache.prefix.open(root, cache.prefix.match_prefix(root, ids, len(ids)))
        cache.arenas.copy_blocks(sequence.copies)
        done: list[object] = []
        self.restorer.restore(sequence, done.append, cache.name)
        self.settle(lambda: bool(done))
        missing = ids[sequence.num_tokens :]
        cache.prefix.reserve(sequence, len(missing))
        published = cache.prefix.advance(sequence, missing)
        self._fill(cache, published)
        self.persistence.save_blocks(sequence, published, lambda num_bytes: None, cache.name)
        blocks = cache.prefix.close(sequence)
        self._fill(cache, [block for block in blocks if not block.node.is_full])
        return blocks, published

    def _fill(self, cache: KeptCache, blocks: Sequence[PathBlock]) -> None:
        for block in blocks:
            for group, slot in block.node.block_ids.items():
                if group not in block.node.stored:
                    data = expected(cache.spec, block.node.chain, group, block.node.num_tokens)
                    cache.arenas.put_blocks(group, [slot], [data])

    # -- what there is ----------------------------------------------------------------------------------------------

    def record(self, agent: str) -> AgentRecord:
        return self.agents.get(agent)

    def info(self, agent: str) -> AgentInfo:
        return self.operations.info(agent)

    def cached(self, cache: str, ids: Sequence[int]) -> int:
        """How many of the tokens the cache has, in RAM or on disk."""
        kept = self.caches.get(cache)
        return kept.prefix.match_prefix(self.caches.root(kept, ""), ids, len(ids)).num_tokens

    def restore(self, agent: str) -> int:
        """Bytes that were read for it."""
        done: list[Any] = []
        self.operations.restore(agent, done.append)
        self.settle(lambda: bool(done))
        return int(done[0].restored_bytes)

    def evict(self, agent: str, kind: str | None = None) -> None:
        done: list[None] = []
        self.eviction.evict(agent, done.append, kind=kind)
        self.settle(lambda: bool(done))

    def check(self) -> None:
        """All that is in RAM is what it should be, and accounted for."""
        for cache in self.caches:
            cache.prefix.check_integrity()
            cache.arenas.evaluate()
            for node in cache.prefix.tree.walk():
                for group, slot in node.block_ids.items():
                    data = cache.arenas.snapshot(group, slot, node.num_tokens)
                    assert np.array_equal(data, expected(cache.spec, node.chain, group, node.num_tokens)), cache.name

    def check_nothing_is_held(self) -> None:
        """Turns that are over hold no lineage and no block, and nothing is on its way to the disk."""
        assert (self.pins.lineages(), self.pins.blocks()) == ([], set())
        assert not any(node.pending for cache in self.caches for node in cache.prefix.tree.walk())


@contextmanager
def desk(folder: Path, adapters: Sequence[str] = (MATH,), **settings: Any) -> Iterator[Desk]:
    """One that is checked, and closed at the end."""
    made = Desk(folder, adapters, **settings)
    try:
        yield made
        made.settle()
        made.check()
        made.check_nothing_is_held()
    finally:
        made.close()


def transcript_of(ids: Sequence[int]) -> Transcript:
    return Transcript("x" * len(ids), array("I", ids), array("I", range(1, len(ids) + 1)), (("prompt", len(ids)),))


def make_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def files_of(folder: Path, record: AgentRecord) -> list[Path]:
    """The files of an agent's residuals, in order of position and group."""
    keys = [
        block_key(block.chain, residual.groups[group])
        for residual in record.residuals
        for block in residual.blocks
        for group in block.groups
    ]
    return [folder / "blocks" / key[:2] / f"{key}.safetensors" for key in keys]

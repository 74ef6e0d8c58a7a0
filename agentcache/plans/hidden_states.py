from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.hidden_states import (
    HiddenStateCache,
    HiddenStatePlan,
    HiddenStateReader,
    HiddenStateWriter,
    Piece,
)
from agentcache.blocks.search import CachedHiddenStates

if TYPE_CHECKING:
    from agentcache.adapters.weights import AdapterWeightSet
    from agentcache.plans.plan import RequestPlan


class HiddenStateUse:
    """Hidden states that an open plan reads and fills, at layers that loaded adapters need."""

    def __init__(self, cache: HiddenStateCache, adapters: AdapterWeightSet) -> None:
        self._cache = cache
        self._adapters = adapters
        self._reader: HiddenStateReader | None = None
        self._writers: dict[int, HiddenStateWriter] = {}  # by layer

    @property
    def slots(self) -> list[int]:
        read = [] if self._reader is None else self._reader.slots
        return [*read, *(slot for writer in self._writers.values() for slot in writer.slots)]

    def read(self, found: CachedHiddenStates) -> None:
        """Pin hidden states that the first pass reads."""
        self._reader = HiddenStateReader(found.first, self._cache.lock(found.names))

    def plan(self, plan: RequestPlan, start: int, num_tokens: int) -> HiddenStatePlan:
        """Plan a step after `start` tokens. Only chunks of plain rows read or write."""
        cut = plan.passes[0].cut
        reads: Sequence[Piece] = ()
        if cut:
            assert self._reader is not None  # until the pass with the cut ends
            reads = self._reader.pieces(start, start + num_tokens)
        writes = {}
        if self._cache.num_slots and num_tokens > 1 and plan.extend_step is None:
            for layer in self._adapters.cuts:
                stop = min(start + num_tokens, self._base_end(plan, layer))
                if layer > cut and stop > start:
                    writer = self._writers.setdefault(layer, HiddenStateWriter(self._cache, layer))
                    if pieces := writer.pieces(start, stop):
                        writes[layer] = pieces
        return HiddenStatePlan(cut, reads, writes)

    def _base_end(self, plan: RequestPlan, layer: int) -> int:
        if plan.origin is None or layer <= self._adapters.cut(plan.use):
            return len(plan.token_ids)
        return plan.origin.start

    def advance(self, sequence: BlockTables) -> None:
        """Publish filled blocks, release read ones, after `sequence` has published its own."""
        for writer in self._writers.values():
            writer.publish(sequence.paths[0].nodes)
        if self._reader is not None and self._reader.end <= sequence.num_tokens:
            self._cache.release(self._reader.slots)
            self._reader = None

    def release(self) -> None:
        self._cache.release(self.slots)
        self._reader, self._writers = None, {}

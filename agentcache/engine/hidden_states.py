"""Use of the hidden-state cache. The states themselves are in `models/hidden_states.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.hidden_states import (
    HiddenStateCache,
    HiddenStatePlan,
    HiddenStateReader,
    HiddenStateWriter,
    Piece,
)
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.search import Cached, CachedHiddenStates, PrefixFinder, match_hidden_states
from agentcache.engine.running_request import RunningRequest


@dataclass
class _Run:
    """One request's use: blocks to read, until read, and blocks to fill, by layer."""

    reader: HiddenStateReader | None = None
    fillers: dict[int, HiddenStateWriter] = field(default_factory=dict)

    @property
    def slots(self) -> list[int]:
        read = [] if self.reader is None else self.reader.slots
        return [*read, *(slot for filler in self.fillers.values() for slot in filler.slots)]


class HiddenStatePlanner:
    """Plans reads and writes of the hidden-state cache. Loaded adapters decide the cached layers."""

    def __init__(self, ledger: Ledger, adapters: AdapterWeightSet, num_slots: int = 0, block_bytes: int = 0) -> None:
        self.blocks = HiddenStateCache(num_slots, block_bytes, ledger)
        self._adapters = adapters
        self._runs: dict[BlockTables, _Run] = {}

    def extend(self, generation: RunningRequest, finder: PrefixFinder, cached: Cached) -> Cached:
        """Return `cached` with the hidden states that extend it, if any.

        The last token always goes through all layers, so that only chunks use hidden states.
        """
        cut = self._adapters.cut(generation.adapter)
        if not cut or not self.blocks.num_slots:
            return cached
        limit, durable = len(generation.token_ids) - 1, generation.request.agent is not None
        return match_hidden_states(cached, finder, limit, self.blocks, cut, durable=durable)

    def begin(self, generation: RunningRequest, found: CachedHiddenStates) -> None:
        """Pin hidden states that the request reads."""
        slots = self.blocks.lock(found.names)
        self._runs[generation.open_sequence] = _Run(HiddenStateReader(found.first, slots))

    def sweep(self) -> None:
        for sequence in [sequence for sequence in self._runs if sequence.closed]:
            self.blocks.release(self._runs.pop(sequence).slots)

    def plan(self, rows: Sequence[RunningRequest], num_tokens: int) -> HiddenStatePlan:
        """Plan the reads and writes of the next step; only chunks have any."""
        generation = rows[0]
        cut, start = generation.current.cut, generation.num_launched
        cuts = []
        if self.blocks.num_slots and num_tokens > 1 and generation.current.residual_kv is None:
            cuts = [each for each in self._adapters.cuts if each > cut]
        reads = self._reads(generation.open_sequence, start, start + num_tokens) if cut else ()
        return HiddenStatePlan(cut, reads, self._writes(generation, num_tokens, cuts) if cuts else {})

    def _reads(self, sequence: BlockTables, start: int, stop: int) -> Sequence[Piece]:
        reader = self._runs[sequence].reader
        assert reader is not None  # kept until the pass with the cut ends
        return reader.pieces(start, stop)

    def _writes(self, generation: RunningRequest, num_tokens: int, cuts: Sequence[int]) -> dict[int, list[Piece]]:
        start, writes = generation.num_launched, {}
        run = self._runs.setdefault(generation.open_sequence, _Run())
        for cut in cuts:
            stop = min(start + num_tokens, self._base_end(generation, cut))
            if stop > start:
                filler = run.fillers.setdefault(cut, HiddenStateWriter(self.blocks, cut))
                writes[cut] = filler.pieces(start, stop)
        return {cut: pieces for cut, pieces in writes.items() if pieces}

    def _base_end(self, generation: RunningRequest, cut: int) -> int:
        """Tokens whose input to layer `cut` is base's."""
        producer = generation.producer
        if producer is None or cut <= self._adapters.cut(generation.adapter):
            return len(generation.token_ids)
        return producer.start

    def advance(self, sequence: BlockTables) -> None:
        """Publish filled blocks and release read ones, after the sequence has published its own."""
        run = self._runs.get(sequence)
        if run is None:
            return
        for filler in run.fillers.values():
            filler.publish(sequence.paths[0].nodes)
        if run.reader is not None and run.reader.end <= sequence.num_tokens:
            self.blocks.release(run.reader.slots)
            run.reader = None

    def check_integrity(self) -> None:
        self.blocks.check_integrity(slot for run in self._runs.values() for slot in run.slots)

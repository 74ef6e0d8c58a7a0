"""The trunk at work: which requests go on from it, and what they add to it.

Only bookkeeping: the hidden states are with the model (`models/trunk.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.sequence import CacheSequence
from agentcache.blocks.trunk import Piece, TrunkCache, TrunkFiller, TrunkPlan, TrunkReader
from agentcache.blocks.trunk_match import TrunkMatch, match_trunk
from agentcache.engine.generation import Generation


@dataclass
class _Run:
    """A sequence's use of the trunk.

    Attributes:
        reader: what it goes on from; None when it is past that.
        fillers: what it adds, by layer.
    """

    reader: TrunkReader | None = None
    fillers: dict[int, TrunkFiller] = field(default_factory=dict)

    @property
    def slots(self) -> list[int]:
        read = [] if self.reader is None else self.reader.slots
        return [*read, *(slot for filler in self.fillers.values() for slot in filler.slots)]


class Trunk:
    """Belongs to the engine thread.

    Args:
        adapters: those on the device say which layers the trunk is kept for.
        num_slots: what the trunk's budget allows; 0 to have none.
        block_bytes: of each slot.
    """

    def __init__(
        self, cache: PrefixCache, adapters: AdapterWeightSet, num_slots: int = 0, block_bytes: int = 0
    ) -> None:
        self.blocks = TrunkCache(num_slots, block_bytes, cache.ledger)
        self._cache = cache
        self._adapters = adapters
        self._runs: dict[CacheSequence, _Run] = {}

    # -- in and out ---------------------------------------------------------------------------------------------------

    def match(self, generation: Generation, root: str, prefix: CachedPrefix) -> TrunkMatch | None:
        """What a request that is cached as far as `prefix` can go on from.

        One token at least is left to a whole step, so that all before it are those of chunks.
        """
        cut = self._adapters.cut(generation.adapter)
        if not cut or not self.blocks.num_slots:
            return None
        durable, known = generation.request.agent is not None, generation.token_ids[:-1]
        return match_trunk(self._cache, self.blocks, root, known, prefix, cut, durable=durable)

    def begin(self, generation: Generation, match: TrunkMatch) -> None:
        """The request has its sequence, with the blocks of `match`."""
        slots = self.blocks.lock(match.names)
        self._runs[generation.open_sequence] = _Run(TrunkReader(match.first, slots))

    def sweep(self) -> None:
        """Let go of what sequences that have ended held."""
        for sequence in [sequence for sequence in self._runs if sequence.closed]:
            self.blocks.release(self._runs.pop(sequence).slots)

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Generation], num_tokens: int) -> TrunkPlan:
        """What the next step is to take and to give. Only chunks of prompts do either."""
        generation = rows[0]
        cut, start = generation.current.cut, generation.num_launched
        cuts = [each for each in self._adapters.cuts if each > cut] if self.blocks.num_slots and num_tokens > 1 else []
        reads = self._reads(generation.open_sequence, start, start + num_tokens) if cut else ()
        return TrunkPlan(cut, reads, self._writes(generation, num_tokens, cuts) if cuts else {})

    def _reads(self, sequence: CacheSequence, start: int, stop: int) -> Sequence[Piece]:
        reader = self._runs[sequence].reader
        assert reader is not None  # it is there as long as the pass above the cut
        return reader.pieces(start, stop)

    def _writes(self, generation: Generation, num_tokens: int, cuts: Sequence[int]) -> dict[int, list[Piece]]:
        start, writes = generation.num_launched, {}
        run = self._runs.setdefault(generation.open_sequence, _Run())
        for cut in cuts:
            stop = min(start + num_tokens, self._base_end(generation, cut))
            if stop > start:
                filler = run.fillers.setdefault(cut, TrunkFiller(self.blocks, cut))
                writes[cut] = filler.pieces(start, stop)
        return {cut: pieces for cut, pieces in writes.items() if pieces}

    def _base_end(self, generation: Generation, cut: int) -> int:
        """Up to which token the input of layer `cut` is base's."""
        producer = generation.producer
        if producer is None or cut <= self._adapters.cut(generation.adapter):
            return len(generation.token_ids)
        return producer.start

    def advance(self, sequence: CacheSequence) -> None:
        """The sequence has computed tokens, and published the blocks that they filled."""
        run = self._runs.get(sequence)
        if run is None:
            return
        for filler in run.fillers.values():
            filler.publish(sequence.lanes[0].nodes)
        if run.reader is not None and run.reader.end <= sequence.num_tokens:
            self.blocks.release(run.reader.slots)
            run.reader = None

    # -- the whole ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless every slot is accounted for."""
        self.blocks.check_integrity(slot for run in self._runs.values() for slot in run.slots)

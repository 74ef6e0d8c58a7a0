"""The plan of a request: the caches and passes that compute it.

The engine asks each plan the same questions. How an adapter's residuals differ from exact KV is said here only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache
from agentcache.agents.turn_write import CacheTurn
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.search import CachedHiddenStates
from agentcache.engine.passes import Pass, ResidualKV, plan_passes

CacheTables = tuple[KeptCache, BlockTables]
Save = Callable[[str, BlockTables, Sequence[PathBlock]], None]


class RequestPlan(ABC):
    """Block tables of an admitted request in all its caches, and its passes. Its position only grows.

    Attributes:
        sequence: block tables in base's cache.
        passes: remaining passes, the current one first.
        residual_kv: residual KV that the request writes; None for exact KV.
    """

    residual_kv: ResidualKV | None = None

    def __init__(self, base: KeptCache, sequence: BlockTables, passes: list[Pass]) -> None:
        self._base = base
        self.sequence = sequence
        self.passes = passes
        self.drop_passes()

    @property
    def current(self) -> Pass:
        return self.passes[0]

    def drop_passes(self) -> None:
        """Drop the passes that are done."""
        while len(self.passes) > 1 and self.passes[0].is_done:
            del self.passes[0]

    @property
    @abstractmethod
    def tables(self) -> Sequence[CacheTables]:
        """All block tables, base's first."""

    @property
    @abstractmethod
    def written(self) -> Sequence[CacheTables]:
        """Block tables that the current pass fills with its next token."""

    @property
    def written_until(self) -> int | None:
        """Number of tokens up to which `written` stays the same; None for all that the pass computes."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether the current pass computes logits of the prompt that count."""
        return True

    @abstractmethod
    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        """Tokens to reserve in each cache for the next `num_tokens` tokens."""

    def advance(self, token_ids: Sequence[int], save: Save) -> bool:
        """Publish computed tokens. `save` gets the blocks that they fill; returns whether there are any."""
        has_filled = False
        for cache, tables in self.written:
            if published := cache.prefix.advance(tables, token_ids):
                save(cache.name, tables, published)
                has_filled = True
        self.drop_passes()
        return has_filled

    @abstractmethod
    def leave_windows(self) -> None:
        """Give up blocks that no later token reads."""

    def catch_up(self, token_ids: Sequence[int], end: int) -> None:
        """Take published blocks up to token `end`, in all caches that the current pass writes."""
        for cache, tables in self.written:
            cache.prefix.catch_up(tables, token_ids, end)
        self.drop_passes()
        self.leave_windows()

    def share_tail(self, num_tokens: int) -> None:
        """Publish the partly filled block after `num_tokens` tokens."""
        for cache, tables in self.tables:
            cache.prefix.share_tail(tables, num_tokens)

    def close(self, num_tokens: int, early: Mapping[str, Sequence[PathBlock]]) -> list[CacheTurn]:
        """Keep the blocks of the first tokens, and close. Returns what to save, cache by cache, base's first.

        Args:
            early: blocks saved before the turn's end, by cache.
        """
        turns = []
        for cache, tables in self.tables:
            keep = min(tables.num_tokens, num_tokens)
            turns.append(CacheTurn(cache.name, keep, cache.prefix.close(tables, keep), early.get(cache.name, ())))
        return turns

    def abandon(self) -> None:
        """Give up all blocks."""
        for cache, tables in reversed(self.tables):
            cache.prefix.abandon(tables)


class ExactPlan(RequestPlan):
    """Exact KV, in base's cache only: of base, an adapter, or base and a decoder."""

    @classmethod
    def of(
        cls,
        base: KeptCache,
        sequence: BlockTables,
        use: AdapterUse | None = None,
        ahead: CachedHiddenStates | None = None,
    ) -> ExactPlan:
        """`ahead`: cached hidden states, from which the first pass starts."""
        return cls(base, sequence, plan_passes(use, sequence, ahead))

    @property
    def tables(self) -> Sequence[CacheTables]:
        return [(self._base, self.sequence)]

    @property
    def written(self) -> Sequence[CacheTables]:
        return [(self._base, self.sequence)]

    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        return [(self._base, self.sequence, in_flight + num_tokens)]

    def leave_windows(self) -> None:
        self._base.prefix.leave_window(self.sequence)


class ResidualPlan(RequestPlan):
    """Base's KV, and an adapter's residual KV in a cache of its own."""

    residual_kv: ResidualKV

    def __init__(self, base: KeptCache, residual_kv: ResidualKV, passes: list[Pass]) -> None:
        self.residual_kv = residual_kv
        super().__init__(base, residual_kv.base, passes)

    @classmethod
    def of(
        cls, base: KeptCache, residual_kv: ResidualKV, use: AdapterUse | None, last: int = 0, at_once: int = BLOCK_SIZE
    ) -> ResidualPlan:
        """`last`, `at_once`: as in `plan_passes`."""
        return cls(base, residual_kv, plan_passes(use, residual_kv.base, None, residual_kv, last, at_once))

    @property
    def tables(self) -> Sequence[CacheTables]:
        return [(self._base, self.sequence), (self.residual_kv.cache, self.residual_kv.residuals)]

    @property
    def written(self) -> Sequence[CacheTables]:
        if self.current.residual_kv is None:
            return [(self._base, self.sequence)]
        return self.residual_kv.written(self._base)

    @property
    def written_until(self) -> int | None:
        is_paired = self.residual_kv.is_paired(self.current.writes.num_tokens)
        return None if self.current.residual_kv is None or is_paired else self.residual_kv.paired_from

    @property
    def scores_prompt(self) -> bool:
        return self.current.computes is not None

    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        if self.current.residual_kv is None:
            return [(self._base, self.sequence, in_flight + num_tokens)]
        residuals = self.residual_kv.residuals
        needed = [(self.residual_kv.cache, residuals, in_flight + num_tokens)]
        launched = residuals.num_tokens + in_flight
        if self.residual_kv.is_paired(launched):
            needed.append((self._base, self.sequence, launched + num_tokens - self.sequence.num_tokens))
        return needed

    def leave_windows(self) -> None:
        residuals = self.residual_kv.residuals
        self.residual_kv.cache.prefix.leave_window(residuals)
        self._base.prefix.leave_window(self.sequence, residuals.num_tokens)

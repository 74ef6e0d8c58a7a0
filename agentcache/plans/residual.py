"""Residual requests: base's KV, plus an adapter's residual KV in a cache of its own.

Base computes KV (ForkKV, arXiv 2604.06370). The adapter computes the same tokens again, reads base's KV and writes the
difference. A generated token takes both rows in one step.

Adapters with equal As (LRAgent, arXiv 2602.01053) form a family: base's rows compute its residuals, the adapter only
the last prompt token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from agentcache.adapters.activation import AdapterUse
from agentcache.adapters.weights import AdapterWeightSet
from agentcache.agents.caches import KeptCache
from agentcache.api.report import CachedTokens, StepDown
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.search import Cached, match_residual_kv
from agentcache.errors import OutOfBlocks
from agentcache.models.residual.arenas import Divergence, ResidualArenas
from agentcache.models.residual.rows import ResidualRow
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs
from agentcache.plans.exact import ExactPlan
from agentcache.plans.plan import CacheTables, Pass, PlanResources, RequestPlan
from agentcache.plans.room import Room
from agentcache.plans.submitted import SubmittedRequest

if TYPE_CHECKING:
    from agentcache.plans.plan import ExtendStep
    from agentcache.plans.residual_caches import ResidualCaches


@dataclass(frozen=True, eq=False)
class ResidualKV:
    """Residual KV on top of base's KV.

    `paired_from`: first token whose base KV is written with its residuals. `is_family`: base's rows write residuals.
    """

    cache: KeptCache
    arenas: ResidualArenas
    residuals: BlockTables
    base: BlockTables
    paired_from: int
    is_family: bool = False

    def is_paired(self, position: int) -> bool:
        return position >= self.paired_from


class ResidualPlan(RequestPlan):
    """Base's KV and residual KV. `residual_kv` is valid while open."""

    use: AdapterUse
    residual_kv: ResidualKV

    def __init__(
        self,
        resources: PlanResources,
        residuals: ResidualCaches,
        submitted: SubmittedRequest,
        token_ids: Sequence[int],
        use: AdapterUse,
    ) -> None:
        super().__init__(resources, submitted, token_ids, use, StepDown.FAMILY if use.stepped_from else None)
        self._residuals = residuals

    @property
    def _cache(self) -> KeptCache:
        return self._residuals.cache_of(self.use)

    def _residual_root(self, cache: KeptCache) -> str:
        return self._resources.caches.root(cache, self.submitted.request.salt)

    def match(self) -> Cached:
        cache = self._cache
        base = self._base.prefix.finder(self._root, self.token_ids)
        residuals = cache.prefix.finder(self._residual_root(cache), self.token_ids)
        return match_residual_kv(base, residuals, self._most_cached)

    def _open(self, cached: Cached, *, busy: bool) -> None:
        cache, room, num_tokens = self._cache, Room(self._resources), len(self.token_ids) + 1
        if busy:
            room.check_residuals(cache, cached, num_tokens)
        # Evict these last.
        self._base.prefix.touch(cached)
        cache.prefix.touch(cached.own)
        has_slots = room.make(cache, cached.own, num_tokens)
        if busy and not has_slots:
            raise OutOfBlocks("running requests read blocks where residuals are to be")
        cached = self.match()
        base = self._take(self._base, self._root, cached)
        residuals = self._take(cache, self._residual_root(cache), cached.own)
        assert isinstance(cache.arenas, ResidualArenas)
        paired_from = cached.num_tokens if self.use.is_family else len(self.token_ids)
        self.residual_kv = ResidualKV(cache, cache.arenas, residuals, base, paired_from, self.use.is_family)
        self._begin(base, residual_passes(self.use, self.residual_kv, self._most_cached, self._resources.largest_chunk))
        if not self.num_generated:
            self._note(cached)

    def _note(self, cached: Cached) -> None:
        prefix, num_prompt_tokens = cached.own, self.num_prompt_tokens
        own = min(self.own_tokens, prefix.num_tokens)
        # Residuals of an adapter not used last are not lost.
        residual = min(self.expected_tokens, self._saved_residual_tokens)
        self.lost_tokens = max(0, self.expected_tokens - cached.num_tokens, residual - prefix.known_tokens)
        self.cached = CachedTokens(own=own, shared=prefix.num_tokens - own, residual=prefix.known_tokens)
        self.computed_prompt_tokens = num_prompt_tokens - prefix.num_tokens
        self.computed_base_tokens = max(0, num_prompt_tokens - cached.num_tokens)
        if self.use.is_family:
            # Base also computes the family's residuals.
            self.computed_base_tokens = self.computed_prompt_tokens
            self.computed_prompt_tokens = num_prompt_tokens - max(prefix.num_tokens, self._most_cached)

    @property
    def _saved_residual_tokens(self) -> int:
        found = self.submitted.found
        residual = None if found is None else found.residual_of(self.use.residual_cache)
        return 0 if residual is None else residual.num_saved

    def is_known_too_far(self) -> bool:
        self.divergence = self._residuals.known_divergence(self)
        return self.divergence is not None

    def fallback(self, why: StepDown) -> RequestPlan:
        use = self.use.stepped_down()
        return ExactPlan(self._resources, self.submitted, self.token_ids, use, why, self.divergence)

    def verdict(self) -> StepDown | None:
        tables = self.residual_kv.residuals.tables
        measured = Divergence.of(*self.residual_kv.arenas.measured_of(tables, self.num_prompt_tokens))
        self.divergence = None if measured is None else measured.value
        return StepDown.DIVERGENCE if self._residuals.is_too_far(self) else None

    @property
    def writes_residuals(self) -> bool:
        return self.passes[0].writes is self.residual_kv.residuals

    @property
    def written(self) -> Sequence[CacheTables]:
        if not self.writes_residuals:
            return self.tables[:1]
        residual_kv = self.residual_kv
        is_paired = residual_kv.is_paired(residual_kv.residuals.num_tokens)
        return self.tables[::-1] if is_paired else self.tables[1:]

    @property
    def written_until(self) -> int | None:
        if not self.writes_residuals or self.residual_kv.is_paired(self.residual_kv.residuals.num_tokens):
            return None
        return self.residual_kv.paired_from

    @property
    def scores_prompt(self) -> bool:
        return self.passes[0].computes is not None

    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        if not self.writes_residuals:
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

    def _note_caught_up(self, begin: int, end: int) -> None:
        num_tokens, cached = end - begin, self.cached
        if self.passes[0].computes is None:
            self.computed_base_tokens -= num_tokens
        if self.writes_residuals:
            residual = None if cached.residual is None else cached.residual + num_tokens
            self.cached = CachedTokens(cached.own, cached.shared + num_tokens, residual)
            if self.passes[0].computes is not None:
                self.computed_prompt_tokens -= num_tokens

    @property
    def reads_residuals(self) -> bool:
        return self.writes_residuals and self.passes[0].computes is not None

    def has_base_row(self, start: int) -> bool:
        """Whether base computes the same tokens in a step after `start`."""
        return self.reads_residuals and self.residual_kv.is_paired(start)

    def contexts(self, start: int) -> tuple[Sequence[int], Sequence[int]]:
        if not self.reads_residuals:
            return (start,), ()
        return (start,) if self.has_base_row(start) else (), (start,)

    @property
    def extend_step(self) -> ExtendStep | None:
        return with_residual_rows if self.writes_residuals else None

    def residual_row(self, place: int, start: int, base_row: int | None, adapters: AdapterWeightSet) -> ResidualRow:
        """The adapter's row, or base's for its family. `base_row`: place of base's, if any."""
        adapter = adapters.row(self.use)
        assert adapter is not None
        is_read = self.reads_residuals
        return ResidualRow(
            place,
            adapter.weights,
            self.residual_kv.arenas,
            self.residual_kv.residuals.tables,
            start,
            source=base_row if self.residual_kv.is_family else None,
            is_read=is_read,
            writes_base=not is_read and self.residual_kv.is_paired(start),
        )


def with_residual_rows(
    step: StepInputs, plans: Sequence[RequestPlan], runner: ModelRunner, adapters: AdapterWeightSet
) -> StepInputs:
    """Add residual rows, and at the end base rows of requests that compute both.

    An adapter's row writes no KV: base's is cached, or its row writes it.
    """
    num_tokens, starts = step.token_ids.shape[1], step.lengths
    residual = {i: plan for i, plan in enumerate(plans) if isinstance(plan, ResidualPlan) and plan.writes_residuals}
    paired = [i for i, plan in residual.items() if plan.has_base_row(starts[i])]
    base_rows = {i: len(plans) + place for place, i in enumerate(paired)}
    rows = [plan.residual_row(i, starts[i], base_rows.get(i), adapters) for i, plan in residual.items()]
    without_writes = {row.row for row in rows if not row.writes_base}
    lengths = [*starts, *(starts[i] for i in paired)]
    tables: list[Sequence[BlockTable]] = [plan.sequence.tables for plan in plans]
    tables += [tables[i] for i in paired]
    writers = [i for i in range(len(lengths)) if i not in without_writes]
    return replace(
        step,
        token_ids=mx.concatenate([step.token_ids, step.token_ids[mx.array(paired)]]) if paired else step.token_ids,
        lengths=lengths,
        reads=runner.reads(tables, lengths, num_tokens),
        writes=runner.writes([tables[i] for i in writers], [lengths[i] for i in writers], num_tokens)
        if writers
        else (),
        adapters=[*step.adapters, *[None] * len(paired)],
        residual=runner.residual_rows(rows, len(lengths), num_tokens),
    )


def residual_passes(
    use: AdapterUse | None, residual_kv: ResidualKV, last: int = 0, at_once: int = BLOCK_SIZE
) -> list[Pass]:
    """Return the passes. `last`: first token that the adapter must compute. `at_once`: largest chunk."""
    made = _family_passes(use, residual_kv, last) if residual_kv.is_family else _passes(use, residual_kv, at_once)
    return list(made)


def _passes(use: AdapterUse | None, residual_kv: ResidualKV, at_once: int) -> Iterator[Pass]:
    # Alternate, as base keeps blocks in windows, and sealed ones in their open form, until the adapter has read them.
    if _base_drops_blocks(residual_kv):
        start = min(residual_kv.base.num_tokens, residual_kv.residuals.num_tokens)
        ahead = -(-at_once // BLOCK_SIZE) * BLOCK_SIZE
        for end in range(start - start % ahead + ahead, residual_kv.paired_from, ahead):
            yield Pass(None, end, residual_kv.base)
            yield Pass(use, end, residual_kv.residuals)
    yield Pass(None, residual_kv.paired_from, residual_kv.base)
    yield Pass(use, None, residual_kv.residuals)


def _base_drops_blocks(residual_kv: ResidualKV) -> bool:
    has_windows = any(group.window is not None for group in residual_kv.cache.spec.groups)
    return has_windows or any(path.layout.holds for path in residual_kv.base.paths)


def _family_passes(use: AdapterUse | None, residual_kv: ResidualKV, last: int) -> Iterator[Pass]:
    # Without base's KV, a row writes both.
    yield Pass(None, min(residual_kv.base.num_tokens, last), residual_kv.residuals)
    yield Pass(None, last, residual_kv.residuals)
    yield Pass(use, None, residual_kv.residuals)

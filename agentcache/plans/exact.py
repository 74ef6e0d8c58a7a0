from __future__ import annotations

from collections.abc import Sequence

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache
from agentcache.api.report import CachedTokens
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.search import Cached, CachedHiddenStates, PrefixFinder, match_hidden_states
from agentcache.blocks.snapshots import SnapshotPlan
from agentcache.plans.plan import Pass, RequestPlan
from agentcache.plans.room import Room


class ExactPlan(RequestPlan):
    """Exact KV, in base's cache: of base, an adapter, or base and a decoder."""

    @property
    def _finder(self) -> PrefixFinder:
        return self._base.prefix.finder(self._root, self.token_ids, self.origin)

    def match_kv(self) -> Cached:
        return self._finder.match(self._most_cached)

    def match(self) -> Cached:
        finder, states = self._finder, self._resources.hidden_states
        cached, cut = finder.match(self._most_cached), self._resources.adapters.cut(self.use)
        if not cut or not states.num_slots:
            return cached
        # The last token goes through all layers.
        limit, durable = len(self.token_ids) - 1, self.submitted.request.agent is not None
        return match_hidden_states(cached, finder, limit, states, cut, durable=durable)

    def _open(self, cached: Cached, *, busy: bool) -> None:
        if busy:
            Room(self._resources).check(cached, len(self.token_ids) + 1)
        sequence = self._take(self._base, self._root, cached)
        self._begin(sequence, exact_passes(self.use, sequence, cached.hidden_states))
        self._plan_snapshots(cached)
        if cached.hidden_states is not None:
            self.hidden_states.read(cached.hidden_states)
        if not self.num_generated:
            self._note(cached)

    def _plan_snapshots(self, prefix: Cached) -> None:
        snapshots, submitted = self._base.prefix.snapshots, self.submitted
        if snapshots is not None:
            self.snapshots = SnapshotPlan.of(
                snapshots.every,
                prefix.num_tokens,
                len(self.token_ids),
                submitted.system_tokens,
                prefix.known_tokens,
                0 if self.origin is None else self.origin.start,
                submitted.repeated_tokens,
            )

    def _note(self, cached: Cached) -> None:
        found = cached.num_tokens
        own = min(self.own_tokens, found)
        # Tokens that only lack a checkpoint are not lost.
        self.lost_tokens = max(0, self.expected_tokens - max(found, cached.known_tokens))
        self.cached = CachedTokens(own=own, shared=found - own)
        self.computed_prompt_tokens = self.num_prompt_tokens - found
        self.computed_base_tokens = max(0, self._base_end - found)

    @property
    def _base_end(self) -> int:
        return self.num_prompt_tokens if self.origin is None else self.origin.start

    def _note_caught_up(self, begin: int, end: int) -> None:
        self.computed_base_tokens -= max(0, min(end, self._base_end) - begin)
        self.cached = CachedTokens(self.cached.own, self.cached.shared + end - begin, self.cached.residual)
        self.computed_prompt_tokens -= end - begin

    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        return [(self._base, self.sequence, in_flight + num_tokens)]

    def leave_windows(self) -> None:
        self._base.prefix.leave_window(self.sequence)


def exact_passes(use: AdapterUse | None, sequence: BlockTables, ahead: CachedHiddenStates | None = None) -> list[Pass]:
    """Return the passes. The first starts from hidden states `ahead`."""
    acts = None if use is None or use.start is None else use
    passes = []
    if ahead is not None:
        passes.append(Pass(acts, ahead.end, sequence, ahead.cut))
    if acts is not None and acts.is_decoder:
        passes.append(Pass(None, acts.start, sequence))
    return [*passes, Pass(acts, None, sequence)]

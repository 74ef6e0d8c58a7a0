"""A request's plan: the caches, blocks and passes that compute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.turn_write import CacheTurn
from agentcache.api.report import CachedTokens, StepDown
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.hidden_states import HiddenStateCache
from agentcache.blocks.keys import KVOrigin
from agentcache.blocks.origin_paths import agreed_tokens
from agentcache.blocks.prefix_match import len_common_prefix
from agentcache.blocks.search import Cached
from agentcache.blocks.snapshots import SnapshotPlan
from agentcache.plans.hidden_states import HiddenStateUse
from agentcache.plans.submitted import SubmittedRequest

if TYPE_CHECKING:
    from agentcache.adapters.weights import AdapterWeightSet
    from agentcache.models.runner import ModelRunner
    from agentcache.models.step import StepInputs

    ExtendStep = Callable[[StepInputs, Sequence["RequestPlan"], ModelRunner, AdapterWeightSet], StepInputs]

CacheTables = tuple[KeptCache, BlockTables]
Save = Callable[[str, BlockTables, Sequence[PathBlock]], None]


@dataclass(frozen=True)
class Pass:
    """Tokens computed by the same layers of one model, from the end of `writes` on.

    `computes`: adapter, active from its start; None for base. `end`: token count; None for the last pass. `cut`: first
    layer to compute; KV and hidden states below are cached.
    """

    computes: AdapterUse | None
    end: int | None
    writes: BlockTables
    cut: int = 0

    @property
    def model(self) -> str | None:
        """Digest of the decoder that replaces base, or None."""
        return self.computes.digest if self.computes is not None and self.computes.is_decoder else None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.writes.num_tokens >= self.end


@dataclass(eq=False)
class PlanResources:
    """What all plans share. `largest_chunk`: most prompt tokens of a step."""

    caches: KeptCaches
    adapters: AdapterWeightSet
    hidden_states: HiddenStateCache
    largest_chunk: int
    open_plans: list[RequestPlan] = field(default_factory=list)


class RequestPlan(ABC):
    """The way one request is computed. Engine thread only.

    Opened at admission, and again after a preemption. While open, its position only grows.

    Attributes:
        token_ids: prompt and generated tokens; grows.
        use, origin: adapter, and origin of the computed KV; None for base.
        divergence: relative error of base's KV against the adapter's own; None if not measured.
        own_tokens: prompt tokens in the matched lineage.
        expected_tokens: those of them with KV after the last turn.
        lost_tokens: those of these neither in RAM nor on disk.
        tables: in all caches, base's first; empty while not open.
        sequence: those in base's cache; valid while open.
        passes: remaining ones, the current first; empty while not open.
    """

    sequence: BlockTables
    hidden_states: HiddenStateUse

    def __init__(
        self,
        resources: PlanResources,
        submitted: SubmittedRequest,
        token_ids: Sequence[int],
        use: AdapterUse | None = None,
        stepped_down: StepDown | None = None,
        divergence: float | None = None,
    ) -> None:
        self._resources = resources
        self._base = resources.caches.base
        self._root = resources.caches.root(self._base, submitted.request.salt)
        self.submitted = submitted
        self.token_ids = token_ids
        self.num_prompt_tokens = submitted.num_prompt_tokens
        self.use = use
        self.origin: KVOrigin | None = None if use is None else use.producer
        self.stepped_down = stepped_down
        self.divergence = divergence
        self.own_tokens = self.expected_tokens = self.lost_tokens = 0
        self.cached = CachedTokens()
        self.computed_prompt_tokens = self.computed_base_tokens = 0
        self.snapshots: SnapshotPlan | None = None
        self.tables: Sequence[CacheTables] = ()
        self.passes: list[Pass] = []
        self._note_own()

    def _note_own(self) -> None:
        found = self.submitted.found
        if self.submitted.request.agent is not None and found is not None and found.transcript:
            common = len_common_prefix(found.transcript.ids, self.submitted.match.transcript.ids)
            self.own_tokens = agreed_tokens(found.producer, self.origin, common)
            # The last generated token was not computed, the last prompt token always is.
            computed = len(found.transcript) - (found.transcript.spans[-1][0] == "generated")
            self.expected_tokens = min(self.own_tokens, computed, self.num_prompt_tokens - 1)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def _most_cached(self) -> int:
        # Logits need the last token; prompt logprobs need all.
        if self.submitted.request.sampling.prompt_logprobs and not self.num_generated:
            return 0
        return len(self.token_ids) - 1

    @abstractmethod
    def match(self) -> Cached:
        """Return the longest prefix that the plan can continue."""

    def open(self, cached: Cached, *, busy: bool) -> None:
        """Take the blocks of all caches, or none, and copy due ones; `loads` stay due.

        `busy`: whether other requests run; the plan must leave them their blocks. Raises OutOfBlocks.
        """
        try:
            self._open(cached, busy=busy)
        except BaseException:
            self.abandon()
            raise

    @abstractmethod
    def _open(self, cached: Cached, *, busy: bool) -> None: ...

    def _take(self, cache: KeptCache, root: str, cached: Cached) -> BlockTables:
        tables = cache.prefix.open(root, cached)
        self.tables = [*self.tables, (cache, tables)]
        cache.arenas.copy_blocks(tables.copies)  # before the next `open` moves slots
        return tables

    def _begin(self, sequence: BlockTables, passes: list[Pass]) -> None:
        self.sequence, self.passes = sequence, passes
        self.hidden_states = HiddenStateUse(self._resources.hidden_states, self._resources.adapters)
        self._resources.open_plans.append(self)
        self.drop_passes()

    def fallback(self, why: StepDown) -> RequestPlan | None:
        """Return the plan to use instead, before any output, or None."""
        return None

    def verdict(self) -> StepDown | None:
        """Return why the computed prompt must not be used, or None."""
        return None

    def drop_passes(self) -> None:
        while len(self.passes) > 1 and self.passes[0].is_done:
            del self.passes[0]

    @property
    def written(self) -> Sequence[CacheTables]:
        """Block tables that the next token fills."""
        return self.tables

    @property
    def written_until(self) -> int | None:
        """End of tokens with this `written`; None for the whole pass."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether the current pass computes the prompt's logits."""
        return True

    @abstractmethod
    def needs(self, in_flight: int, num_tokens: int) -> Sequence[tuple[KeptCache, BlockTables, int]]:
        """Tokens to reserve per cache for the next `num_tokens`."""

    @property
    def extend_step(self) -> ExtendStep | None:
        """Changes a step of plain rows, which read and write `sequence`; None for a plain row."""
        return None

    def contexts(self, start: int) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens before a step of plain rows, and of rows that add residuals to base's KV."""
        return (start,), ()

    def advance(self, token_ids: Sequence[int], save: Save) -> bool:
        """Publish computed tokens; `save` gets the blocks that they fill. Return whether any are full."""
        has_filled = False
        for cache, tables in self.written:
            if published := cache.prefix.advance(tables, token_ids):
                save(cache.name, tables, published)
                has_filled = True
        self.drop_passes()
        self.hidden_states.advance(self.sequence)
        return has_filled

    @abstractmethod
    def leave_windows(self) -> None:
        """Give up blocks that no later token reads."""

    def catch_up(self, begin: int, end: int) -> None:
        """Take published blocks of tokens `begin … end - 1`, in all caches `written`."""
        if not self.num_generated:
            self._note_caught_up(begin, end)
        for cache, tables in self.written:
            cache.prefix.catch_up(tables, self.token_ids, end)
        self.drop_passes()
        self.leave_windows()

    @abstractmethod
    def _note_caught_up(self, begin: int, end: int) -> None:
        """Count prompt tokens that another request has computed."""

    def share_tail(self, num_tokens: int) -> None:
        for cache, tables in self.tables:
            cache.prefix.share_tail(tables, num_tokens)

    def close(self, num_tokens: int, early: Mapping[str, Sequence[PathBlock]]) -> list[CacheTurn]:
        """Keep the first tokens' blocks, as far as keepable, and close. Return what to save, base's cache first.

        `early`: blocks saved before, by cache.
        """
        turns = []
        for cache, tables in self.tables:
            keep = cache.prefix.open_blocks.keepable(tables, min(tables.num_tokens, num_tokens))
            turns.append(CacheTurn(cache.name, keep, cache.prefix.close(tables, keep), early.get(cache.name, ())))
        self.abandon()
        return turns

    def abandon(self) -> None:
        """Give up all blocks. Steps under way become void."""
        for cache, tables in reversed(self.tables):
            cache.prefix.abandon(tables)
        if self.passes:
            self.hidden_states.release()
            self._resources.open_plans.remove(self)
        self.tables, self.passes, self.snapshots = (), [], None

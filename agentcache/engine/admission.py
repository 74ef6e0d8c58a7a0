"""Into the cache and out of it: who gets a sequence and blocks, waits for files, or has to give way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from agentcache.adapter_settings import Policy
from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.restore import Restorer
from agentcache.agents.restoring import Restored
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.ledger import RESIDUAL
from agentcache.blocks.overlay_match import OverlayMatch, match_overlay
from agentcache.blocks.sequence import CacheSequence
from agentcache.blocks.snapshot_plan import SnapshotPlan
from agentcache.engine.device import Device
from agentcache.engine.generation import Generation, Outcome, State
from agentcache.engine.passes import Overlay
from agentcache.engine.requests import Requests
from agentcache.engine.room import Growth, has_room, slots_needed
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.trunk import Trunk
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks, OutOfMemory, Overloaded
from agentcache.kv.residual_arenas import ResidualArenas
from agentcache.report import CachedTokens, FinishReason, StepDown


class Admission:
    """Opens generations' sequences in the cache. Belongs to the engine thread.

    Args:
        end: ends a generation, with what it has or with an error.
        step_down: has a generation that waits be computed exactly instead of as residuals.
        share: has one whose policy is open be computed as residuals, unless these are known to be too far from base.
        residual_cache: where an adapter's residuals are kept.
        fail: ends generations that an unforeseen exception concerns.
    """

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        caches: KeptCaches,
        device: Device,
        restorer: Restorer,
        trunk: Trunk,
        end: Callable[[Generation, Outcome], None],
        step_down: Callable[[Generation, StepDown], None],
        share: Callable[[Generation], None],
        residual_cache: Callable[[AdapterUse], KeptCache],
        fail: Callable[[Collection[Generation], BaseException], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._caches = caches
        self._cache = caches.base.prefix
        self._device = device
        self._restorer = restorer
        self._trunk = trunk
        self._end = end
        self._step_down = step_down
        self._share = share
        self._residual_cache = residual_cache
        self._fail = fail

    # -- in -----------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit waiting requests in order, as long as the batch has room and there are blocks."""
        while (generation := self._scheduler.next_to_admit()) is not None:
            busy = bool(self._requests.running or self._requests.loading)
            try:
                self._open(generation, busy)
            except OutOfBlocks as error:
                if busy:
                    self._scheduler.stalled = True
                    return  # others will give blocks back
                if generation.is_residual and not generation.num_generated:
                    self._step_down(generation, StepDown.MEMORY)
                else:
                    self._end(generation, _too_large(generation, error))
            except BaseException as error:
                self._fail([generation], error)

    def _open(self, generation: Generation, busy: bool) -> None:
        """Open a waiting request's sequence; starts its restore where blocks are on disk only."""
        root = self._caches.root(self._caches.base, generation.request.salt)
        if not busy:
            self._cache.allocator.make_room(len(generation.token_ids) + 1)
        self._settle_policy(generation, root)
        if generation.adapter is not None and generation.is_residual:
            self._open_residual(generation, generation.adapter, root, busy)
            return
        prefix = self._usable_prefix(generation, root)
        ahead = self._trunk.match(generation, root, prefix)
        if ahead is not None:
            prefix = ahead.prefix
        if busy:
            self._check_room(generation, prefix)
        in_ram = self._cache.in_ram(prefix)
        sequence = self._cache.open(root, prefix)
        generation.take_sequence(sequence, ahead)
        self._plan_snapshots(generation, prefix)
        self._device.copy_blocks(sequence.copies)
        if ahead is not None:
            self._trunk.begin(generation, ahead)
        if generation.num_generated == 0:
            generation.prompt_logprobs.clear()  # after a preemption the prompt is computed again
            _note_cached(generation, prefix)
        self._scheduler.admit(generation, loading=not in_ram)
        if in_ram:
            self._begin_state(generation, sequence)
        else:
            self._restore(generation, [(BASE_CACHE, sequence)])

    def _settle_policy(self, generation: Generation, root: str) -> None:
        """A request whose policy is open is exact where that takes nobody's blocks, cached ones or not, and else it
        shares; for the whole of its turn. So it does where it has, with what is cached for that, less to compute."""
        use = generation.adapter
        if use is None or not use.may_share:
            return
        generation.adapter = use.settled(use.policy)
        prefix = self._usable_prefix(generation, root)
        num_tokens = len(generation.token_ids) + 1
        allocator = self._cache.allocator
        # Nor the residuals' part: whoever reads there could not make room for them.
        kept = self._cache.ledger.share_left(RESIDUAL)
        fits = has_room(allocator, self._base_growth(), prefix, num_tokens, evicts=False, beside=kept)
        if not fits or self._residual_tokens(generation, use, root) > prefix.num_tokens:
            self._share(generation)

    def _residual_tokens(self, generation: Generation, use: AdapterUse, root: str) -> int:
        """Behind how many tokens a request would begin whose policy were `residual`."""
        cache = self._residual_cache(use.settled(Policy.RESIDUAL))
        return self._match_overlay(generation, cache, root)[0].residuals.num_tokens

    def _open_residual(self, generation: Generation, use: AdapterUse, root: str, busy: bool) -> None:
        """The same for a request that has a sequence in its adapter's cache too: both, or none."""
        cache = self._residual_cache(use)
        match, residual_root = self._match_overlay(generation, cache, root)
        if busy:
            self._check_overlay_room(generation, cache, match)
        # So that they are not what goes to make room for the rest.
        self._cache.touch(match.base)
        cache.prefix.touch(match.residuals)
        has_slots = self._make_residual_room(generation, cache, match.residuals)
        if busy and not has_slots:
            raise OutOfBlocks("running requests read blocks where residuals are to be")
        match, _ = self._match_overlay(generation, cache, root)
        sequences = {BASE_CACHE: self._cache.open(root, match.base)}
        try:
            self._device.copy_blocks(sequences[BASE_CACHE].copies)  # before its slots may move
            sequences[cache.name] = cache.prefix.open(residual_root, match.residuals)
        except BaseException:
            self._cache.abandon(sequences[BASE_CACHE])
            raise
        base, residuals = sequences.values()
        assert isinstance(cache.arenas, ResidualArenas)  # base's only are others
        paired_from = match.base.num_tokens if use.is_family else len(generation.token_ids)
        overlay = Overlay(cache, cache.arenas, residuals, base, paired_from, is_family=use.is_family)
        generation.take_sequence(base, overlay=overlay, at_once=self._scheduler.pace.largest_chunk)
        cache.arenas.copy_blocks(residuals.copies)
        if generation.num_generated == 0:
            generation.prompt_logprobs.clear()
            _note_cached(generation, match.residuals, match)
        due = [(name, sequence) for name, sequence in sequences.items() if sequence.loads]
        self._scheduler.admit(generation, loading=bool(due))
        if due:
            self._restore(generation, due)

    def _match_overlay(self, generation: Generation, cache: KeptCache, root: str) -> tuple[OverlayMatch, str]:
        """What base's cache and an adapter's have of a request's tokens, and the root of the latter."""
        residual_root = self._caches.root(cache, generation.request.salt)
        limit = self._most_cached(generation)
        return match_overlay(self._cache, root, cache.prefix, residual_root, generation.token_ids, limit), residual_root

    def _plan_snapshots(self, generation: Generation, prefix: CachedPrefix) -> None:
        snapshots = self._cache.snapshots
        if snapshots is None:
            return
        self._device.free_states()  # of those that have left for this one
        generation.snapshots = SnapshotPlan.of(
            snapshots.every,
            prefix.num_tokens,
            len(generation.token_ids),
            generation.system_tokens,
            prefix.known_tokens,
            0 if generation.producer is None else generation.producer.start,
            generation.repeated_tokens,
        )

    def _begin_state(self, generation: Generation, sequence: CacheSequence) -> None:
        """The row takes the snapshot that it goes on from, if it does; arrays are values, so the slot is free then."""
        if sequence.state is not None:
            generation.begin_state(self._device.row_state(sequence.state))
            self._cache.state_taken(sequence)

    def _usable_prefix(self, generation: Generation, root: str) -> CachedPrefix:
        limit = self._most_cached(generation)
        return self._cache.match_prefix(root, generation.token_ids, limit, generation.producer)

    @staticmethod
    def _most_cached(generation: Generation) -> int:
        """One token at least is computed, for its logits; all are where the prompt's own logprobs are wanted."""
        if generation.request.sampling.prompt_logprobs and generation.num_generated == 0:
            return 0
        return len(generation.token_ids) - 1

    def _check_room(self, generation: Generation, prefix: CachedPrefix, beside: int | None = None) -> None:
        """Raise OutOfBlocks if the known tokens of all who are admitted would not fit: one would preempt another.

        Args:
            beside: bytes that residuals are to have; None for what those of who is admitted lack.
        """
        if beside is None:
            beside = self._lacking_residuals()[0]
        num_tokens = len(generation.token_ids) + 1
        if not has_room(self._cache.allocator, self._base_growth(), prefix, num_tokens, beside=beside):
            raise OutOfBlocks("running requests need all the blocks there are")

    @property
    def _admitted(self) -> Sequence[Generation]:
        return (*self._requests.running, *self._requests.loading)

    def _base_growth(self) -> list[Growth]:
        """What those who are admitted hold of base's cache, and need."""
        return [Growth(other.open_sequence.tables, len(other.token_ids) + 1) for other in self._admitted]

    def _residual_growth(self, cache: KeptCache) -> list[Growth]:
        """The same of an adapter's cache."""
        overlays = [(other.overlay, len(other.token_ids) + 1) for other in self._admitted if other.overlay is not None]
        return [Growth(overlay.residuals.tables, count) for overlay, count in overlays if overlay.cache is cache]

    def _check_overlay_room(self, generation: Generation, cache: KeptCache, match: OverlayMatch) -> None:
        """The same for one that has residuals too: all adapters' have one part of the budget."""
        lacking, spare = self._lacking_residuals(cache, match.residuals, len(generation.token_ids) + 1)
        left = self._cache.ledger.share_left(RESIDUAL)
        if lacking > left + spare:
            raise OutOfBlocks("running requests need all the blocks there are for residuals")
        self._check_room(generation, match.base, min(lacking, left))

    def _lacking_residuals(
        self, joins: KeptCache | None = None, prefix: CachedPrefix | None = None, num_tokens: int = 0
    ) -> tuple[int, int]:
        """Bytes of slots that the residuals of those who are admitted need and have not yet, and bytes that adapters'
        caches have beyond that.

        Args:
            joins: the cache that one more is to use, with this prefix of so many tokens.
        """
        lacking = spare = 0
        for cache in self._caches.further:
            allocator, running = cache.prefix.allocator, self._residual_growth(cache)
            new = (prefix, num_tokens) if cache is joins else (None, 0)
            for index, group in enumerate(allocator.slots.groups):
                short = slots_needed(allocator, index, running, *new) - allocator.slots.pools[index].capacity
                lacking += max(0, short) * group.bytes_per_block
                spare += max(0, -short) * group.bytes_per_block
        return lacking, spare

    def _make_residual_room(self, generation: Generation, cache: KeptCache, prefix: CachedPrefix) -> bool:
        """Slots for all residuals of a request's known tokens; False if others who run have what it takes."""
        allocator, running = cache.prefix.allocator, self._residual_growth(cache)
        num_tokens = len(generation.token_ids) + 1
        for index in range(len(allocator.slots.groups)):
            needed = slots_needed(allocator, index, running, prefix, num_tokens)
            if not allocator.grow_to(index, needed):
                return False
        # Where base could not give way, slots have gone that others will need.
        lacking, spare = self._lacking_residuals(cache, prefix, num_tokens)
        return lacking <= spare + self._cache.ledger.room

    def _restore(self, generation: Generation, due: Sequence[tuple[str, CacheSequence]]) -> None:
        """Have the files of a request's sequences read, given with their caches, one sequence after the other."""
        name, sequence = due[0]
        self._restorer.restore(sequence, lambda restored: self._restored(generation, due, restored), cache=name)

    def _restored(self, generation: Generation, due: Sequence[tuple[str, CacheSequence]], restored: Restored) -> None:
        sequence = due[0][1]
        if sequence.closed:
            return  # cancelled meanwhile
        try:
            self._take_restored(generation, due, restored)
        except BaseException as error:
            self._fail([generation], error)

    def _take_restored(
        self, generation: Generation, due: Sequence[tuple[str, CacheSequence]], restored: Restored
    ) -> None:
        sequence = due[0][1]
        self._device.evaluate()
        generation.restored_bytes += restored.num_bytes
        generation.restore_seconds += restored.seconds
        if not restored.complete:
            # What was wrong is in quarantine; match again and compute the rest.
            self.abandon_sequence(generation)
        elif due[1:]:
            self._restore(generation, due[1:])
            return
        else:
            self._begin_state(generation, sequence)
        self._requests.move(generation, State.RUNNING if restored.complete else State.WAITING)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, num_tokens: int) -> int:
        """Blocks for the next tokens; of a chunk for fewer, where there is no room for all that it holds at once.

        Returns for how many; 0 if the request has to wait for blocks or ends for want of them.
        """
        while generation.state is State.RUNNING:
            residual = True
            try:
                self._reserve_residuals(generation, num_tokens)
                residual = False
                self._reserve_base(generation, num_tokens)
                return num_tokens
            except OutOfBlocks as error:
                if num_tokens > BLOCK_SIZE:
                    num_tokens = _first_half(generation.num_launched, num_tokens)
                elif generation.in_flight or any(other.in_flight > BLOCK_SIZE for other in self._requests.running):
                    # What is under way may end others, or show that this was the last token; and a large chunk gives
                    # back what it holds of windows.
                    return 0
                else:
                    self._out_of_blocks(generation, error, residual=residual)
        return 0

    def _reserve_residuals(self, generation: Generation, num_tokens: int) -> None:
        overlay = generation.current.overlay
        if overlay is not None:
            overlay.cache.prefix.reserve(overlay.residuals, generation.in_flight + num_tokens)

    def _reserve_base(self, generation: Generation, num_tokens: int) -> None:
        overlay = generation.current.overlay
        if overlay is None:
            self._cache.reserve(generation.open_sequence, generation.in_flight + num_tokens)
        elif overlay.is_paired(generation.num_launched):
            self._cache.reserve(overlay.base, generation.num_launched + num_tokens - overlay.base.num_tokens)

    def _out_of_blocks(self, generation: Generation, error: OutOfBlocks, *, residual: bool = False) -> None:
        victim = self._scheduler.victim(residual=residual)
        if victim is not None:
            self.preempt(victim)
        elif residual and not generation.num_generated:
            self._step_down(generation, StepDown.MEMORY)
        else:
            self._end_with_what_there_is(generation, _too_large(generation, error))

    def give_up(self, generation: Generation) -> None:
        """End a generation of which not even a single token can be computed in the memory that is free."""
        text = f"the machine has not enough free memory to go on behind {generation.num_launched} tokens"
        self._end_with_what_there_is(generation, Overloaded(text, code="insufficient_memory"))

    def _end_with_what_there_is(self, generation: Generation, error: AgentCacheError) -> None:
        self._end(generation, FinishReason.LENGTH if generation.num_generated else error)

    # -- out ----------------------------------------------------------------------------------------------------------

    def preempt(self, generation: Generation) -> None:
        """A running generation waits again; what it has computed is computed anew, where nobody else needs it too."""
        self.abandon_sequence(generation)
        self._scheduler.preempt(generation)

    def abandon_sequence(self, generation: Generation) -> None:
        """Out of the cache, if it is in it; its blocks are free at once."""
        if generation.sequence is not None:
            if generation.overlay is not None:
                generation.overlay.cache.prefix.abandon(generation.overlay.residuals)
            self._cache.abandon(generation.sequence)
            generation.lose_sequence()


def _first_half(start: int, num_tokens: int) -> int:
    """Half of a chunk that begins behind `start` tokens, to the end of a block if it has one."""
    half = num_tokens // 2
    to_boundary = half - (start + half) % BLOCK_SIZE
    return to_boundary if to_boundary > 0 else half


def _note_cached(generation: Generation, prefix: CachedPrefix, match: OverlayMatch | None = None) -> None:
    """Args:
    prefix: behind which the request's prompt is computed.
    match: a residual request's.
    """
    own = min(generation.own_tokens, prefix.num_tokens)
    generation.lost_tokens = _lost(generation, prefix, match)
    found = None if match is None else match.found
    generation.cached = CachedTokens(own=own, shared=prefix.num_tokens - own, residual=found)
    generation.computed_prompt_tokens = generation.num_prompt_tokens - prefix.num_tokens
    generation.computed_base_tokens = _computed_by_base(generation, (match.base if match else prefix).num_tokens)
    if generation.adapter is not None and generation.adapter.is_family:
        # Base makes the residuals too.
        generation.computed_base_tokens = generation.computed_prompt_tokens
        begin = max(prefix.num_tokens, generation.last_for_adapter)
        generation.computed_prompt_tokens = generation.num_prompt_tokens - begin


def _lost(generation: Generation, prefix: CachedPrefix, match: OverlayMatch | None) -> int:
    """How many tokens have to be computed once more that were there after the conversation's last turn."""
    if match is None:
        # What is there but for a state to go on from is computed again, and not lost.
        return max(0, generation.expected_tokens - max(prefix.num_tokens, prefix.known_tokens))
    # Nor is what it never had: residuals of an adapter that is new to the conversation, or was not at work last.
    residual = min(generation.expected_tokens, generation.saved_residual_tokens)
    return max(0, generation.expected_tokens - match.base.num_tokens, residual - match.found)


def _computed_by_base(generation: Generation, cached: int) -> int:
    """How many tokens of the prompt the unadapted model computes."""
    start = None if generation.producer is None else generation.producer.start
    return max(0, (generation.num_prompt_tokens if start is None else start) - cached)


def _too_large(generation: Generation, error: OutOfBlocks) -> AgentCacheError:
    if isinstance(error, OutOfMemory):
        return Overloaded(str(error), code="insufficient_memory")
    return InvalidRequest(str(error), param=generation.request.prompt_param, code="insufficient_memory")

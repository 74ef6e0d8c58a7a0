from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.restore import Restored, Restorer
from agentcache.api.policy import Policy
from agentcache.api.report import CachedTokens, FinishReason, StepDown
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE
from agentcache.blocks.search import Cached, PrefixFinder, match_residual_kv
from agentcache.blocks.snapshots import SnapshotPlan
from agentcache.engine.device import Device
from agentcache.engine.hidden_states import HiddenStatePlanner
from agentcache.engine.passes import ResidualKV
from agentcache.engine.plans import ExactPlan, ResidualPlan
from agentcache.engine.requests import Requests
from agentcache.engine.room import Room
from agentcache.engine.running_request import Outcome, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks, OutOfMemory, Overloaded
from agentcache.models.residual.arenas import ResidualArenas


class Admission:
    """Admits requests to the cache: block tables, restores, preemption.

    Args:
        step_down: callback that switches a waiting request from `residual` to `exact`.
        share: callback that resolves `auto` to `residual`, unless the known divergence is too high.
    """

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        caches: KeptCaches,
        device: Device,
        restorer: Restorer,
        hidden_states: HiddenStatePlanner,
        end: Callable[[RunningRequest, Outcome], None],
        step_down: Callable[[RunningRequest, StepDown], None],
        share: Callable[[RunningRequest], None],
        residual_cache: Callable[[AdapterUse], KeptCache],
        fail: Callable[[Collection[RunningRequest], BaseException], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._caches = caches
        self._cache = caches.base.prefix
        self._device = device
        self._restorer = restorer
        self._hidden_states = hidden_states
        self._room = Room(requests, caches)
        self._end = end
        self._step_down = step_down
        self._share = share
        self._residual_cache = residual_cache
        self._fail = fail

    def admit(self) -> None:
        while (generation := self._scheduler.next_to_admit()) is not None:
            busy = bool(self._requests.running or self._requests.loading)
            try:
                self._open(generation, busy)
            except OutOfBlocks as error:
                if busy:
                    self._scheduler.stalled = True
                    return  # running requests will free blocks
                if generation.is_residual and not generation.num_generated:
                    self._step_down(generation, StepDown.MEMORY)
                else:
                    self._end(generation, _too_large(generation, error))
            except BaseException as error:
                self._fail([generation], error)

    def _open(self, generation: RunningRequest, busy: bool) -> None:
        root = self._caches.root(self._caches.base, generation.request.salt)
        if not busy:
            self._cache.allocator.make_room(len(generation.token_ids) + 1)
        self._resolve_policy(generation, root)
        if generation.adapter is not None and generation.is_residual:
            self._open_residual(generation, generation.adapter, root, busy)
            return
        finder = self._finder(generation, root)
        cached = self._hidden_states.extend(generation, finder, finder.match(self._most_cached(generation)))
        if busy:
            self._room.check(cached, len(generation.token_ids) + 1)
        in_ram = self._cache.in_ram(cached)
        sequence = self._cache.open(root, cached)
        generation.plan = ExactPlan.of(self._caches.base, sequence, generation.adapter, cached.hidden_states)
        self._plan_snapshots(generation, cached)
        self._device.copy_blocks(sequence.copies)
        if cached.hidden_states is not None:
            self._hidden_states.begin(generation, cached.hidden_states)
        if generation.num_generated == 0:
            generation.prompt_logprobs.clear()  # a preempted prompt is computed again
            _note_cached(generation, cached)
        self._scheduler.admit(generation, loading=not in_ram)
        if in_ram:
            self._begin_state(generation, sequence)
        else:
            self._restore(generation, [(BASE_CACHE, sequence)])

    def _resolve_policy(self, generation: RunningRequest, root: str) -> None:
        """Resolve policy `auto`: `exact` if its blocks fit without eviction, else `residual`. Fixed for the turn.

        A longer prefix in the residual cache also means `residual`.
        """
        use = generation.adapter
        if use is None or not use.may_share:
            return
        generation.adapter = use.resolved(use.policy)
        prefix = self._finder(generation, root).match(self._most_cached(generation))
        fits = self._room.fits_beside_cached(prefix, len(generation.token_ids) + 1)
        if not fits or self._residual_tokens(generation, use, root) > prefix.num_tokens:
            self._share(generation)

    def _residual_tokens(self, generation: RunningRequest, use: AdapterUse, root: str) -> int:
        cache = self._residual_cache(use.resolved(Policy.RESIDUAL))
        return self._match_residual_kv(generation, cache, root)[0].own.num_tokens

    def _open_residual(self, generation: RunningRequest, use: AdapterUse, root: str, busy: bool) -> None:
        """Open base's and residual block tables: both or neither."""
        cache = self._residual_cache(use)
        cached, residual_root = self._match_residual_kv(generation, cache, root)
        num_tokens = len(generation.token_ids) + 1
        if busy:
            self._room.check_residuals(cache, cached, num_tokens)
        # Protect them from the evictions below.
        self._cache.touch(cached)
        cache.prefix.touch(cached.own)
        has_slots = self._room.make(cache, cached.own, num_tokens)
        if busy and not has_slots:
            raise OutOfBlocks("running requests read blocks where residuals are to be")
        cached, _ = self._match_residual_kv(generation, cache, root)
        sequences = {BASE_CACHE: self._cache.open(root, cached)}
        try:
            self._device.copy_blocks(sequences[BASE_CACHE].copies)  # the next `open` can move its slots
            sequences[cache.name] = cache.prefix.open(residual_root, cached.own)
        except BaseException:
            self._cache.abandon(sequences[BASE_CACHE])
            raise
        base, residuals = sequences.values()
        assert isinstance(cache.arenas, ResidualArenas)
        paired_from = cached.num_tokens if use.is_family else len(generation.token_ids)
        residual_kv = ResidualKV(cache, cache.arenas, residuals, base, paired_from, is_family=use.is_family)
        largest = self._scheduler.token_budget.largest_chunk
        generation.plan = ResidualPlan.of(self._caches.base, residual_kv, use, generation.last_for_adapter, largest)
        cache.arenas.copy_blocks(residuals.copies)
        if generation.num_generated == 0:
            generation.prompt_logprobs.clear()
            _note_cached(generation, cached)
        due = [(name, sequence) for name, sequence in sequences.items() if sequence.loads]
        self._scheduler.admit(generation, loading=bool(due))
        if due:
            self._restore(generation, due)

    def _match_residual_kv(self, generation: RunningRequest, cache: KeptCache, root: str) -> tuple[Cached, str]:
        residual_root = self._caches.root(cache, generation.request.salt)
        token_ids = generation.token_ids
        finders = self._cache.finder(root, token_ids), cache.prefix.finder(residual_root, token_ids)
        return match_residual_kv(*finders, self._most_cached(generation)), residual_root

    def _plan_snapshots(self, generation: RunningRequest, prefix: Cached) -> None:
        snapshots = self._cache.snapshots
        if snapshots is None:
            return
        self._device.free_states()  # of checkpoints evicted for this request
        generation.snapshots = SnapshotPlan.of(
            snapshots.every,
            prefix.num_tokens,
            len(generation.token_ids),
            generation.system_tokens,
            prefix.known_tokens,
            0 if generation.producer is None else generation.producer.start,
            generation.repeated_tokens,
        )

    def _begin_state(self, generation: RunningRequest, sequence: BlockTables) -> None:
        """Arrays are values, so the checkpoint's slot is free once loaded."""
        if sequence.state is not None:
            generation.begin_state(self._device.row_state(sequence.state))
            self._cache.checkpoints.release_start(sequence)

    def _finder(self, generation: RunningRequest, root: str) -> PrefixFinder:
        return self._cache.finder(root, generation.token_ids, generation.producer)

    @staticmethod
    def _most_cached(generation: RunningRequest) -> int:
        """Leave tokens to compute for logits: the last one, or all for prompt logprobs."""
        if generation.request.sampling.prompt_logprobs and generation.num_generated == 0:
            return 0
        return len(generation.token_ids) - 1

    def _restore(self, generation: RunningRequest, due: Sequence[tuple[str, BlockTables]]) -> None:
        name, sequence = due[0]
        self._restorer.restore(sequence, lambda restored: self._restored(generation, due, restored), cache=name)

    def _restored(self, generation: RunningRequest, due: Sequence[tuple[str, BlockTables]], restored: Restored) -> None:
        sequence = due[0][1]
        if sequence.closed:
            return  # cancelled during the read
        try:
            self._take_restored(generation, due, restored)
        except BaseException as error:
            self._fail([generation], error)

    def _take_restored(
        self, generation: RunningRequest, due: Sequence[tuple[str, BlockTables]], restored: Restored
    ) -> None:
        sequence = due[0][1]
        self._device.evaluate()
        generation.restored_bytes += restored.num_bytes
        generation.restore_seconds += restored.seconds
        if not restored.complete:
            # Damaged files are in quarantine: match again and compute the rest.
            self.abandon_sequence(generation)
        elif due[1:]:
            self._restore(generation, due[1:])
            return
        else:
            self._begin_state(generation, sequence)
        self._requests.move(generation, State.RUNNING if restored.complete else State.WAITING)

    def reserve(self, generation: RunningRequest, num_tokens: int) -> int:
        """Reserve blocks for the next tokens, halving a chunk until it fits.

        Returns the number of tokens; 0 if the request must wait or has ended.
        """
        while generation.state is State.RUNNING:
            cache = self._caches.base
            try:
                for cache, tables, count in generation.open_plan.needs(generation.in_flight, num_tokens):
                    cache.prefix.reserve(tables, count)
                return num_tokens
            except OutOfBlocks as error:
                if num_tokens > BLOCK_SIZE:
                    num_tokens = _first_half(generation.num_launched, num_tokens)
                elif generation.in_flight or any(other.in_flight > BLOCK_SIZE for other in self._requests.running):
                    # The step under way may end requests or choose the last token; a large chunk frees window blocks.
                    return 0
                else:
                    self._out_of_blocks(generation, error, in_base=cache is self._caches.base)
        return 0

    def _out_of_blocks(self, generation: RunningRequest, error: OutOfBlocks, *, in_base: bool) -> None:
        victim = self._scheduler.victim(beyond_base=not in_base)
        if victim is not None:
            self.preempt(victim)
        elif not in_base and not generation.num_generated:
            self._step_down(generation, StepDown.MEMORY)
        else:
            self._end_with_what_there_is(generation, _too_large(generation, error))

    def give_up(self, generation: RunningRequest) -> None:
        """End a request if memory does not suffice for one more token."""
        text = f"the machine has not enough free memory to go on behind {generation.num_launched} tokens"
        self._end_with_what_there_is(generation, Overloaded(text, code="insufficient_memory"))

    def _end_with_what_there_is(self, generation: RunningRequest, error: AgentCacheError) -> None:
        self._end(generation, FinishReason.LENGTH if generation.num_generated else error)

    def preempt(self, generation: RunningRequest) -> None:
        """Queue a running request again. Tokens without cached blocks are recomputed."""
        self.abandon_sequence(generation)
        self._scheduler.preempt(generation)

    def abandon_sequence(self, generation: RunningRequest) -> None:
        if generation.plan is not None:
            generation.plan.abandon()
            generation.lose_plan()


def _first_half(start: int, num_tokens: int) -> int:
    half = num_tokens // 2
    to_boundary = half - (start + half) % BLOCK_SIZE
    return to_boundary if to_boundary > 0 else half


def _note_cached(generation: RunningRequest, cached: Cached) -> None:
    prefix = cached.own
    own = min(generation.own_tokens, prefix.num_tokens)
    generation.lost_tokens = _lost(generation, cached)
    found = None if cached.residuals is None else prefix.known_tokens
    generation.cached = CachedTokens(own=own, shared=prefix.num_tokens - own, residual=found)
    generation.computed_prompt_tokens = generation.num_prompt_tokens - prefix.num_tokens
    generation.computed_base_tokens = _computed_by_base(generation, cached.num_tokens)
    if generation.adapter is not None and generation.adapter.is_family:
        # Base also computes the family's residuals.
        generation.computed_base_tokens = generation.computed_prompt_tokens
        begin = max(prefix.num_tokens, generation.last_for_adapter)
        generation.computed_prompt_tokens = generation.num_prompt_tokens - begin


def _lost(generation: RunningRequest, cached: Cached) -> int:
    if cached.residuals is None:
        # Not lost: tokens that only lack a checkpoint to start from.
        return max(0, generation.expected_tokens - max(cached.num_tokens, cached.known_tokens))
    # Not lost: residuals of an adapter that is new to the conversation or was not used last.
    residual = min(generation.expected_tokens, generation.saved_residual_tokens)
    return max(0, generation.expected_tokens - cached.num_tokens, residual - cached.residuals.known_tokens)


def _computed_by_base(generation: RunningRequest, cached: int) -> int:
    start = None if generation.producer is None else generation.producer.start
    return max(0, (generation.num_prompt_tokens if start is None else start) - cached)


def _too_large(generation: RunningRequest, error: OutOfBlocks) -> AgentCacheError:
    if isinstance(error, OutOfMemory):
        return Overloaded(str(error), code="insufficient_memory")
    return InvalidRequest(str(error), param=generation.request.prompt_param, code="insufficient_memory")

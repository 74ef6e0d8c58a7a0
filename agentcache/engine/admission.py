"""Into the cache and out of it: who gets a sequence and blocks, waits for files, or has to give way."""

from __future__ import annotations

from collections.abc import Callable

from agentcache.agents.restore import Restored, Restorer
from agentcache.blocks.keys import Namespace
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.sequence import CacheSequence
from agentcache.blocks.snapshot_plan import SnapshotPlan
from agentcache.engine.device import Device
from agentcache.engine.generation import Generation, Outcome, State
from agentcache.engine.requests import Requests
from agentcache.engine.room import Growth, has_room
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.trunk import Trunk
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks, OutOfMemory, Overloaded
from agentcache.report import CachedTokens, FinishReason


class Admission:
    """Opens generations' sequences in the cache. Belongs to the engine thread.

    Args:
        end: ends a generation, with what it has or with an error.
    """

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        cache: PrefixCache,
        device: Device,
        restorer: Restorer,
        trunk: Trunk,
        namespace: Callable[[str], Namespace],
        end: Callable[[Generation, Outcome], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._device = device
        self._restorer = restorer
        self._trunk = trunk
        self._namespace = namespace
        self._end = end

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
                self._end(generation, _too_large(generation, error))

    def _open(self, generation: Generation, busy: bool) -> None:
        """Open a waiting request's sequence; starts its restore where blocks are on disk only."""
        root = self._namespace(generation.request.salt).root
        if not busy:
            self._cache.allocator.make_room(len(generation.token_ids) + 1)
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
            self._restorer.restore(sequence, lambda restored: self._restored(generation, sequence, restored))

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
        )

    def _begin_state(self, generation: Generation, sequence: CacheSequence) -> None:
        """The row takes the snapshot that it goes on from, if it does; arrays are values, so the slot is free then."""
        if sequence.state is not None:
            generation.begin_state(self._device.row_state(sequence.state))
            self._cache.state_taken(sequence)

    def _usable_prefix(self, generation: Generation, root: str) -> CachedPrefix:
        # One token at least is computed, for its logits; all are where the prompt's own logprobs are wanted.
        limit = len(generation.token_ids) - 1
        if generation.request.sampling.prompt_logprobs and generation.num_generated == 0:
            limit = 0
        return self._cache.match_prefix(root, generation.token_ids, limit, generation.producer)

    def _check_room(self, generation: Generation, prefix: CachedPrefix) -> None:
        """Raise OutOfBlocks if the known tokens of all who are admitted would not fit: one would preempt another."""
        admitted = (*self._requests.running, *self._requests.loading)
        running = [Growth(other.open_sequence.tables, len(other.token_ids) + 1) for other in admitted]
        if not has_room(self._cache.allocator, running, prefix, len(generation.token_ids) + 1):
            raise OutOfBlocks("running requests need all the blocks there are")

    def _restored(self, generation: Generation, sequence: CacheSequence, restored: Restored) -> None:
        if generation.sequence is not sequence:
            return  # cancelled meanwhile
        self._device.evaluate()
        generation.restored_bytes += restored.num_bytes
        generation.restore_seconds += restored.seconds
        if not restored.complete:
            # What was wrong is in quarantine; match again and compute the rest.
            self.abandon_sequence(generation)
        else:
            self._begin_state(generation, sequence)
        self._requests.move(generation, State.RUNNING if restored.complete else State.WAITING)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, num_tokens: int) -> bool:
        """Blocks for the next tokens; False if the request has to wait for them or ends for want of them."""
        while generation.state is State.RUNNING:
            try:
                self._cache.reserve(generation.open_sequence, generation.in_flight + num_tokens)
                return True
            except OutOfBlocks as error:
                if generation.in_flight:
                    return False  # what is under way may end others, or show that this was the last token
                self._out_of_blocks(generation, error)
        return False

    def _out_of_blocks(self, generation: Generation, error: OutOfBlocks) -> None:
        victim = self._scheduler.victim()
        if victim is not None:
            self.preempt(victim)
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
            self._cache.abandon(generation.sequence)
            generation.lose_sequence()


def _note_cached(generation: Generation, prefix: CachedPrefix) -> None:
    own = min(generation.own_tokens, prefix.num_tokens)
    # What is there but for a state to go on from is computed again, and not lost.
    generation.lost_tokens = max(0, generation.expected_tokens - max(prefix.num_tokens, prefix.known_tokens))
    generation.cached = CachedTokens(own=own, shared=prefix.num_tokens - own)
    generation.computed_prompt_tokens = generation.num_prompt_tokens - prefix.num_tokens


def _too_large(generation: Generation, error: OutOfBlocks) -> AgentCacheError:
    if isinstance(error, OutOfMemory):
        return Overloaded(str(error), code="insufficient_memory")
    return InvalidRequest(str(error), param=generation.request.prompt_param, code="insufficient_memory")

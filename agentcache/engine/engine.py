"""The engine: requests in, updates out, one step at a time. All of it runs on the one thread that owns MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.agents.memory import AgentMemory
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine.admission import Admission
from agentcache.engine.counters import Counters, cache_stats
from agentcache.engine.device import Device, Step
from agentcache.engine.generation import LIVE, Generation, Outcome, State
from agentcache.engine.requests import Requests
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.trunk import Trunk
from agentcache.engine.turns import Turns
from agentcache.errors import AgentCacheError, ContextLengthExceeded, InvalidRequest, RequestCancelled
from agentcache.models.loader import LoadedModel
from agentcache.report import CacheStats, FinishReason


@dataclass(frozen=True)
class Parts:
    """What an engine works with. `open_engine` makes the real ones."""

    loaded: LoadedModel
    cache: PrefixCache
    device: Device
    requests: Requests
    scheduler: Scheduler
    turns: Turns
    agents: AgentTable
    memory: AgentMemory
    persistence: Persistence
    restorer: Restorer
    adapters: AdapterWeightSet
    trunk: Trunk
    ram_budget: int


class Engine:
    """A model, its cache and the requests on it."""

    def __init__(self, parts: Parts) -> None:
        self.loaded = parts.loaded
        self.cache = parts.cache
        self.device = parts.device
        self.requests = parts.requests
        self.scheduler = parts.scheduler
        self.turns = parts.turns
        self.agents = parts.agents
        self.memory = parts.memory
        self.persistence = parts.persistence
        self.restorer = parts.restorer
        self.adapters = parts.adapters
        self.trunk = parts.trunk
        self.counters = Counters()
        self._ram_budget = parts.ram_budget
        self._under_way: Step | None = None
        self._admission = Admission(
            parts.requests,
            parts.scheduler,
            parts.cache,
            parts.device,
            parts.restorer,
            parts.trunk,
            parts.loaded.namespace,
            self.end,
        )

    def close(self) -> None:
        """Write what is queued and let go of the cache folder.

        What is then posted of it comes too late to do anything: run what is posted until nothing `is_writing` before.
        """
        try:
            self.device.wait()
        finally:  # also when the device has failed
            self.restorer.close()
            self.persistence.close()

    # -- requests in ------------------------------------------------------------------------------------------------

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have now; from any thread."""
        return min(self.loaded.max_context, self.cache.slots.max_tokens()) - 1

    def check(self, num_prompt_tokens: int, param: str = "prompt", *, counted: bool = True) -> None:
        """Refuse a prompt that cannot run, before anything is done for it.

        Args:
            param: what the wire calls the prompt.
            counted: whether all its tokens have been counted; else it has at least so many.
        """
        how_many = f"the prompt has {'' if counted else 'at least '}{num_prompt_tokens} tokens"
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param=param)
        if num_prompt_tokens >= self.loaded.max_context:
            raise ContextLengthExceeded(
                f"{how_many}; with at least one to generate, the model's context of "
                f"{self.loaded.max_context} is exceeded",
                param=param,
            )
        if num_prompt_tokens + 1 > self.cache.slots.max_tokens():
            raise InvalidRequest(
                f"{how_many}; the RAM budget holds {self.cache.slots.max_tokens()}",
                param=param,
                code="insufficient_memory",
            )

    # -- the life of a request ----------------------------------------------------------------------------------------

    def add(self, generation: Generation) -> None:
        """Begin a request's turn and queue it; one that cannot have a turn hears of it."""
        try:
            self.turns.begin(generation)
        except AgentCacheError as error:
            self.requests.move(generation, State.FAILED)
            generation.emit(error)
            return
        self.device.prepare(generation)
        self.requests.move(generation, State.WAITING)

    def end(self, generation: Generation, outcome: Outcome) -> None:
        """The one way out, for whatever reason. What is being saved, or has ended, stays as it is.

        Args:
            outcome: why it is complete, and its memory is kept; or an error, and its agent is as before.
        """
        if generation.state not in LIVE:
            return
        self.scheduler.stalled = False  # its blocks are free, or will be
        if isinstance(outcome, FinishReason):
            self.requests.move(generation, State.SAVING)
            generation.finish_reason = outcome
            self.counters.cached_tokens += generation.cached.own + generation.cached.shared
            self.turns.finish(generation)
        else:
            self.requests.move(generation, State.FAILED)
            self._admission.give_up_place(generation)
            self.turns.drop(generation)
            generation.emit(outcome)

    def cancel(self, generation: Generation) -> None:
        """Stop working on a request; its agent stays as it was before, its blocks are free at once."""
        if generation.state in LIVE:
            self.counters.cancelled += 1
            self.end(generation, RequestCancelled("the request was cancelled"))

    def preempt(self, generation: Generation) -> None:
        """A running request gives up its place in the cache, and waits for another."""
        self._admission.preempt(generation)

    def drop_all(self, error: AgentCacheError) -> None:
        """End every request that is not complete; it leaves no trace."""
        for generation in list(self.requests):
            self.end(generation, error)

    def fail_all(self, error: AgentCacheError) -> None:
        """Tell everyone whose request is not complete that nothing more comes, and touch nothing."""
        for generation in list(self.requests):
            generation.emit(error)

    @property
    def is_writing(self) -> bool:
        """Whether something is still on its way to the disk: who waits for its turn to be safe is told when it is."""
        return self.persistence.is_writing

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._under_way is not None or self.scheduler.has_work

    def step(self) -> None:
        """Build the next batch while the device computes the last one; start it; hand out what the last one gave."""
        self.trunk.sweep()
        self._admission.admit()
        following = self._build(self.scheduler.schedule())
        done, self._under_way = self._under_way, following
        if done is not None:
            done.wait()
        if following is not None:
            following.start()
        if done is not None:
            self._note_time(done)
            self._settle(done)

    def _build(self, plan: dict[Generation, int]) -> Step | None:
        fitting = self.device.limit(plan)
        if plan and not fitting and self._under_way is None:
            self._admission.give_up(next(iter(plan)))
        ready = [generation for generation, count in fitting.items() if self._admission.reserve(generation, count)]
        # Making room for one may have preempted another.
        rows = [generation for generation in ready if generation.state is State.RUNNING]
        if not rows:
            return None
        return self.device.build(rows, fitting[rows[0]], self._under_way, contended=self.scheduler.contended)

    def _note_time(self, batch: Step) -> None:
        self.counters.note(batch)
        if batch.is_chunk:
            self.device.release_buffers()
            whole = batch.context >= batch.rows[0].generation.trunk_end
            self.scheduler.pace.chunk_took(
                batch.seconds, batch.num_tokens, batch.context, contended=batch.contended, whole=whole
            )
        else:
            self.scheduler.pace.step_took(batch.seconds, contended=batch.contended)

    def _settle(self, batch: Step) -> None:
        """Take what a batch has computed: keys and values into the cache, tokens to those who asked for them."""
        for result in batch.results():
            generation = result.row.generation
            generation.in_flight -= batch.num_tokens
            if generation.wants_prompt_logprobs:
                self.turns.note_prompt_scores(generation, result.prompt_scores)
            start = generation.num_computed
            self._advance(generation, generation.token_ids[start : start + batch.num_tokens])
            if result.token is not None:
                before = generation.num_generated
                reason = self.turns.take(generation, result.token, result.score)
                self.counters.generated_tokens += generation.num_generated - before
                if reason is not None:
                    self.end(generation, reason)

    def _advance(self, generation: Generation, token_ids: list[int]) -> None:
        sequence = generation.place
        published = self.cache.advance(sequence, token_ids)
        self.trunk.advance(sequence)
        record = generation.record
        if published and record is not None and self.persistence.fits(record, generation.num_prompt_tokens):
            generation.saved_early += published
            self.persistence.save_blocks(sequence, published, generation.note_written)
        self.cache.leave_window(sequence)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Evict every block from RAM that nobody is reading; agents come back warm."""
        self.trunk.blocks.clear()
        evicted = True
        while evicted:  # leaves first: each round makes new ones
            evicted = sum(self.cache.slots.evict(node) for node in list(self.cache.tree.residents)) > 0

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless every block of cache and trunk is accounted for."""
        self.cache.check_integrity()
        self.trunk.check_integrity()

    def stats(self) -> CacheStats:
        stats = cache_stats(
            self.cache, self.device, self.requests, self.scheduler, self.persistence, self.counters, len(self.agents)
        )
        return replace(
            stats,
            ram_budget=self._ram_budget,
            adapter_ram_bytes=self.adapters.nbytes,
            trunk_ram_bytes=self.loaded.trunk.blocks.nbytes,
            computed_layer_tokens=self.loaded.trunk.layer_tokens,
        )

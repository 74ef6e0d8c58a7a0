"""The engine: requests in, updates out, one step at a time. All of it runs on the one thread that owns MLX."""

from __future__ import annotations

from collections.abc import Callable

from agentcache.blocks.keys import Namespace
from agentcache.blocks.prefix_cache import CachedPrefix, PrefixCache, Sequence
from agentcache.config import Config
from agentcache.errors import (
    AgentCacheError,
    ConfigError,
    ContextLengthExceeded,
    EngineStopped,
    InvalidRequest,
    OutOfBlocks,
    RequestError,
)
from agentcache.kv.store import Store
from agentcache.models.allocator import keep_freed_memory
from agentcache.models.loader import LoadedModel, load
from agentcache.models.runner import ModelRunner
from agentcache.models.sampler import Sampler
from agentcache.serving.agents import AgentTable
from agentcache.serving.generation import Generation
from agentcache.serving.memory import AgentMemory
from agentcache.serving.persistence import Persistence
from agentcache.serving.request import CachedTokens, CacheStats, FinishReason
from agentcache.serving.restore import Restored, Restorer
from agentcache.serving.scheduler import Scheduler
from agentcache.serving.turns import Turns

_IDLE_PREFILL_CHUNK = 1024
_PREALLOCATED_BYTES = 32 << 20


class Engine:
    """A model, its cache and the requests on it.

    Args:
        config: the settings.
        model_path: folder or hub id.
        post: runs a function on this thread soon; callable from any thread.

    Raises:
        UnsupportedModel, CacheFolderInUse, ConfigError, StoreError: it cannot start.
    """

    def __init__(self, config: Config, model_path: str, post: Callable[[Callable[[], None]], None]) -> None:
        keep_freed_memory()
        memo = config.cache_dir / "weights.json" if config.cache_dir.is_dir() else None
        self.loaded: LoadedModel = load(model_path, memo=memo, max_context=config.max_context)
        self.cache = PrefixCache(self.loaded.spec.groups, config.ram_budget)
        if config.ram_budget < self.cache.slots.min_ram_budget:
            raise ConfigError(f"ram_budget must be at least {self.cache.slots.min_ram_budget} bytes for this model")
        self.runner = ModelRunner(self.loaded, self.cache.slots.pools)
        store = Store(config.cache_dir, self.loaded.spec, self.loaded.fingerprint, disk_budget=config.disk_budget)
        self.agents = AgentTable(self.loaded.fingerprint, store.load_agents())
        self.persistence = Persistence(self.cache, self.runner, store, self.agents, self._namespace, post)
        self.restorer = Restorer(self.cache, self.runner, store, post)
        self.persistence.index()
        self.cache.slots.preallocate(min(config.ram_budget // 8, _PREALLOCATED_BYTES))
        self.runner.fit()
        self.restorer.warm_up(self.loaded.spec)
        windowed = any(group.window is not None for group in self.loaded.spec.groups)
        self.scheduler = Scheduler(
            max_running=config.max_concurrent_requests,
            prefill_chunk=config.prefill_chunk,
            # A larger chunk would hold more of a window's blocks at once than the window needs.
            idle_prefill_chunk=config.prefill_chunk if windowed else _IDLE_PREFILL_CHUNK,
        )
        self.turns = Turns(self.cache, self.loaded.tokenizer, self.agents, self.persistence, self._finished)
        self.memory = AgentMemory(
            self.cache, self.runner, self.agents, self.persistence, self.restorer, self._namespace
        )
        self._samplers: dict[Generation, Sampler] = {}
        self._cached_tokens = 0

    def close(self) -> None:
        """Write what is queued and let go of the cache folder."""
        self.restorer.close()
        self.persistence.close()

    def _namespace(self, salt: str) -> Namespace:
        return Namespace(self.loaded.fingerprint, self.loaded.spec.digest, salt)

    # -- requests in ------------------------------------------------------------------------------------------------

    def check(self, num_prompt_tokens: int, param: str = "prompt") -> None:
        """Refuse a prompt that cannot run, before anything is done for it. `param` is what the wire calls it."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param=param)
        if num_prompt_tokens >= self.loaded.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens; with at least one to generate, the model's context of "
                f"{self.loaded.max_context} is exceeded",
                param=param,
            )
        if num_prompt_tokens + 1 > self.cache.slots.max_tokens():
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens; the RAM budget holds {self.cache.slots.max_tokens()}",
                param=param,
                code="insufficient_memory",
            )

    def add(self, generation: Generation) -> None:
        """Begin a request's turn and queue it. Raises Conflict for an agent whose id clashes with another's."""
        self.turns.begin(generation)
        sampling = generation.request.sampling
        self._samplers[generation] = Sampler(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            seed=sampling.seed,
        )
        self.scheduler.add(generation)

    def cancel(self, generation: Generation) -> None:
        """Stop working on a request; its agent stays as it was before, its blocks are free at once."""
        if generation in self._samplers:  # else it has ended; what is being saved is saved
            self._release(generation)

    def fail_all(self, error: BaseException) -> None:
        """Tell every waiter that nothing more comes."""
        stopped = error if isinstance(error, RequestError) else EngineStopped(f"the engine has stopped: {error}")
        for generation in [*self.scheduler, *self.turns.ending]:
            generation.emit(stopped)

    def _fail(self, generation: Generation, error: AgentCacheError) -> None:
        self._release(generation)
        generation.emit(error)

    def _release(self, generation: Generation) -> None:
        """Let go of everything an unfinished generation holds."""
        self.scheduler.remove(generation)
        del self._samplers[generation]
        if generation.sequence is not None:
            self.cache.abandon(generation.sequence)
            generation.sequence = None
        self.turns.drop(generation)

    def _finished(self, generation: Generation) -> None:
        self.scheduler.remove(generation)
        del self._samplers[generation]
        self._cached_tokens += generation.cached.own + generation.cached.shared

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> None:
        """Admit, compute, hand out."""
        self._admit()
        plan = self.scheduler.schedule()
        rows = [generation for generation, num_tokens in plan.items() if num_tokens == 1]
        chunks = [generation for generation, num_tokens in plan.items() if num_tokens > 1]
        for batch in (rows, *([chunk] for chunk in chunks)):
            ready = [generation for generation in batch if self._reserve(generation, plan[generation])]
            # Making room for one may have preempted another.
            ready = [generation for generation in ready if generation in self.scheduler.running]
            if ready:
                self._forward(ready, plan[ready[0]])

    def _admit(self) -> None:
        while self.scheduler.waiting and self.scheduler.can_admit:
            generation = self.scheduler.waiting[0]
            self.scheduler.stalled = False
            try:
                self._open(generation)
            except OutOfBlocks as error:
                if self.scheduler.running or self.scheduler.loading:
                    self.scheduler.stalled = True
                    return  # others will give blocks back
                self._fail(generation, _too_large(generation, error))

    def _open(self, generation: Generation) -> None:
        """Give a waiting request its place in the cache; starts its restore where blocks are on disk only."""
        root = self._namespace(generation.request.salt).root
        if not self.scheduler.running and not self.scheduler.loading:
            self.cache.slots.make_room(len(generation.token_ids) + 1)
        prefix = self._usable_prefix(generation, root)
        in_ram = self.cache.in_ram(prefix)
        generation.sequence = sequence = self.cache.open(root, prefix)
        self.runner.copy_blocks(sequence.copies)
        self.scheduler.waiting.popleft()
        if generation.num_generated == 0:
            generation.prompt_logprobs.clear()  # after a preemption the prompt is computed again
            self._note_cached(generation, prefix)
        if in_ram:
            self.scheduler.running.append(generation)
        else:
            self._restore(generation)

    def _usable_prefix(self, generation: Generation, root: str) -> CachedPrefix:
        # One token at least is computed, for its logits; all are where the prompt's own logprobs are wanted.
        limit = len(generation.token_ids) - 1
        if generation.request.sampling.prompt_logprobs and generation.num_generated == 0:
            limit = 0
        return self.cache.match_prefix(root, generation.token_ids, limit)

    def _note_cached(self, generation: Generation, prefix: CachedPrefix) -> None:
        own = min(generation.own_tokens, prefix.num_tokens)
        generation.cached = CachedTokens(own=own, shared=prefix.num_tokens - own)
        generation.computed_prompt_tokens = generation.num_prompt_tokens - prefix.num_tokens

    def _restore(self, generation: Generation) -> None:
        self.scheduler.loading.append(generation)
        sequence = generation.place
        self.restorer.restore(sequence, lambda restored: self._restored(generation, sequence, restored))

    def _restored(self, generation: Generation, sequence: Sequence, restored: Restored) -> None:
        if generation.sequence is not sequence:
            return  # cancelled meanwhile
        self.runner.evaluate()
        generation.restored_bytes += restored.num_bytes
        generation.restore_seconds += restored.seconds
        self.scheduler.loading.remove(generation)
        if restored.complete:
            self.scheduler.running.append(generation)
            return
        # What was wrong is in quarantine; match again and compute the rest.
        self.cache.abandon(sequence)
        generation.sequence = None
        self.scheduler.waiting.appendleft(generation)

    def _reserve(self, generation: Generation, num_tokens: int) -> bool:
        """Blocks for the step; False if the request has to wait for them or ends for want of them."""
        while generation in self.scheduler.running:
            try:
                self.cache.reserve(generation.place, num_tokens)
                return True
            except OutOfBlocks as error:
                self._out_of_blocks(generation, error)
        return False

    def _out_of_blocks(self, generation: Generation, error: OutOfBlocks) -> None:
        victim = self.scheduler.youngest()
        if victim is not None:
            self.cache.abandon(victim.place)
            victim.sequence = None
            self.scheduler.preempt(victim)
        elif generation.num_generated:
            self.turns.finish(generation, FinishReason.LENGTH)
        else:
            self._fail(generation, _too_large(generation, error))

    def _forward(self, batch: list[Generation], num_tokens: int) -> None:
        """Compute `num_tokens` tokens of every row and choose the next token where a row is then complete."""
        inputs = [g.token_ids[g.num_computed : g.num_computed + num_tokens] for g in batch]
        all_logits = any(g.wants_prompt_logprobs for g in batch)
        tables = [g.place.tables for g in batch]
        logits = self.runner.forward(inputs, tables, [g.num_computed for g in batch], all_logits=all_logits)
        complete = [num_tokens == g.num_to_compute for g in batch]
        chosen = [
            self._samplers[g].choose(logits[i, -1], g.token_ids) if done and g.max_tokens else None
            for i, (g, done) in enumerate(zip(batch, complete, strict=True))
        ]
        self.runner.evaluate(*(token for token in chosen if token is not None), *([logits] if all_logits else []))
        if num_tokens > 1:
            self.runner.release_buffers()
        for i, generation in enumerate(batch):
            if generation.wants_prompt_logprobs:
                self.turns.note_prompt_logprobs(generation, logits[i])
            self._advance(generation, inputs[i])
            if complete[i]:
                self.turns.take(generation, chosen[i], logits[i, -1])

    def _advance(self, generation: Generation, token_ids: list[int]) -> None:
        sequence = generation.place
        published = self.cache.advance(sequence, token_ids)
        if generation.request.agent is not None:
            generation.saved_early += published
            self.persistence.save_blocks(sequence, published, generation.note_written)
        self.cache.leave_window(sequence)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Evict every block from RAM that nobody is reading; agents come back warm."""
        evicted = True
        while evicted:  # leaves first: each round makes new ones
            evicted = sum(self.cache.slots.evict(node) for node in list(self.cache.tree.residents)) > 0

    def stats(self) -> CacheStats:
        counts, store = self.cache.count_blocks(), self.persistence.store
        return CacheStats(
            ram_bytes=self.cache.slots.capacity_bytes,
            disk_bytes=store.disk_bytes,
            ram_budget=self.cache.slots.ram_budget,
            disk_budget=store.disk_budget,
            blocks_free=counts.free,
            blocks_live=counts.live,
            blocks_cached=counts.cached,
            agents=len(self.agents),
            quarantined=store.quarantined,
            written_bytes=store.written_bytes,
            read_bytes=store.read_bytes,
            computed_tokens=self.runner.forward_tokens,
            cached_tokens=self._cached_tokens,
            save_failures=self.persistence.save_failures,
        )


def _too_large(generation: Generation, error: OutOfBlocks) -> InvalidRequest:
    return InvalidRequest(str(error), param=generation.request.prompt_param, code="insufficient_memory")

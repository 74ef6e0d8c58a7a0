"""The engine: requests in, updates out, one step at a time. All of it runs on the one thread that owns MLX."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.agents.memory import AgentMemory
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.blocks.keys import Namespace
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.config import Config
from agentcache.engine.admission import Admission
from agentcache.engine.batch import Batch, BatchBuilder
from agentcache.engine.counters import Counters, cache_stats
from agentcache.engine.generation import Generation
from agentcache.engine.guard import MemoryGuard
from agentcache.engine.pace import Pace, idle_chunk
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.trunk import Trunk
from agentcache.engine.turns import Turns
from agentcache.engine.warm_up import warm_up
from agentcache.errors import AgentCacheError, ConfigError, ContextLengthExceeded, InvalidRequest
from agentcache.models.allocator import keep_freed_memory
from agentcache.models.footprint import Footprint
from agentcache.models.loader import LoadedModel, load
from agentcache.models.runner import ModelRunner
from agentcache.report import CacheStats
from agentcache.store.store import Store

_PREALLOCATED_BYTES = 32 << 20
# Of prefilling, until it has been measured: slow machines of their kind.
_CPU_FLOPS, _METAL_FLOPS, _CUDA_FLOPS = 50e9, 2e12, 50e12


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
        memo = config.cache_dir / "weights.json" if os.path.isdir(config.cache_dir) else None
        self.loaded: LoadedModel = load(model_path, memo=memo, max_context=config.max_context)
        self.cache = PrefixCache(self.loaded.spec.groups, config.ram_budget)
        if config.ram_budget < self.cache.slots.min_ram_budget:
            raise ConfigError(f"ram_budget must be at least {self.cache.slots.min_ram_budget} bytes for this model")
        self.runner = ModelRunner(self.loaded, self.cache.slots.pools)
        store = Store(config.cache_dir, self.loaded.spec, self.loaded.fingerprint, disk_budget=config.disk_budget)
        self.agents = AgentTable(self.loaded.fingerprint, store.load_agents())
        self.persistence = Persistence(
            self.cache, self.runner, store, self.agents, self._namespace, post, config.max_lineages
        )
        self.restorer = Restorer(self.cache, self.runner, store, post)
        self.persistence.index()
        self.cache.slots.preallocate(min(config.ram_budget // 8, _PREALLOCATED_BYTES))
        self.runner.fit()
        self._ram_budget = config.ram_budget
        self.scheduler = Scheduler(max_running=config.max_concurrent_requests, pace=self._pace(config))
        self.counters = Counters()
        self.turns = Turns(self.cache, self.loaded.tokenizer, self.agents, self.persistence, self._finished)
        self.memory = AgentMemory(
            self.cache, self.runner, self.agents, self.persistence, self.restorer, self._namespace
        )
        self.guard = MemoryGuard(Footprint.of(self.loaded.spec, self.loaded.config))
        self.adapters = AdapterWeightSet(self.loaded, self.runner, self.cache.slots)
        self.trunk = Trunk(self.cache, self.adapters, self._trunk_slots(config))
        self._builder = BatchBuilder(self.runner, self.adapters, self.trunk)
        self._under_way: Batch | None = None
        self._admission = Admission(
            self.scheduler,
            self.cache,
            self.runner,
            self.restorer,
            self.trunk,
            self._namespace,
            finish=self.turns.finish,
            fail=self._fail,
        )

    def warm_up(self) -> None:
        """Have the first request find a process that has computed something before."""
        warm_up(self.cache, self.runner, self.restorer, self.loaded.max_context)

    def _trunk_slots(self, config: Config) -> int:
        return config.trunk_budget // self.loaded.trunk.block_bytes() if config.trunk_budget else 0

    def _pace(self, config: Config) -> Pace:
        max_stall, token_seconds = config.max_stall_ms / 1e3, 2 * self.loaded.num_parameters / _assumed_flops()
        return Pace(
            max_stall=max_stall,
            decode_share=config.decode_share,
            chunk=config.prefill_chunk,
            idle_chunk=self._idle_chunk(config.prefill_chunk, max_stall, token_seconds),
            token_seconds=token_seconds,
        )

    def _idle_chunk(self, chunk: int, max_stall: float, token_seconds: float) -> int:
        windowed = any(group.window is not None for group in self.loaded.spec.groups)
        # A larger chunk would hold more of a window's blocks at once than the window needs. And on a CPU it only costs
        # time: without fused attention the scores of all its tokens are computed, also those that are masked.
        if windowed or mx.default_device() == mx.cpu:
            return chunk
        return idle_chunk(chunk, max_stall=max_stall, token_seconds=token_seconds)

    def close(self) -> None:
        """Write what is queued and let go of the cache folder.

        What is then posted of it comes too late to do anything: run what is posted until nothing `is_writing` before.
        """
        try:
            self.runner.wait()
        finally:  # also when the device has failed
            self.restorer.close()
            self.persistence.close()

    def _namespace(self, salt: str) -> Namespace:
        return Namespace(self.loaded.fingerprint, self.loaded.spec.digest, salt)

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

    def add(self, generation: Generation) -> None:
        """Begin a request's turn and queue it. Raises Conflict for an agent whose id clashes with another's."""
        self.turns.begin(generation)
        self._builder.add(generation)
        self.scheduler.add(generation)

    def cancel(self, generation: Generation) -> None:
        """Stop working on a request; its agent stays as it was before, its blocks are free at once."""
        if generation in self._builder:  # else it has ended; what is being saved is saved
            self.counters.cancelled += 1
            self._release(generation)

    @property
    def is_writing(self) -> bool:
        """Whether something is still on its way to the disk: who waits for its turn to be safe is told when it is."""
        return self.persistence.is_writing

    def drop_all(self, error: AgentCacheError) -> None:
        """End every request that is not complete; it leaves no trace."""
        for generation in list(self.scheduler):
            self._fail(generation, error)

    def fail_all(self, error: AgentCacheError) -> None:
        """Tell everyone whose request is not complete that nothing more comes, and touch nothing."""
        for generation in list(self.scheduler):
            generation.emit(error)

    def _fail(self, generation: Generation, error: AgentCacheError) -> None:
        self._release(generation)
        generation.emit(error)

    def _release(self, generation: Generation) -> None:
        """Let go of everything an unfinished generation holds."""
        self._admission.release(generation)
        self._builder.remove(generation)
        self.turns.drop(generation)

    def _finished(self, generation: Generation) -> None:
        self.scheduler.remove(generation)
        self._builder.remove(generation)
        self.counters.cached_tokens += generation.cached.own + generation.cached.shared

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
            done.wait(self.runner)
        if following is not None:
            following.start(self.runner)
        if done is not None:
            self._note_time(done)
            self._settle(done)

    def _build(self, plan: dict[Generation, int]) -> Batch | None:
        fitting = self.guard.limit(plan)
        if plan and not fitting and self._under_way is None:
            self._admission.give_up(next(iter(plan)))
        ready = [generation for generation, count in fitting.items() if self._admission.reserve(generation, count)]
        # Making room for one may have preempted another.
        rows = [generation for generation in ready if generation in self.scheduler.running]
        if not rows:
            return None
        return self._builder.build(rows, fitting[rows[0]], self._under_way, contended=self.scheduler.contended)

    def _note_time(self, batch: Batch) -> None:
        self.counters.note(batch)
        if batch.is_chunk:
            self.runner.release_buffers()
            whole = batch.context >= batch.rows[0].generation.trunk_end
            self.scheduler.pace.chunk_took(
                batch.seconds, batch.num_tokens, batch.context, contended=batch.contended, whole=whole
            )
        else:
            self.scheduler.pace.step_took(batch.seconds, contended=batch.contended)

    def _settle(self, batch: Batch) -> None:
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
                self.turns.take(generation, result.token, result.score)
                self.counters.generated_tokens += generation.num_generated - before

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
        stats = cache_stats(self.cache, self.runner, self.scheduler, self.persistence, self.counters, len(self.agents))
        return replace(
            stats,
            ram_budget=self._ram_budget,
            adapter_ram_bytes=self.adapters.nbytes,
            trunk_ram_bytes=self.loaded.trunk.blocks.nbytes,
            computed_layer_tokens=self.loaded.trunk.layer_tokens,
        )


def _assumed_flops() -> float:
    if mx.default_device() == mx.cpu:
        return _CPU_FLOPS
    return _CUDA_FLOPS if mx.cuda.is_available() else _METAL_FLOPS

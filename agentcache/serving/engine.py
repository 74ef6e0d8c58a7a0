"""The engine: requests in, updates out, one step at a time. All of it runs on the one thread that owns MLX."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE, Namespace
from agentcache.blocks.prefix_cache import CachedPrefix, PrefixCache, Sequence
from agentcache.blocks.prefix_match import Transcript, len_common_prefix
from agentcache.config import Config
from agentcache.errors import AgentCacheError, ConfigError, ContextLengthExceeded, EngineStopped, InvalidRequest, OutOfBlocks, RequestError
from agentcache.kv.manifest import AgentRecord
from agentcache.kv.store import Store
from agentcache.models.loader import LoadedModel, load
from agentcache.models.runner import ModelRunner
from agentcache.models.sampler import Sampler, log_softmax, top_logprobs
from agentcache.serving.agents import AgentTable
from agentcache.serving.generation import Generation
from agentcache.serving.persistence import Persistence, Saved
from agentcache.serving.request import (
    AgentInfo,
    CachedTokens,
    CacheState,
    CacheStats,
    FinishReason,
    Report,
    RestoreReport,
    TokenLogprob,
    Update,
)
from agentcache.serving.restore import Restored, Restorer
from agentcache.serving.scheduler import Scheduler

log = logging.getLogger("agentcache.engine")

_IDLE_PREFILL_CHUNK = 1024


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
        memo = Path(config.cache_dir) / "weights.json"
        self.loaded: LoadedModel = load(model_path, memo=memo if memo.parent.is_dir() else None, max_context=config.max_context)
        self.cache = PrefixCache(self.loaded.spec.groups, config.ram_budget)
        if config.ram_budget < self.cache.min_ram_budget:
            raise ConfigError(f"ram_budget must be at least {self.cache.min_ram_budget} bytes for this model")
        self.runner = ModelRunner(self.loaded, self.cache.pools)
        store = Store(config.cache_dir, self.loaded.spec, self.loaded.fingerprint, disk_budget=config.disk_budget)
        self.agents = AgentTable(self.loaded.fingerprint, store.load_agents())
        self.persistence = Persistence(
            self.loaded.spec, self.cache, self.runner, store, self.agents, self._namespace, post
        )
        self.restorer = Restorer(self.cache, self.runner, store, post)
        self.persistence.index()
        windowed = any(group.window is not None for group in self.loaded.spec.groups)
        self.scheduler = Scheduler(
            max_running=config.max_concurrent_requests,
            prefill_chunk=config.prefill_chunk,
            # A larger chunk would hold more of a window's blocks at once than the window needs.
            idle_prefill_chunk=config.prefill_chunk if windowed else _IDLE_PREFILL_CHUNK,
        )
        self._samplers: dict[Generation, Sampler] = {}
        self._ending: set[Generation] = set()
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
        if num_prompt_tokens + 1 > self.cache.max_tokens():
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens; the RAM budget holds {self.cache.max_tokens()} of one request",
                param=param,
                code="insufficient_memory",
            )

    def add(self, generation: Generation) -> None:
        """Queue a request."""
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
        if generation in self._ending:
            return  # what is being saved is saved
        generation.cancelled = True
        self._release(generation)

    def fail_all(self, error: BaseException) -> None:
        """Tell every waiter that nothing more comes."""
        # A shutdown is told as it is; what went wrong with us is for the log.
        stopped = error if isinstance(error, RequestError) else EngineStopped(f"the engine has stopped: {error}")
        for generation in [*self.scheduler, *self._ending]:
            generation.emit(stopped)

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
            try:
                self._open(generation)
            except OutOfBlocks as error:
                if self.scheduler.running or self.scheduler.loading:
                    return  # others will give blocks back
                self._fail(generation, _too_large(generation, error))

    def _open(self, generation: Generation) -> None:
        """Give a waiting request its place in the cache; starts its restore where blocks are on disk only."""
        root = self._namespace(generation.request.salt).root
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
        sequence = generation.sequence
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
                self.cache.reserve(generation.sequence, num_tokens)
                return True
            except OutOfBlocks as error:
                self._out_of_blocks(generation, error)
        return False

    def _out_of_blocks(self, generation: Generation, error: OutOfBlocks) -> None:
        victim = self.scheduler.youngest()
        if victim is not None:
            self.cache.abandon(victim.sequence)
            victim.sequence = None
            self.scheduler.preempt(victim)
        elif generation.num_generated:
            self._finish(generation, FinishReason.LENGTH)
        else:
            self._fail(generation, _too_large(generation, error))

    def _forward(self, batch: list[Generation], num_tokens: int) -> None:
        """Compute `num_tokens` tokens of every row and choose the next token where a row is then complete."""
        inputs = [g.token_ids[g.num_computed : g.num_computed + num_tokens] for g in batch]
        all_logits = any(self._wants_prompt_logprobs(g) for g in batch)
        logits = self.runner.forward(
            inputs, [g.sequence.tables for g in batch], [g.num_computed for g in batch], all_logits=all_logits
        )
        complete = [num_tokens == g.num_to_compute for g in batch]
        chosen = [
            self._samplers[g].choose(logits[i, -1], g.token_ids) if done and g.max_tokens else None
            for i, (g, done) in enumerate(zip(batch, complete, strict=True))
        ]
        self.runner.evaluate(*(token for token in chosen if token is not None), *([logits] if all_logits else []))
        for i, generation in enumerate(batch):
            if self._wants_prompt_logprobs(generation):
                self._note_prompt_logprobs(generation, logits[i], num_tokens)
            self._advance(generation, inputs[i])
            if complete[i]:
                self._take(generation, chosen[i], logits[i, -1])

    def _advance(self, generation: Generation, token_ids: list[int]) -> None:
        published = self.cache.advance(generation.sequence, token_ids)
        if generation.request.agent is not None:
            self.persistence.save_blocks(generation.sequence, published, partial(self._note_written, generation))
        self.cache.leave_window(generation.sequence)

    @staticmethod
    def _note_written(generation: Generation, num_bytes: int) -> None:
        generation.written_bytes += num_bytes

    # -- tokens out -------------------------------------------------------------------------------------------------

    def _take(self, generation: Generation, chosen: mx.array | None, logits: mx.array) -> None:
        """A row's known tokens are all computed: take the chosen one, or end."""
        first = generation.first_token_at is None
        if first:
            generation.first_token_at = time.perf_counter()
            self._announce(generation)
        if chosen is None:
            self._finish(generation, FinishReason.LENGTH)
            return
        token = int(chosen.item())
        sampling = generation.request.sampling
        if token in self.loaded.tokenizer.eos_ids and not sampling.ignore_eos:
            self._finish(generation, FinishReason.STOP)
            return
        logprobs = () if sampling.logprobs is None else (self._logprob(log_softmax(logits), token, sampling.logprobs),)
        generation.token_ids.append(token)
        text = generation.output.add(token)
        generation.emit(Update(text=text, token_ids=(token,), logprobs=logprobs))
        if generation.output.stopped:
            self._finish(generation, FinishReason.STOP)
        elif generation.num_generated >= generation.max_tokens:
            self._finish(generation, FinishReason.LENGTH)

    def _announce(self, generation: Generation) -> None:
        prompt = tuple(generation.token_ids[: generation.num_prompt_tokens])
        logprobs = tuple(generation.prompt_logprobs) if generation.request.sampling.prompt_logprobs else None
        generation.emit(Update(prompt_token_ids=prompt, prompt_logprobs=logprobs))

    def _wants_prompt_logprobs(self, generation: Generation) -> bool:
        return generation.request.sampling.prompt_logprobs and generation.num_generated == 0

    def _note_prompt_logprobs(self, generation: Generation, logits: mx.array, num_tokens: int) -> None:
        """`logits` [num_tokens, vocabulary] predict the tokens after the ones just computed."""
        logprobs = log_softmax(logits)
        if not generation.prompt_logprobs:
            first = generation.token_ids[0]
            generation.prompt_logprobs.append(TokenLogprob(first, self.loaded.tokenizer.token_text(first), None))
        start = generation.num_computed + 1
        for offset, token in enumerate(generation.token_ids[start : start + num_tokens]):
            count = generation.request.sampling.logprobs or 0
            generation.prompt_logprobs.append(self._logprob(logprobs[offset], token, count))

    def _logprob(self, logprobs: mx.array, token: int, count: int) -> TokenLogprob:
        text = self.loaded.tokenizer.token_text
        ids, values = top_logprobs(logprobs, count)
        top = tuple((i, text(i), value) for i, value in zip(ids, values, strict=True))
        return TokenLogprob(token, text(token), logprobs[token].item(), top)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        """End a generation: show the rest of its text, keep its memory, report when that is safe."""
        generation.finish_reason = reason
        rest = generation.output.finish()
        if rest:
            generation.emit(Update(text=rest))
        self.scheduler.remove(generation)
        self._ending.add(generation)
        self._cached_tokens += generation.cached.own + generation.cached.shared
        transcript = self._transcript(generation)
        if generation.request.agent is None:
            self.cache.close(generation.sequence, min(generation.num_computed, len(transcript)))
            self._end(generation, None)
        else:
            self._commit(generation, transcript)

    def _transcript(self, generation: Generation) -> Transcript:
        generated = generation.output.generated()
        prompt = generation.match.transcript
        if not generated.ids:
            return prompt
        marked = self.loaded.tokenizer.marked_ends(generated.text, generated.ends)
        return prompt.extended(marked.text, generated.ids, marked.ends, "generated")

    def _commit(self, generation: Generation, transcript: Transcript) -> None:
        sequence = generation.sequence
        keep = min(sequence.num_tokens, len(transcript))
        published, path = sequence.nodes, list(sequence.nodes[: keep // BLOCK_SIZE])
        tail = self.cache.close(sequence, keep)
        extra = []
        if tail is not None:
            if keep // BLOCK_SIZE < len(published):
                extra = self.persistence.tail_targets(tail, published[keep // BLOCK_SIZE])
            path.append(tail)
        record = replace(
            generation.record,
            salt=generation.request.salt,
            last_used=time.time(),
            transcript=transcript,
            num_saved=keep,
            chains=tuple(node.chain for node in path),
        )
        self.persistence.commit(record, path, extra, lambda saved: self._end(generation, saved))

    def _end(self, generation: Generation, saved: Saved | None) -> None:
        """The last update, when the turn is safe on disk or known not to be."""
        self._ending.discard(generation)
        del self._samplers[generation]
        self._set_idle(generation)
        generation.emit(Update(finish_reason=generation.finish_reason, report=self._report(generation, saved)))

    def _report(self, generation: Generation, saved: Saved | None) -> Report:
        cached = generation.cached
        num_cached = cached.own + cached.shared
        state = CacheState.WARM if generation.restored_bytes else CacheState.HOT
        first_token_at = generation.first_token_at or time.perf_counter()
        return Report(
            agent=generation.request.agent,
            cache_state=state if num_cached else CacheState.COLD,
            match=generation.match.match,
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_generated,
            cached_tokens=cached,
            computed_tokens=generation.computed_prompt_tokens,
            time_to_first_token_ms=(first_token_at - generation.submitted_at) * 1e3,
            restore_ms=generation.restore_seconds * 1e3,
            restored_bytes=generation.restored_bytes,
            total_ms=(time.perf_counter() - generation.submitted_at) * 1e3,
            saved=None if saved is None else saved.error is None,
            save_error=None if saved is None else saved.error,
            written_bytes=generation.written_bytes + (saved.written_bytes if saved else 0),
        )

    def _fail(self, generation: Generation, error: AgentCacheError) -> None:
        self._release(generation)
        generation.emit(error)

    def _release(self, generation: Generation) -> None:
        """Let go of everything a generation holds."""
        self.scheduler.remove(generation)
        if generation.sequence is not None:
            self.cache.abandon(generation.sequence)
            generation.sequence = None
        self._samplers.pop(generation, None)
        self._set_idle(generation)

    def _set_idle(self, generation: Generation) -> None:
        if generation.request.agent is not None:
            self.agents.busy.discard(generation.request.agent)

    # -- agents -----------------------------------------------------------------------------------------------------

    def begin_turn(self, generation: Generation) -> None:
        """Note that the request's agent is at work, and what of the prompt is its own. Raises Conflict.

        An agent that is not there yet is made by the end of its first turn.
        """
        agent = generation.request.agent
        if agent is None:
            return
        generation.record = self.agents.get(agent) if agent in self.agents else self.agents.new(agent, param="agent")
        self.agents.busy.add(agent)
        generation.own_tokens = len_common_prefix(generation.record.transcript.ids, generation.match.transcript.ids)

    def info(self, record: AgentRecord) -> AgentInfo:
        """An agent as clients see it."""
        ids = record.transcript.ids
        prefix = self.cache.match_prefix(self._namespace(record.salt).root, ids, len(ids))
        groups = self.cache.groups
        num_ram = sum(groups[i].bytes_per_block for node in prefix.all_nodes for i in node.block_ids)
        # Of the blocks that its manifest names: the tree may know longer tails of others with the same beginning.
        on_disk = filter(None, map(self.cache.tree.node, record.chains))
        num_disk = sum(groups[i].bytes_per_block * node.num_tokens // BLOCK_SIZE for node in on_disk for i in node.stored)
        state = CacheState.HOT if self.cache.in_ram(prefix) else CacheState.WARM
        return AgentInfo(
            id=record.id,
            tokens=len(ids),
            blocks=len(prefix.all_nodes),
            cache_state=state if prefix.num_tokens else CacheState.COLD,
            ram_bytes=num_ram,
            disk_bytes=num_disk,
            created=record.created,
            last_used=record.last_used,
            adapter=record.adapter,
            policy=record.policy,
        )

    def restore(self, record: AgentRecord, done: Callable[[RestoreReport | AgentCacheError], None]) -> None:
        """Bring an agent's blocks into RAM; `done` gets the report. What files do not give is left out."""
        started = time.perf_counter()
        root, ids = self._namespace(record.salt).root, record.transcript.ids
        restored_bytes = 0

        def attempt() -> None:
            try:
                sequence = self.cache.open(root, self.cache.match_prefix(root, ids, len(ids)))
            except OutOfBlocks as error:
                done(InvalidRequest(str(error), code="insufficient_memory"))
                return
            self.runner.copy_blocks(sequence.copies)
            self.restorer.restore(sequence, lambda restored: settle(sequence, restored))

        def settle(sequence: Sequence, restored: Restored) -> None:
            nonlocal restored_bytes
            restored_bytes += restored.num_bytes
            self.runner.evaluate()
            self.cache.abandon(sequence)  # what was loaded is the tree's by now
            if not restored.complete:
                attempt()
                return
            elapsed_ms = (time.perf_counter() - started) * 1e3
            done(RestoreReport(len(ids), restored_bytes, elapsed_ms, self.info(record).cache_state))

        attempt()

    def save(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        """Write what of an agent's memory is in RAM but not on disk (after a failed save), then its record."""
        prefix = self.cache.match_prefix(self._namespace(record.salt).root, record.transcript.ids, len(record.transcript))
        nodes = prefix.all_nodes
        saved = replace(record, num_saved=prefix.num_tokens, chains=tuple(node.chain for node in nodes))
        if prefix.tail is not None and prefix.tail_tokens < prefix.tail.num_tokens:
            nodes = prefix.nodes
            saved = replace(saved, num_saved=len(nodes) * BLOCK_SIZE, chains=saved.chains[:-1])
        self.persistence.commit(saved, nodes, [], done)

    def clear(self) -> None:
        """Evict every block from RAM that nobody is reading; agents come back warm."""
        while any([self.cache.evict(node) for node in list(self.cache.tree.residents)]):
            pass

    def stats(self) -> CacheStats:
        counts, store = self.cache.count_blocks(), self.persistence.store
        return CacheStats(
            ram_bytes=self.cache.ram_capacity_bytes,
            disk_bytes=store.disk_bytes,
            ram_budget=self.cache.ram_budget,
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

"""Prompts that begin alike are computed once, also where they come at the same time.

A request's cached prefix is found when it is admitted. What others compute of its prompt after that, it takes block by
block. Where another has begun with the block that it needs next, it waits while that one is at work on it; and when its
own turn comes before the block is full, that one goes on in its place.
"""

from __future__ import annotations

from agentcache.agents.caches import KeptCache
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.sequence import CacheSequence
from agentcache.engine.generation import Generation
from agentcache.engine.requests import Requests


class CatchUp:
    """Belongs to the engine thread."""

    def __init__(self, requests: Requests, base: KeptCache) -> None:
        self._requests = requests
        self._base = base

    def look(self) -> None:
        """Before a step is planned: running prompts go on behind what others have computed."""
        running, waiting = self._requests.running, self.pass_on()
        prompts = [each for each in running if each.in_flight > 1 or each.num_to_launch > 1]
        for generation in running:
            generation.leader = None
        for generation in waiting:
            within = (each for each in prompts if each is not generation and self._is_within_next_of(generation, each))
            generation.leader = max(within, key=lambda each: each.in_flight, default=None)

    def pass_on(self) -> list[Generation]:
        """Prompts that wait take what there is for them now: behind a large chunk, before its windows are left.

        Returns these prompts.
        """
        running = self._requests.running
        if self._base.prefix.snapshots is not None or len(running) < 2:
            return []  # where there are snapshots, a row computes all tokens of which it needs the recurrent state
        waiting = [each for each in running if not each.in_flight and each.num_to_launch > 1]
        for generation in waiting:
            self._take(generation)
        return waiting

    def _take(self, generation: Generation) -> None:
        """All that is there, pass by pass."""
        while (num_tokens := self._tokens_ahead(generation)) > 0:
            begin = generation.num_computed
            generation.note_caught_up(begin, begin + num_tokens)
            overlay = generation.overlay
            for cache, sequence in self._written(generation):
                cache.prefix.catch_up(sequence, generation.token_ids, begin + num_tokens)
            generation.drop_passes()
            if overlay is not None:
                overlay.cache.prefix.leave_window(overlay.residuals)
            still_read = None if overlay is None else overlay.residuals.num_tokens
            self._base.prefix.leave_window(generation.open_sequence, still_read)

    def _tokens_ahead(self, generation: Generation) -> int:
        work, begin = generation.current, generation.num_computed
        if work.cut or generation.wants_prompt_logprobs:
            return 0
        end = len(generation.token_ids) - 1 if work.end is None else work.end  # the last one's logits are wanted
        if work.overlay is not None and not work.overlay.is_paired(begin):
            end = min(end, work.overlay.paired_from)
        if end - begin < BLOCK_SIZE:
            return 0
        written = self._written(generation)
        return min(each.prefix.tokens_ahead(sequence, generation.token_ids, end) for each, sequence in written)

    def _written(self, generation: Generation) -> list[tuple[KeptCache, CacheSequence]]:
        work = generation.current
        return [(self._base, work.writes)] if work.overlay is None else work.overlay.written(self._base)

    def _is_within_next_of(self, generation: Generation, other: Generation) -> bool:
        """Whether `other` has begun with the block that is next for `generation`, and has the tokens to fill it."""
        begin, work, theirs = generation.num_computed, generation.current, other.current
        end = begin + BLOCK_SIZE
        if begin % BLOCK_SIZE or not other.num_computed < end or not begin < other.num_launched:
            return False
        if end > min(each.num_launched + each.num_to_prefill for each in (generation, other)):
            return False
        if (work.overlay is None) is not (theirs.overlay is None) or work.cut or generation.wants_prompt_logprobs:
            return False
        return _are_alike(work.writes, theirs.writes) and generation.token_ids[:end] == other.token_ids[:end]


def _are_alike(one: CacheSequence, other: CacheSequence) -> bool:
    """Whether their blocks of the same tokens are the same; the root names the cache."""
    return one.root == other.root and one.producer == other.producer

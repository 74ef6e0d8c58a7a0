"""In-flight prefix sharing: concurrent prompts compute a common prefix once.

A running prompt takes blocks that other requests publish. It waits while its source request computes the block that it
needs next. If its turn comes first, the source request runs instead.
"""

from __future__ import annotations

from agentcache.agents.caches import KeptCache
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.engine.requests import Requests
from agentcache.engine.running_request import RunningRequest


class PrefixSharing:
    """Shares blocks between running prompts."""

    def __init__(self, requests: Requests, base: KeptCache) -> None:
        self._requests = requests
        self._base = base

    def look(self) -> None:
        """Take published blocks and choose source requests, before a step is planned."""
        running, waiting = self._requests.running, self.pass_on()
        prompts = [each for each in running if each.in_flight > 1 or each.num_to_launch > 1]
        for generation in running:
            generation.leader = None
        for generation in waiting:
            within = (each for each in prompts if each is not generation and self._is_within_next_of(generation, each))
            generation.leader = max(within, key=lambda each: each.in_flight, default=None)

    def pass_on(self) -> list[RunningRequest]:
        """Give waiting prompts published blocks, before a large chunk drops its windows. Returns these prompts."""
        running = self._requests.running
        if self._base.prefix.snapshots is not None or len(running) < 2:
            return []  # recurrent rows compute every token
        waiting = [each for each in running if not each.in_flight and each.num_to_launch > 1]
        for generation in waiting:
            self._take(generation)
        return waiting

    def _take(self, generation: RunningRequest) -> None:
        while (num_tokens := self._tokens_ahead(generation)) > 0:
            begin = generation.num_computed
            generation.note_caught_up(begin, begin + num_tokens)
            generation.open_plan.catch_up(generation.token_ids, begin + num_tokens)

    def _tokens_ahead(self, generation: RunningRequest) -> int:
        work, begin = generation.current, generation.num_computed
        if work.cut or generation.wants_prompt_logprobs:
            return 0
        end = len(generation.token_ids) - 1 if work.end is None else work.end  # its logits are needed
        plan = generation.open_plan
        if plan.written_until is not None:
            end = min(end, plan.written_until)
        if end - begin < BLOCK_SIZE:
            return 0
        return min(each.prefix.tokens_ahead(tables, generation.token_ids, end) for each, tables in plan.written)

    def _is_within_next_of(self, generation: RunningRequest, other: RunningRequest) -> bool:
        """Whether `other` computes the next block of `generation` and can fill it."""
        begin, work, theirs = generation.num_computed, generation.current, other.current
        end = begin + BLOCK_SIZE
        if begin % BLOCK_SIZE or not other.num_computed < end or not begin < other.num_launched:
            return False
        if end > min(each.num_launched + each.num_to_prefill for each in (generation, other)):
            return False
        if work.cut or generation.wants_prompt_logprobs:
            return False
        return _are_alike(work.writes, theirs.writes) and generation.token_ids[:end] == other.token_ids[:end]


def _are_alike(one: BlockTables, other: BlockTables) -> bool:
    """Whether equal tokens have equal blocks; the root identifies the cache."""
    return one.root == other.root and one.producer == other.producer

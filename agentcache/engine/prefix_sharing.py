from __future__ import annotations

from agentcache.agents.caches import KeptCache
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.engine.running_request import Requests, RunningRequest


class PrefixSharing:
    """In-flight prefix sharing: running prompts take blocks that other requests publish.

    A prompt waits while its source request computes its next block. If its turn comes, the source runs instead.
    """

    def __init__(self, requests: Requests, base: KeptCache) -> None:
        self._requests = requests
        self._base = base

    def look(self) -> None:
        """Take published blocks and choose source requests. Call before a step is planned."""
        waiting = self.pass_on()
        prompts = [each for each in self._requests.running if each.progress.in_flight > 1 or each.num_to_launch > 1]
        for running in self._requests.running:
            running.progress.source = None
        for running in waiting:
            within = (each for each in prompts if each is not running and self._is_within_next_of(running, each))
            running.progress.source = max(within, key=lambda each: each.progress.in_flight, default=None)

    def pass_on(self) -> list[RunningRequest]:
        """Give published blocks to waiting prompts, before a large chunk drops its windows; return these prompts."""
        if self._base.prefix.snapshots is not None or len(self._requests.running) < 2:
            return []  # recurrent rows compute every token
        waiting = [each for each in self._requests.running if not each.progress.in_flight and each.num_to_launch > 1]
        for running in waiting:
            self._take(running)
        return waiting

    def _take(self, running: RunningRequest) -> None:
        while (num_tokens := self._tokens_ahead(running)) > 0:
            begin = running.num_computed
            running.open_plan.catch_up(begin, begin + num_tokens)

    def _tokens_ahead(self, running: RunningRequest) -> int:
        work, begin = running.current, running.num_computed
        if work.cut or running.wants_prompt_logprobs:
            return 0
        end = len(running.token_ids) - 1 if work.end is None else work.end  # its logits are needed
        plan = running.open_plan
        if plan.written_until is not None:
            end = min(end, plan.written_until)
        if end - begin < BLOCK_SIZE:
            return 0
        return min(each.prefix.tokens_ahead(tables, running.token_ids, end) for each, tables in plan.written)

    def _is_within_next_of(self, running: RunningRequest, other: RunningRequest) -> bool:
        """Whether `other` computes the next block of `running` and can fill it."""
        begin, work, theirs = running.num_computed, running.current, other.current
        end = begin + BLOCK_SIZE
        if begin % BLOCK_SIZE or not other.num_computed < end or not begin < other.num_launched:
            return False
        if end > min(each.num_launched + each.num_to_prefill for each in (running, other)):
            return False
        if work.cut or running.wants_prompt_logprobs:
            return False
        return _are_alike(work.writes, theirs.writes) and running.token_ids[:end] == other.token_ids[:end]


def _are_alike(one: BlockTables, other: BlockTables) -> bool:
    """Whether equal tokens have equal blocks; the root identifies the cache."""
    return one.root == other.root and one.producer == other.producer

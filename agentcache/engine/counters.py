from __future__ import annotations

from dataclasses import asdict, dataclass

from agentcache.agents.caches import KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.api.stats import CacheStats
from agentcache.engine.device import Device, Step
from agentcache.engine.running_request import Requests
from agentcache.engine.scheduler import Scheduler


@dataclass
class Counters:
    """Totals since start, named as in `CacheStats`."""

    cached_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failed: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0

    def note(self, batch: Step) -> None:
        if batch.is_chunk:
            self.prefill_tokens += batch.num_tokens
            self.prefill_seconds += batch.seconds
        else:
            self.decode_steps += 1
            self.decode_rows += len(batch.rows)
            self.decode_seconds += batch.seconds


def cache_stats(
    caches: KeptCaches,
    device: Device,
    requests: Requests,
    scheduler: Scheduler,
    persistence: Persistence,
    counters: Counters,
    num_agents: int,
) -> CacheStats:
    cache, store = caches.base.prefix, persistence.store
    budget = store.usage.plan
    counts = [each.prefix.count_blocks() for each in caches]
    return CacheStats(
        ram_bytes=cache.allocator.capacity_bytes,
        disk_bytes=store.usage.total,
        ram_budget=cache.ledger.budget,
        disk_budget=budget.num_bytes,
        disk_budget_kind=budget.kind,
        disk_budget_reason=budget.reason,
        blocks_free=sum(each.free for each in counts),
        blocks_live=sum(each.live for each in counts),
        blocks_cached=sum(each.cached for each in counts),
        agents=num_agents,
        quarantined=store.usage.quarantine.count,
        written_bytes=store.usage.written,
        read_bytes=store.usage.read,
        computed_tokens=device.computed_tokens,
        save_failures=persistence.turns.failures,
        running=len(requests.running),
        waiting=len(requests.waiting) + len(requests.loading),
        preemptions=scheduler.preemptions,
        copied_blocks=device.copied_blocks,
        ram_accounts=cache.ledger.statement(),
        disk_bytes_by=store.usage.by_kind,
        evicted_blocks=caches.evicted_blocks,
        **asdict(counters),
    )

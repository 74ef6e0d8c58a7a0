from __future__ import annotations

import logging

from agentcache.agents.caches import KeptCaches
from agentcache.agents.operations import Eviction
from agentcache.engine.device import Device
from agentcache.engine.scheduler import Scheduler
from agentcache.plans.planner import Planner
from agentcache.system.memory import Level

log = logging.getLogger("agentcache.engine")

_SHARES = {Level.WARNING: 0.5, Level.CRITICAL: 1.0}  # of unread blocks and checkpoints


class MemoryRelief:
    """Frees memory under pressure: saved blocks leave RAM before requests are refused.

    Unsaved checkpoints are written first and evicted at the next call.
    """

    def __init__(
        self,
        caches: KeptCaches,
        device: Device,
        scheduler: Scheduler,
        eviction: Eviction,
        planner: Planner,
    ) -> None:
        self.level = Level.NORMAL
        self.evicted_blocks = 0
        self.freed_bytes = 0
        self._caches = caches
        self._cache = caches.base.prefix
        self._device = device
        self._scheduler = scheduler
        self._eviction = eviction
        self._planner = planner

    def relieve(self, level: Level) -> bool:
        """Free memory, on change and while it lasts. Returns whether only running requests hold more."""
        self._enter(level)
        if level is Level.NORMAL:
            return False
        evicted = self._eviction.evict_unread(_SHARES[level])
        for account in self._cache.ledger.sharing:
            if account.on_loan and account.claimed and account.give_way is not None:
                account.give_way(account.claimed, account)
        self._device.move_blocks(self._cache.allocator.gather())
        for cache in self._caches.further:
            cache.arenas.move_blocks(cache.prefix.allocator.gather())
        freed = sum(cache.prefix.allocator.give_back() for cache in self._caches)
        freed += self._planner.give_back()
        if (snapshots := self._cache.snapshots) is not None:
            evicted_snapshots = self._eviction.evict_snapshots(_SHARES[level])
            evicted, freed = evicted + evicted_snapshots, freed + evicted_snapshots * snapshots.group.bytes_per_block
            self._device.free_states()
        for cache in self._caches.further:
            cache.arenas.fit()
        self._device.give_back()
        self.evicted_blocks += evicted
        self.freed_bytes += freed
        return level is Level.CRITICAL and not evicted and not freed

    def _enter(self, level: Level) -> None:
        if level is self.level:
            return
        log.log(
            logging.INFO if level < self.level else logging.WARNING,
            "memory pressure is %s, was %s; RAM: %s",
            level.word,
            self.level.word,
            ", ".join(f"{use.kind} {use.capacity_bytes / 1e6:.0f} MB" for use in self._cache.ledger.statement()),
        )
        self.level = level
        for cache in self._caches:
            cache.prefix.allocator.is_sparing = level > Level.NORMAL
        self._scheduler.one_at_a_time = level is Level.CRITICAL
        self._scheduler.stalled = False

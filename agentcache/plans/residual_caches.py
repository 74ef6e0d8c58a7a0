from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.blocks.keys import BLOCK_SIZE, pack_token_ids, residual_cache
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import UnsupportedPolicy
from agentcache.models.adapters import Adapter
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.models.residual.forms import ResidualSupport
from agentcache.models.residual.spec import ResidualShape, residual_spec
from agentcache.models.runner import ModelRunner

if TYPE_CHECKING:
    from agentcache.plans.residual import ResidualPlan

_MOST_REMEMBERED = 256


class ResidualCaches:
    """Residual caches of adapters on the device, and prompts that must not use them."""

    def __init__(
        self,
        caches: KeptCaches,
        persistence: Persistence,
        runner: ModelRunner,
        ledger: Ledger,
        support: ResidualSupport | None,
        max_divergence: float,
    ) -> None:
        self._caches = caches
        self._persistence = persistence
        self._runner = runner
        self._ledger = ledger
        self.support = support
        self._max_divergence = max_divergence
        # By family and digest.
        self._members: dict[str, dict[str, Adapter]] = {}
        # By adapter, cache, salt and first tokens; most recently used last.
        self._too_far: OrderedDict[tuple[str, str, str, bytes], float] = OrderedDict()

    def open_for(self, adapter: Adapter) -> None:
        """Open a loaded adapter's cache, and for a second member the family's."""
        if self.support is None:
            return
        try:
            self._open(residual_cache(adapter.digest), self.support.shape_of(adapter))
        except UnsupportedPolicy:
            return  # its requests were refused earlier
        members = self._members.setdefault(adapter.family, {})
        members[adapter.digest] = adapter
        if len(members) > 1:
            self._open_family(adapter)

    def cache_of(self, use: AdapterUse) -> KeptCache:
        """The adapter's or family's cache. The weights must be on the device."""
        if use.is_family:  # other members may not fit on the device
            self._open_family(self._members[use.family][use.digest])
        return self._caches.get(use.residual_cache)

    def _open_family(self, member: Adapter) -> None:
        assert self.support is not None
        self._open(residual_cache(member.family), self.support.shape_of(member, is_family=True))

    def _open(self, name: str, shape: ResidualShape) -> None:
        if self._caches.is_open(name):
            return
        base = self._caches.base
        spec = residual_spec(base.spec, shape)
        prefix = PrefixCache(spec.groups, self._ledger, name=name, headroom=base.prefix.allocator.headroom)
        prefix.allocator.is_sparing = base.prefix.allocator.is_sparing
        arenas = self._runner.open_residual(spec, prefix.slots.pools, is_family=shape.is_family)
        self._persistence.open_cache(KeptCache(name, spec, prefix, arenas))

    def close_for(self, digest: str) -> None:
        """Close an unloaded adapter's cache, and with the last member the family's."""
        self._close(residual_cache(digest))
        family = next((family for family, members in self._members.items() if digest in members), None)
        if family is not None:
            del self._members[family][digest]
            if not self._members[family]:
                del self._members[family]
                self._close(residual_cache(family))

    def _close(self, name: str) -> None:
        cache = self._caches.find(name)
        if cache is None:
            return
        self._persistence.close_cache(name)
        cache.prefix.allocator.close()
        assert isinstance(cache.arenas, ResidualArenas)
        self._runner.close_residual(cache.arenas)

    @property
    def saturated(self) -> int:
        return self._runner.saturated_residuals

    def known_divergence(self, plan: ResidualPlan) -> float | None:
        """Return a divergence above the limit measured for the first tokens, or None."""
        cached_as, packed = _cached_as(plan), pack_token_ids(plan.token_ids[:BLOCK_SIZE])
        for key in self._too_far:
            if key[:3] == cached_as and packed.startswith(key[3]):
                self._too_far.move_to_end(key)
                return self._too_far[key]
        return None

    def is_too_far(self, plan: ResidualPlan) -> bool:
        """Whether the divergence is above the limit; if so, remember the prompt."""
        if plan.divergence is None or plan.divergence <= self._max_divergence:
            return False
        first = plan.token_ids[: min(BLOCK_SIZE, plan.num_prompt_tokens)]
        self._too_far[(*_cached_as(plan), pack_token_ids(first))] = plan.divergence
        if len(self._too_far) > _MOST_REMEMBERED:
            self._too_far.popitem(last=False)
        return True


def _cached_as(plan: ResidualPlan) -> tuple[str, str, str]:
    return plan.use.digest, plan.use.residual_cache, plan.submitted.request.salt

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentcache.adapters.weights import AdapterWeightSet, Content
from agentcache.agents.caches import KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.api.policy import Policy
from agentcache.api.report import StepDown
from agentcache.api.stats import RESIDUAL
from agentcache.blocks.hidden_states import HiddenStateCache
from agentcache.blocks.ledger import Ledger
from agentcache.models.adapters import Adapter, AdapterContent
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner
from agentcache.plans.exact import ExactPlan
from agentcache.plans.plan import PlanResources, RequestPlan
from agentcache.plans.residual import ResidualPlan
from agentcache.plans.residual_caches import ResidualCaches
from agentcache.plans.room import Room
from agentcache.plans.submitted import SubmittedRequest
from agentcache.settings.config import Config
from agentcache.settings.memory_plan import MemoryPlan

_RESIDUAL_SHARE = 4  # divisor of the RAM budget


class Planner:
    """Chooses each request's plan, and owns what plans use."""

    def __init__(self, resources: PlanResources, residuals: ResidualCaches, loaded: LoadedModel) -> None:
        self.adapters = resources.adapters
        self.hidden_states = resources.hidden_states
        self.residuals = residuals
        self.open_plans = resources.open_plans
        self._resources = resources
        self._loaded = loaded

    def plan(self, submitted: SubmittedRequest, token_ids: Sequence[int]) -> RequestPlan:
        use = submitted.adapter
        if use is None or not use.is_residual:
            return ExactPlan(self._resources, submitted, token_ids, use)
        plan = ResidualPlan(self._resources, self.residuals, submitted, token_ids, use)
        return plan.fallback(StepDown.DIVERGENCE) if plan.is_known_too_far() else plan

    def resolve(self, plan: RequestPlan) -> RequestPlan:
        """Resolve policy `auto`: `exact` if its blocks fit without eviction, else `residual`.

        A longer residual prefix also means `residual`; a prompt known to diverge stays `exact`.
        """
        use = plan.use
        if use is None or not use.may_share:
            return plan
        submitted, token_ids = plan.submitted, plan.token_ids
        exact = ExactPlan(self._resources, submitted, token_ids, use.resolved(use.policy))
        shared = ResidualPlan(self._resources, self.residuals, submitted, token_ids, use.resolved(Policy.RESIDUAL))
        cached = exact.match_kv()
        fits = Room(self._resources).fits_beside_cached(cached, len(token_ids) + 1)
        if fits and shared.match().own.num_tokens <= cached.num_tokens:
            return exact
        return exact if shared.is_known_too_far() else shared

    @property
    def check_lossy(self) -> Callable[[Adapter], object] | None:
        """A check that raises UnsupportedPolicy without residuals; None without lossy policies."""
        support = self.residuals.support
        return None if support is None else support.shape_of

    def load(self, content: Content) -> bool:
        """Load as `AdapterWeightSet.load`, and open the residual cache."""
        is_complete = self.adapters.load(content)
        if isinstance(content, AdapterContent):
            self.residuals.open_for(content.adapter)
        return is_complete

    def drop(self, digest: str) -> None:
        self.adapters.drop(digest)
        self.residuals.close_for(digest)

    def clear(self) -> None:
        """Evict what no plan reads from caches that are only in RAM."""
        self.hidden_states.clear()

    def give_back(self) -> int:
        """Free unread hidden states; return the bytes."""
        return self._loaded.hidden_states.blocks.keep_first(self.hidden_states.give_back())

    def check_integrity(self) -> None:
        self.hidden_states.check_integrity(slot for plan in self.open_plans for slot in plan.hidden_states.slots)

    @property
    def stats(self) -> dict[str, Any]:
        """Fields of `CacheStats`."""
        return {
            "adapter_ram_bytes": self.adapters.nbytes,
            "trunk_ram_bytes": self._loaded.hidden_states.blocks.nbytes,
            "computed_layer_tokens": self._loaded.hidden_states.layer_tokens,
            "saturated_residuals": self.residuals.saturated,
        }


def reserved_bytes(config: Config, ram_budget: int) -> dict[str, int]:
    """Parts of the RAM budget reserved for some plans, by account."""
    if not config.max_divergence:
        return {}
    budget = ram_budget // _RESIDUAL_SHARE if config.residual_budget is None else config.residual_budget
    return {RESIDUAL: budget}


def open_planner(
    config: Config,
    plan: MemoryPlan,
    loaded: LoadedModel,
    runner: ModelRunner,
    ledger: Ledger,
    caches: KeptCaches,
    persistence: Persistence,
    largest_chunk: int,
) -> Planner:
    adapters = AdapterWeightSet(loaded, runner, ledger)
    budget = 0 if loaded.spec.recurrent else plan.trunk_budget  # see `trunk_cut`
    block_bytes = loaded.hidden_states.block_bytes() if budget else 0
    num_slots = budget // block_bytes if block_bytes else 0
    hidden_states = HiddenStateCache(num_slots, block_bytes, ledger)
    # Runs the model.
    support = loaded.adapters.residual_forms.support if config.max_divergence else None
    residuals = ResidualCaches(caches, persistence, runner, ledger, support, config.max_divergence)
    return Planner(PlanResources(caches, adapters, hidden_states, largest_chunk), residuals, loaded)

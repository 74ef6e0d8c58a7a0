from __future__ import annotations

from collections.abc import Callable

from agentcache.api.stats import TEMPORARIES
from agentcache.blocks.ledger import Ledger
from agentcache.engine.running_request import RunningRequest
from agentcache.models.memory import Footprint, free_memory, spare_memory
from agentcache.plans.step_inputs import step_bytes

# Bytes of a step that is not checked: asking the system costs time.
_SMALL_STEP = 64 << 20
_SHARE = 0.9  # of free memory; the rest covers errors of the estimate


_UNBOUNDED = 2**62


class MemoryGuard:
    """Limits steps to free memory. Bytes: `free` for a step, `spare` to take permanently, `reserve` left for steps."""

    def __init__(
        self,
        footprint: Footprint,
        ledger: Ledger,
        free: Callable[[], int] = free_memory,
        spare: Callable[[], int] = spare_memory,
        reserve: int = 0,
    ) -> None:
        self._footprint = footprint
        self._reserve = reserve
        # The machine bounds each step, not the ledger.
        self._account = ledger.open(TEMPORARIES, apart=_UNBOUNDED, floor=reserve)
        self.free = free
        self.spare = spare

    def headroom(self) -> int:
        return int(_SHARE * self.spare()) - self._reserve

    def limit(self, plan: dict[RunningRequest, int]) -> dict[RunningRequest, int]:
        """The part of a plan that fits: fewer decode rows or a smaller chunk; empty if nothing fits."""
        while plan and not self._fits(needed := self._bytes(plan)):
            last, num_tokens = next(reversed(plan.items()))
            plan = dict(plan)
            if num_tokens > 1:
                plan[last] = num_tokens // 2
            else:
                del plan[last]
        if plan:
            self._account.set_bytes(needed)
        return plan

    def _bytes(self, plan: dict[RunningRequest, int]) -> int:
        first, num_tokens = next(iter(plan.items()))
        all_logits = num_tokens > 1 and first.wants_prompt_logprobs
        plans, starts = [each.open_plan for each in plan], [each.num_launched for each in plan]
        return step_bytes(self._footprint, plans, starts, num_tokens, all_logits=all_logits)

    def _fits(self, num_bytes: int) -> bool:
        return num_bytes < _SMALL_STEP or num_bytes <= _SHARE * self.free()

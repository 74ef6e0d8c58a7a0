"""Cuts steps down to what memory holds, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

from agentcache.engine.generation import Generation
from agentcache.models.footprint import Footprint, free_memory

# Asking the operating system takes longer than it is worth for steps that always fit.
_SMALL_STEP = 64 << 20
_SHARE = 0.9  # of what is free; the rest is for what the estimate does not know of


class MemoryGuard:
    """Knows what steps take and what there is.

    Args:
        free: bytes that can be allocated now.
    """

    def __init__(self, footprint: Footprint, free: Callable[[], int] = free_memory) -> None:
        self._footprint = footprint
        self.free = free

    def limit(self, plan: dict[Generation, int]) -> dict[Generation, int]:
        """As much of a plan as fits: fewer rows of a decode step, fewer tokens of a chunk; empty if nothing does."""
        while plan and not self._fits(plan):
            last, num_tokens = next(reversed(plan.items()))
            plan = dict(plan)
            if num_tokens > 1:
                plan[last] = num_tokens // 2
            else:
                del plan[last]
        return plan

    def _fits(self, plan: dict[Generation, int]) -> bool:
        first, num_tokens = next(iter(plan.items()))
        all_logits = num_tokens > 1 and first.wants_prompt_logprobs
        contexts = [generation.num_launched for generation in plan]
        needed = self._footprint.step_bytes(contexts, num_tokens, all_logits=all_logits)
        return needed < _SMALL_STEP or needed <= _SHARE * self.free()

"""Cuts steps down to what memory holds, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

from agentcache.blocks.ledger import TEMPORARIES, Ledger
from agentcache.engine.generation import Generation
from agentcache.models.footprint import Footprint, free_memory, spare_memory

# Asking the operating system takes longer than it is worth for steps that always fit.
_SMALL_STEP = 64 << 20
_SHARE = 0.9  # of what is free; the rest is for what the estimate does not know of


_UNBOUNDED = 2**62


class MemoryGuard:
    """Knows what steps take and what there is.

    Args:
        ledger: gets the estimate of the step that was let through last, as `temporaries`.
        free: bytes that a step can allocate now.
        spare: bytes that can be taken for good.
        reserve: bytes that are kept free for steps when the cache grows.

    Attributes:
        has_residuals: whether there may be rows whose keys and values have residuals.
    """

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
        # The machine says what fits, step by step.
        self._account = ledger.open(TEMPORARIES, apart=_UNBOUNDED, floor=reserve)
        self.has_residuals = False
        self.free = free
        self.spare = spare

    def headroom(self) -> int:
        """Bytes by which the cache may grow, as far as the machine is concerned."""
        return int(_SHARE * self.spare()) - self._reserve

    def limit(self, plan: dict[Generation, int]) -> dict[Generation, int]:
        """As much of a plan as fits: fewer rows of a decode step, fewer tokens of a chunk; empty if nothing does."""
        while plan and not self._fits(needed := self._bytes(plan)):
            last, num_tokens = next(reversed(plan.items()))
            plan = dict(plan)
            if num_tokens > 1:
                plan[last] = num_tokens // 2
            else:
                del plan[last]
        if plan:
            self._account.settle(needed)
        return plan

    def _bytes(self, plan: dict[Generation, int]) -> int:
        first, num_tokens = next(iter(plan.items()))
        all_logits = num_tokens > 1 and first.wants_prompt_logprobs
        contexts = [generation.num_launched for generation in plan]
        if self.has_residuals:
            return self._bytes_with_residuals(plan, num_tokens, all_logits=all_logits)
        return self._footprint.step_bytes(contexts, num_tokens, all_logits=all_logits)

    def _bytes_with_residuals(self, plan: dict[Generation, int], num_tokens: int, *, all_logits: bool) -> int:
        """The same where rows may have residuals, and some of them base's row beside them."""
        residual = [each for each in plan if each.current.overlay is not None and each.current.computes is not None]
        plain = [each for each in plan if each not in residual]
        paired = [each for each in residual if each.overlay and each.overlay.is_paired(each.num_launched)]
        return self._footprint.step_bytes(
            [each.num_launched for each in (*plain, *paired)],
            num_tokens,
            all_logits=all_logits,
            residual=[each.num_launched for each in residual],
        )

    def _fits(self, num_bytes: int) -> bool:
        return num_bytes < _SMALL_STEP or num_bytes <= _SHARE * self.free()

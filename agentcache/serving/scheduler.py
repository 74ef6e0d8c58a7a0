"""Who computes how many tokens in the next step. Plain Python; knows neither tensors nor files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.serving.generation import Generation


class Scheduler:
    """Queues of generations, and the step's plan.

    Args:
        max_running: generations that share a step; more wait.
        prefill_chunk: prompt tokens in one step while others run or wait.
        idle_prefill_chunk: the same while nobody does.
    """

    def __init__(self, *, max_running: int, prefill_chunk: int, idle_prefill_chunk: int) -> None:
        self._max_running = max_running
        self._chunk = prefill_chunk
        self._idle_chunk = max(idle_prefill_chunk, prefill_chunk)
        self.waiting: deque[Generation] = deque()
        self.loading: list[Generation] = []
        self.running: list[Generation] = []
        self.stalled = False  # the first in the queue waits for blocks of others

    def add(self, generation: Generation) -> None:
        self.waiting.append(generation)

    def __iter__(self) -> Iterator[Generation]:
        yield from (*self.running, *self.loading, *self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or (self.waiting and self.can_admit and not (self.stalled and self.loading)))

    @property
    def can_admit(self) -> bool:
        return len(self.running) + len(self.loading) < self._max_running

    def remove(self, generation: Generation) -> None:
        """Forget a generation, wherever it is."""
        for queue in (self.waiting, self.loading, self.running):
            if generation in queue:
                queue.remove(generation)

    def youngest(self) -> Generation | None:
        """Whom to preempt when no block is left; None if a preemption would leave nobody running.

        By arrival, not by place in `running`, where prompts take turns: the oldest is never preempted, so it gets done.
        """
        return max(self.running, key=lambda g: g.submitted_at) if len(self.running) > 1 else None

    def preempt(self, generation: Generation) -> None:
        """Back to the front of the queue."""
        self.running.remove(generation)
        self.waiting.appendleft(generation)

    def schedule(self) -> dict[Generation, int]:
        """Tokens each generation computes in the next step.

        Everyone who has just one token to compute does so (they form one batch); besides, one prompt advances by a
        chunk that ends on a block boundary. Prompts take turns.
        """
        step = {g: 1 for g in self.running if g.num_to_compute == 1}
        alone = len(self.running) == 1 and not self.waiting
        prefilling = next((g for g in self.running if g.num_to_compute > 1), None)
        if prefilling is not None:
            step[prefilling] = self._chunk_for(prefilling, self._idle_chunk if alone else self._chunk)
            self.running.remove(prefilling)
            self.running.append(prefilling)
        return step

    @staticmethod
    def _chunk_for(generation: Generation, chunk: int) -> int:
        end = generation.num_computed + chunk
        if end >= len(generation.token_ids):
            return generation.num_to_compute
        aligned = end - end % BLOCK_SIZE
        return (aligned if aligned > generation.num_computed else end) - generation.num_computed

"""One request at a time per agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Queue:
    """The lock of one agent and how many wait for it or hold it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Turn:
    """Somebody's turn with an agent."""

    def __init__(self) -> None:
        self._work: asyncio.Future[Any] | None = None

    def lasts_until(self, work: asyncio.Future[Any]) -> None:
        """Who comes next waits for `work` too, whether or not its client does: it may have left.

        Cancelling the client must not cancel `work`.
        """
        self._work = work

    def when_over(self, function: Callable[[], None]) -> None:
        """Call `function` now, or when the work is done."""
        if self._work is None or self._work.done():
            function()
        else:
            self._work.add_done_callback(lambda work: function())


class AgentTurns:
    """Who is at work on which agent. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def turn(self, agent_id: str | None) -> AsyncIterator[Turn]:
        """Inside, nobody else has this agent; those who come meanwhile wait, in order. None for no agent."""
        turn = Turn()
        if agent_id is None:
            yield turn
            return
        queue = self._queues.setdefault(agent_id, _Queue())
        queue.users += 1
        try:
            await queue.lock.acquire()
        except BaseException:
            self._leave(agent_id, queue)
            raise
        try:
            yield turn
        finally:
            turn.when_over(lambda: self._end(agent_id, queue))

    def _end(self, agent_id: str, queue: _Queue) -> None:
        queue.lock.release()
        self._leave(agent_id, queue)

    def _leave(self, agent_id: str, queue: _Queue) -> None:
        queue.users -= 1
        if not queue.users:
            del self._queues[agent_id]

"""One request at a time per agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class _Queue:
    """The lock of one agent and how many wait for it or hold it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AgentTurns:
    """Who is at work on which agent. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def turn(self, agent_id: str | None) -> AsyncIterator[None]:
        """Inside, nobody else has this agent; those who come meanwhile wait, in order. None for no agent."""
        if agent_id is None:
            yield
            return
        queue = self._queues.setdefault(agent_id, _Queue())
        queue.users += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.users -= 1
            if not queue.users:
                del self._queues[agent_id]

"""Locks of agents: one request per lineage, or one operation on a whole agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentcache.agents.lineages import PlainPrompt
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class Claim:
    """What a turn locks: the lineage of this name, and later prompts that start with `prompt`."""

    lineage: str | None = None
    prompt: PlainPrompt | None = None
    whole: bool = False
    found: AgentRecord | None = field(default=None, compare=False)

    def keeps_out(self, later: Claim) -> bool:
        if self.whole or later.whole:
            return True
        if self.lineage is not None and self.lineage == later.lineage:
            return True
        return self.prompt is not None and later.prompt is not None and later.prompt.begins_with(self.prompt)


WHOLE = Claim(whole=True)


class Turn:
    """A place in an agent's queue. Belongs to one event loop."""

    def __init__(self, others: list[Turn]) -> None:
        self._others = others  # in order of arrival, including this one
        self._claim: Claim | None = None
        self._changed = asyncio.Event()
        self._work: asyncio.Future[Any] | None = None

    async def wait(self, read: Callable[[], Claim]) -> Claim:
        """Wait until no earlier turn conflicts; `read` is called again when one changes."""
        while True:
            claim = read()
            if claim != self._claim:
                self._claim = claim
                self._tell()
            blocker = self._blocker(claim)
            if blocker is None:
                return claim
            await blocker._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _blocker(self, claim: Claim) -> Turn | None:
        earlier = self._others[: self._others.index(self)]
        return next((turn for turn in reversed(earlier) if turn._claim is None or turn._claim.keeps_out(claim)), None)

    def lasts_until(self, work: asyncio.Future[Any]) -> None:
        """Keep the lock until `work` is done, even if the client leaves."""
        self._work = work

    def leave(self, over: Callable[[], None]) -> None:
        def end() -> None:
            self._others.remove(self)
            self._tell()
            over()

        if self._work is None or self._work.done():
            end()
        else:
            self._work.add_done_callback(lambda work: end())


class AgentTurns:
    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}

    @asynccontextmanager
    async def arrive(self, agent_id: str | None) -> AsyncIterator[Turn]:
        """Join the agent's queue; None takes no lock. Await `Turn.wait` before any work."""
        turns = [] if agent_id is None else self._turns.setdefault(agent_id, [])
        turn = Turn(turns)
        turns.append(turn)
        try:
            yield turn
        finally:
            turn.leave(lambda: self._tidy(agent_id))

    @asynccontextmanager
    async def turn(self, agent_id: str) -> AsyncIterator[Turn]:
        """Lock the whole agent inside the block."""
        async with self.arrive(agent_id) as turn:
            await turn.wait(lambda: WHOLE)
            yield turn

    def _tidy(self, agent_id: str | None) -> None:
        if agent_id is not None and not self._turns[agent_id]:
            del self._turns[agent_id]

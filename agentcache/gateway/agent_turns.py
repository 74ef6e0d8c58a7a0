"""Who is at work on an agent: one request at a time per lineage, and nobody beside what concerns the whole agent."""

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
    """What a turn needs for itself.

    Args:
        lineage: name of the lineage that it goes on from.
        prompt: what it computes; who goes on from there has to wait for the answer.
        whole: the whole agent.
        found: the lineage that the prompt goes on from, or changes, as it was when this was said.
    """

    lineage: str | None = None
    prompt: PlainPrompt | None = None
    whole: bool = False
    found: AgentRecord | None = field(default=None, compare=False)

    def keeps_out(self, later: Claim) -> bool:
        """Whether a later turn with that claim has to wait."""
        if self.whole or later.whole:
            return True
        if self.lineage is not None and self.lineage == later.lineage:
            return True
        return self.prompt is not None and later.prompt is not None and later.prompt.begins_with(self.prompt)


WHOLE = Claim(whole=True)


class Turn:
    """Somebody's turn with an agent. Belongs to one event loop."""

    def __init__(self, others: list[Turn]) -> None:
        self._others = others  # of the same agent, in order of arrival, this one included
        self._claim: Claim | None = None
        self._changed = asyncio.Event()
        self._work: asyncio.Future[Any] | None = None

    async def wait(self, read: Callable[[], Claim]) -> Claim:
        """Return what `read` says when nobody who came earlier is in the way.

        Args:
            read: what this turn needs, as things stand; asked again when the one in the way is over, or needs less.
        """
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
        """Have those who wait for this turn look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _blocker(self, claim: Claim) -> Turn | None:
        """The last one in the way. One that has not said what it needs may be."""
        earlier = self._others[: self._others.index(self)]
        return next((turn for turn in reversed(earlier) if turn._claim is None or turn._claim.keeps_out(claim)), None)

    def lasts_until(self, work: asyncio.Future[Any]) -> None:
        """Who comes next waits for `work` too, whether or not its client does: it may have left.

        Cancelling the client must not cancel `work`.
        """
        self._work = work

    def leave(self, over: Callable[[], None]) -> None:
        """Let the next ones in, now or when the work is done; then call `over`."""

        def end() -> None:
            self._others.remove(self)
            self._tell()
            over()

        if self._work is None or self._work.done():
            end()
        else:
            self._work.add_done_callback(lambda work: end())


class AgentTurns:
    """The turns with every agent. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}

    @asynccontextmanager
    async def arrive(self, agent_id: str | None) -> AsyncIterator[Turn]:
        """Join the agent's queue; None is nobody's. Inside, `Turn.wait` comes before any work."""
        turns = [] if agent_id is None else self._turns.setdefault(agent_id, [])
        turn = Turn(turns)
        turns.append(turn)
        try:
            yield turn
        finally:
            turn.leave(lambda: self._tidy(agent_id))

    @asynccontextmanager
    async def turn(self, agent_id: str) -> AsyncIterator[Turn]:
        """Inside, nobody else is at work on the agent."""
        async with self.arrive(agent_id) as turn:
            await turn.wait(lambda: WHOLE)
            yield turn

    def _tidy(self, agent_id: str | None) -> None:
        if agent_id is not None and not self._turns[agent_id]:
            del self._turns[agent_id]

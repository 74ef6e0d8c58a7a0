from __future__ import annotations

import asyncio

import pytest

from agentcache.serving.agent_turns import AgentTurns


def test_one_at_a_time_in_order_and_others_beside() -> None:
    async def run() -> list[str]:
        turns, said = AgentTurns(), list[str]()

        async def work(agent: str | None, name: str) -> None:
            async with turns.turn(agent):
                said.append(f"{name} begins")
                for _ in range(3):
                    await asyncio.sleep(0)
                said.append(f"{name} ends")

        await asyncio.gather(work("a", "one"), work("a", "two"), work(None, "free"), work("b", "other"))
        assert not turns._queues
        return said

    said = asyncio.run(run())
    assert said.index("two begins") > said.index("one ends")
    assert said.index("free begins") < said.index("one ends") and said.index("other begins") < said.index("one ends")


def test_who_gives_up_waiting_or_fails_lets_the_next_one_in() -> None:
    async def run() -> None:
        turns = AgentTurns()
        with pytest.raises(ValueError):
            async with turns.turn("a"):
                waiting = asyncio.ensure_future(_enter(turns))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait({waiting})
                raise ValueError
        await _enter(turns)
        assert not turns._queues

    asyncio.run(run())


async def _enter(turns: AgentTurns) -> None:
    async with turns.turn("a"):
        return

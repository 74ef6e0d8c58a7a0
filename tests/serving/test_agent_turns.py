from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentcache.agents.lineages import PlainPrompt
from agentcache.gateway.agent_turns import WHOLE, AgentTurns, Claim


class Stage:
    """What those who work on agents say, in order."""

    def __init__(self) -> None:
        self.turns = AgentTurns()
        self.said: list[str] = []

    async def work(self, agent: str | None, name: str, claim: Claim = WHOLE, pause: int = 3) -> None:
        async with self.turns.arrive(agent) as turn:
            await turn.wait(lambda: claim)
            self.said.append(f"{name} begins")
            for _ in range(pause):
                await asyncio.sleep(0)
            self.said.append(f"{name} ends")

    def waits(self, later: str, earlier: str) -> bool:
        return self.said.index(f"{later} begins") > self.said.index(f"{earlier} ends")


def play(*works: Callable[[Stage], Coroutine[Any, Any, None]]) -> Stage:
    async def run() -> Stage:
        stage = Stage()
        await asyncio.gather(*(work(stage) for work in works))
        assert not stage.turns._turns
        return stage

    return asyncio.run(run())


def prompt(text: str, lineage: str | None = None) -> Claim:
    return Claim(lineage, PlainPrompt(text))


def test_one_at_a_time_in_order_and_others_beside() -> None:
    stage = play(
        lambda stage: stage.work("a", "one"),
        lambda stage: stage.work("a", "two"),
        lambda stage: stage.work(None, "free"),
        lambda stage: stage.work("b", "other"),
    )
    assert stage.waits("two", "one")
    assert not stage.waits("free", "one") and not stage.waits("other", "one")


@pytest.mark.parametrize(
    ("earlier", "later", "waits"),
    [
        (prompt("main", "a"), prompt("title", "b"), False),
        (prompt("main", "a"), prompt("title"), False),
        (prompt("main"), prompt("title"), False),
        (prompt("main, one", "a"), prompt("main, two", "a"), True),
        (prompt("main"), prompt("main and more"), True),
        (prompt("main"), prompt("main"), True),
        (prompt("main and more"), prompt("main"), False),
        (WHOLE, prompt("title"), True),
        (prompt("main"), WHOLE, True),
        (Claim("a"), prompt("main", "a"), True),
        (Claim("a"), prompt("main", "b"), False),
        (Claim("a"), Claim("a"), True),
    ],
)
def test_who_waits_for_whom(earlier: Claim, later: Claim, waits: bool) -> None:
    stage = play(
        lambda stage: stage.work("a", "earlier", earlier, pause=20),
        lambda stage: stage.work("a", "later", later, pause=1),
    )
    assert stage.waits("later", "earlier") is waits


def test_nobody_overtakes_who_waits_for_the_same() -> None:
    stage = play(
        lambda stage: stage.work("a", "one", prompt("x", "l"), pause=10),
        lambda stage: stage.work("a", "two", prompt("y", "l"), pause=10),
        lambda stage: stage.work("a", "whole", WHOLE, pause=10),
        lambda stage: stage.work("a", "three", prompt("z", "m"), pause=1),
    )
    assert [line for line in stage.said if "begins" in line] == [
        f"{name} begins" for name in ("one", "two", "whole", "three")
    ]


def test_who_has_not_said_what_it_needs_keeps_later_ones_waiting() -> None:
    async def run() -> list[str]:
        stage, read = Stage(), asyncio.Event()

        async def slow() -> None:
            async with stage.turns.arrive("a") as turn:
                await read.wait()
                await turn.wait(lambda: prompt("slow"))
                stage.said.append("slow")
                for _ in range(10):
                    await asyncio.sleep(0)
                stage.said.append("slow ends")

        async def look() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            assert stage.said == []
            read.set()

        await asyncio.gather(slow(), stage.work("a", "quick", prompt("quick"), pause=0), look())
        return stage.said

    assert asyncio.run(run()) == ["slow", "quick begins", "quick ends", "slow ends"]


def test_who_waits_looks_again_when_things_have_changed() -> None:
    """What the first one has answered is another beginning for the second: its claim is read anew, and again."""

    async def run() -> None:
        stage, claims = Stage(), [prompt("x y", "l"), prompt("x y")]
        busy = asyncio.ensure_future(stage.work("a", "first", prompt("x", "l"), pause=5))
        await asyncio.sleep(0)
        async with stage.turns.arrive("a") as turn:
            assert await turn.wait(lambda: claims.pop(0)) == prompt("x y")
            assert stage.said == ["first begins", "first ends"]
        await busy

    asyncio.run(run())


def test_who_needs_less_than_it_did_lets_others_go() -> None:
    """The second waits for the first, and then needs another lineage: the third need not wait for the second."""

    async def run() -> None:
        stage, claims, gate = Stage(), [prompt("b", "l"), prompt("b")], asyncio.Event()

        async def second() -> None:
            async with stage.turns.arrive("a") as turn:
                await turn.wait(lambda: claims.pop(0))
                await gate.wait()

        works = [
            asyncio.ensure_future(stage.work("a", "first", prompt("a", "l"))),
            asyncio.ensure_future(second()),
            asyncio.ensure_future(stage.work("a", "third", prompt("c", "l"))),
        ]
        await asyncio.wait_for(works[2], 60)
        gate.set()
        await asyncio.gather(*works)

    asyncio.run(run())


def test_a_turn_lasts_until_its_work_is_done() -> None:
    async def run() -> None:
        stage, work = Stage(), asyncio.get_running_loop().create_future()
        async with stage.turns.turn("a") as turn:
            turn.lasts_until(work)
        waiting = asyncio.ensure_future(stage.work("a", "next"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert stage.said == []
        work.set_result(None)
        await waiting
        assert not stage.turns._turns

    asyncio.run(run())


def test_who_gives_up_waiting_or_fails_lets_the_next_one_in() -> None:
    async def run() -> None:
        stage = Stage()
        with pytest.raises(ValueError):
            async with stage.turns.turn("a"):
                waiting = asyncio.ensure_future(stage.work("a", "gives up"))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait({waiting})
                raise ValueError
        await stage.work("a", "next")
        assert stage.said == ["next begins", "next ends"]
        assert not stage.turns._turns

    asyncio.run(run())

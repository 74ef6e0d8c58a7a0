"""A client that leaves while its agent is being saved: whoever comes next finds the agent as if it had stayed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentcache.errors import NotFound
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import DeleteAgent, ForkAgent, ListAgents, ReadStats
from agentcache.store.verify import verify_folder
from tests.serving import inside
from tests.serving.gate import Gate
from tests.serving.test_async_engine import complete, run

Begin = Callable[[AsyncEngine], Awaitable[object]]


async def ask(engine: AsyncEngine) -> None:
    await complete(engine, "alice", max_tokens=1, seed=1)


async def fork(engine: AsyncEngine) -> None:
    await engine.call(ForkAgent("bob", "alice"))


async def leave(engine: AsyncEngine, gate: Gate, begin: Begin) -> None:
    """Begin something, and go when the disk is at work on it."""
    going = asyncio.ensure_future(begin(engine))
    await gate.reached()
    while await inside.on_thread(engine, inside.has_requests):
        await asyncio.sleep(0.001)
    going.cancel()
    await asyncio.wait({going})


@pytest.mark.parametrize("begin", [ask, fork])
def test_a_deleted_agent_stays_away(begin: Begin, model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "bob")
        gate = await inside.on_thread(engine, Gate.of)
        await leave(engine, gate, begin)
        deleting = asyncio.ensure_future(engine.call(DeleteAgent("alice")))
        await asyncio.sleep(0.1)
        assert not deleting.done(), "it waits for its turn"
        gate.opened.set()
        await deleting
        assert [info.id for info in await engine.call(ListAgents())] == ["bob"]

    run(test, model, tmp_path)
    report = verify_folder(tmp_path)
    assert (report.agents, report.unnamed_blocks, report.missing_blocks, report.problems) == (1, 0, 0, ())


@pytest.mark.slow
def test_the_next_turn_goes_on_from_what_was_saved(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        gate = await inside.on_thread(engine, Gate.of)
        await leave(engine, gate, ask)
        following = asyncio.ensure_future(complete(engine, "alice", max_tokens=3, seed=1))
        await asyncio.sleep(0.1)
        gate.opened.set()
        report = (await following)[-1].report
        assert report is not None and report.saved and report.computed_tokens == 1

    run(test, model, tmp_path)


@pytest.mark.slow
def test_those_who_wait_behind_a_save_are_told_of_the_end(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        gate = await inside.on_thread(engine, Gate.of)
        await leave(engine, gate, ask)
        waiting = asyncio.ensure_future(engine.call(DeleteAgent("alice")))
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.1)
        gate.opened.set()
        with pytest.raises(Exception, match="shutting down"):
            await waiting
        await closing

    run(test, model, tmp_path)


@pytest.mark.slow
def test_who_leaves_before_anything_is_saved_leaves_nothing(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        running = asyncio.ensure_future(complete(engine, "alice", max_tokens=500))
        while not (await engine.call(ReadStats())).generated_tokens:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait({running})
        with pytest.raises(NotFound):
            await asyncio.wait_for(engine.call(DeleteAgent("alice")), 30)

    run(test, model, tmp_path)

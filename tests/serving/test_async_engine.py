"""What callers are told when the engine fails, is full or is closed; and nobody waits for another for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.engine.engine import Engine
from agentcache.errors import Conflict, EngineStopped, Overloaded, RequestError
from agentcache.gateway import engine_thread
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import (
    CheckIntegrity,
    EvictAgent,
    ForkAgent,
    ListAgents,
    ReadStats,
    RestoreAgent,
    ShowAgent,
)
from agentcache.settings.config import Config
from tests.serving import inside
from tests.serving.conversation import DISK_BUDGET, RAM_BUDGET, greedy, make_ids


@asynccontextmanager
async def opened(model: Path, cache_dir: Path, max_concurrent_requests: int = 16) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        Config(
            model=str(model),
            cache_dir=cache_dir,
            ram_budget=RAM_BUDGET,
            disk_budget=DISK_BUDGET,
            max_concurrent_requests=max_concurrent_requests,
        )
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def complete(engine: AsyncEngine, agent: str | None, max_tokens: int = 4, seed: int = 0) -> list[Update]:
    request = Request(f"{agent}{seed}", TokenPrompt(make_ids(300, seed=seed)), greedy(max_tokens), agent)
    updates: list[Update] = []
    await engine.generate(request, updates.append)
    return updates


async def outcome_of(awaitable: Awaitable[object]) -> str:
    try:
        await asyncio.wait_for(awaitable, 30)
    except (EngineStopped, Overloaded, Conflict) as error:
        return type(error).__name__
    return "done"


def run(test: Callable[[AsyncEngine], Awaitable[None]], model: Path, cache_dir: Path, **settings: int) -> None:
    async def inside() -> None:
        async with opened(model, cache_dir, **settings) as engine:
            await test(engine)

    asyncio.run(inside())


def fail_in_the_next_step(engine: Engine) -> None:
    def step() -> None:
        raise RuntimeError("the device is gone")

    engine.step = step  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_failure_reaches_every_waiter(model: Path, tmp_path: Path) -> None:
    """Running, waiting for a place, for the agent's turn or for a restore; and whoever comes later."""

    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "bob")
        assert engine.ready
        waiters = [asyncio.ensure_future(outcome_of(complete(engine, "alice", 500, seed))) for seed in range(3)]
        waiters += [asyncio.ensure_future(outcome_of(complete(engine, None, 500, seed))) for seed in range(4)]
        while not (await engine.call(ReadStats())).generated_tokens + (await engine.call(ReadStats())).running:
            await asyncio.sleep(0.01)
        waiters.append(asyncio.ensure_future(outcome_of(engine.call(EvictAgent("alice")))))
        await inside.on_thread(engine, fail_in_the_next_step)
        assert set(await asyncio.gather(*waiters)) == {"EngineStopped"}
        assert not engine.ready
        assert str(engine.failure) == "the device is gone"
        assert await outcome_of(complete(engine, "bob")) == "EngineStopped"
        assert await outcome_of(engine.call(RestoreAgent("bob"))) == "EngineStopped"
        assert await outcome_of(engine.call(ReadStats())) == "EngineStopped"

    run(test, model, tmp_path, max_concurrent_requests=2)


@pytest.mark.slow
def test_what_was_saved_before_a_failure_is_there_after_it(model: Path, tmp_path: Path) -> None:
    async def fails(engine: AsyncEngine) -> None:
        await complete(engine, "bob")
        await inside.on_thread(engine, fail_in_the_next_step)
        assert await outcome_of(complete(engine, "bob")) == "EngineStopped"

    async def works(engine: AsyncEngine) -> None:
        assert (await engine.call(ShowAgent("bob"))).tokens == 304

    run(fails, model, tmp_path)
    run(works, model, tmp_path)


@pytest.mark.slow
def test_the_queue_is_bounded(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        limit = engine.config.max_waiting_requests
        outcomes = await asyncio.gather(*(outcome_of(complete(engine, None, 1)) for _ in range(limit + 3)))
        assert outcomes == ["done"] * limit + ["Overloaded"] * 3
        assert await outcome_of(complete(engine, None, 1)) == "done"

    run(test, model, tmp_path, max_concurrent_requests=1)


@pytest.mark.slow
def test_prompts_are_counted_up_to_a_multiple_of_what_may_run(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        most = await inside.on_thread(engine, lambda inner: inner.view().max_prompt_tokens)
        too_long = Request("1", TokenPrompt([9] * (most + 1)))
        assert await engine.count_tokens(too_long) == most + 1
        with pytest.raises(RequestError, match=f"has {most + 1} tokens"):
            await engine.generate(too_long, lambda update: None)
        with pytest.raises(RequestError, match=f"has {4 * most + 1} tokens"):
            await engine.count_tokens(Request("2", TokenPrompt([9] * (4 * most + 1))))

    run(test, model, tmp_path)


@pytest.mark.slow
def test_closing_tells_those_who_wait(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        waiters = [asyncio.ensure_future(outcome_of(complete(engine, "alice", 500, seed))) for seed in range(3)]
        await asyncio.sleep(0.2)
        await engine.close()
        assert set(await asyncio.gather(*waiters)) == {"Overloaded"}
        assert not engine.ready
        assert await outcome_of(engine.call(ListAgents())) == "Overloaded"

    run(test, model, tmp_path)


@pytest.mark.slow
def test_two_that_fork_into_each_others_place(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        for agent in ("a", "b"):
            await complete(engine, agent)
        forks = [outcome_of(engine.call(ForkAgent(*names))) for names in (("a", "b"), ("b", "a"), ("a", "a"))]
        assert await asyncio.gather(*forks) == ["Conflict"] * 3

    run(test, model, tmp_path)


@pytest.mark.slow
def test_the_event_loop_wakes_once_a_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every row: what a step has for all of them is handed over together."""
    steps: list[int] = []
    sizes: list[int] = []
    hand_out = engine_thread._hand_out

    def counted(updates: list[tuple[engine_thread.Receive, Update | BaseException]]) -> None:
        sizes.append(len(updates))
        hand_out(updates)

    def count_steps(engine: Engine) -> None:
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (steps.append(1), step()))

    monkeypatch.setattr(engine_thread, "_hand_out", counted)

    async def test(engine: AsyncEngine) -> None:
        await inside.on_thread(engine, count_steps)
        received = await asyncio.gather(*(complete(engine, None, 100, seed) for seed in range(4)))
        # The prompt, the tokens, the report; in front of it, maybe the rest of a character.
        assert sum(sizes) == sum(map(len, received)) >= 4 * 102
        assert max(sizes) >= 4
        assert len(sizes) <= len(steps)

    run(test, model, tmp_path)


@pytest.mark.slow
def test_who_cannot_take_its_updates_ends_alone(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        def take(update: Update) -> None:
            raise ValueError("cannot")

        ids = make_ids(300, seed=1)
        failing = asyncio.ensure_future(engine.generate(Request("1", TokenPrompt(ids), greedy(20)), take))
        updates = await asyncio.wait_for(complete(engine, None, 20), 30)
        assert updates[-1].report is not None
        with pytest.raises(ValueError, match="cannot"):
            await failing
        await engine.call(CheckIntegrity())
        assert (await engine.call(ReadStats())).blocks_live == 0

    run(test, model, tmp_path)


@pytest.mark.slow
def test_nothing_comes_after_a_cancel(model: Path, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        updates: list[Update] = []
        ids = make_ids(30, seed=1)
        running = asyncio.ensure_future(engine.generate(Request("1", TokenPrompt(ids), greedy(500)), updates.append))
        while len(updates) < 5:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait({running})
        seen = len(updates)
        assert len(await complete(engine, None, 20)) == 22
        assert len(updates) == seen
        stats = await engine.call(ReadStats())
        assert (stats.cancelled, stats.blocks_live) == (1, 0)

    run(test, model, tmp_path)

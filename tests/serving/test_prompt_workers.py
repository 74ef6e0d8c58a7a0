"""Who goes first, who is dropped, and that nobody is waited for at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from agentcache.errors import InvalidRequest, Overloaded
from agentcache.gateway.prompt_workers import CLOSE_SECONDS, LARGE, HasEnded, PromptWorkers

GONE = Overloaded("the server is shutting down", code="shutting_down")


def run(test: Callable[[PromptWorkers], Awaitable[None]], num_workers: int = 2) -> None:
    async def inside() -> None:
        workers = PromptWorkers(num_workers)
        try:
            await asyncio.wait_for(test(workers), 30)
        finally:
            await workers.close(GONE)

    asyncio.run(inside())


def until_ended(has_ended: HasEnded) -> str:
    while not has_ended():
        time.sleep(0.002)
    return "ended"


def begin(workers: PromptWorkers, size: int, work: Callable[[HasEnded], str]) -> asyncio.Task[str]:
    return asyncio.ensure_future(workers.run(size, work))


def test_results_and_errors_come_back() -> None:
    def fail(has_ended: HasEnded) -> str:
        raise InvalidRequest("no")

    async def test(workers: PromptWorkers) -> None:
        assert await workers.run(1, lambda has_ended: f"done {has_ended()}") == "done False"
        with pytest.raises(InvalidRequest, match="no"):
            await workers.run(1, fail)

    run(test)


def test_short_ones_go_first() -> None:
    order: list[int] = []
    gate = threading.Event()

    async def test(workers: PromptWorkers) -> None:
        first = begin(workers, 0, lambda has_ended: str(gate.wait()))
        await asyncio.sleep(0.02)
        sizes = [50, 3, LARGE, 7, 3]
        tasks = [begin(workers, size, lambda has_ended, size=size: order.append(size) or "") for size in sizes]  # type: ignore[misc]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(first, *tasks)
        assert order == sorted(sizes)

    run(test, num_workers=1)


def test_large_ones_leave_a_thread_free() -> None:
    async def test(workers: PromptWorkers) -> None:
        large = [begin(workers, LARGE + 1, until_ended) for _ in range(3)]
        assert await workers.run(10, lambda has_ended: "short") == "short"
        assert await workers.run(LARGE, lambda has_ended: "just not large") == "just not large"
        for task in large:
            task.cancel()

    run(test)


def test_who_leaves_is_dropped_or_told() -> None:
    ran: list[str] = []
    told = threading.Event()

    def wait(has_ended: HasEnded) -> str:
        until_ended(has_ended)
        told.set()
        return ""

    async def test(workers: PromptWorkers) -> None:
        running = begin(workers, LARGE + 1, wait)
        waiting = begin(workers, LARGE + 2, lambda has_ended: ran.append("") or "")  # type: ignore[func-returns-value]
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.sleep(0)
        running.cancel()
        assert await asyncio.to_thread(told.wait, 5)
        assert await workers.run(LARGE + 3, lambda has_ended: "next") == "next"
        assert ran == []

    run(test)


def test_closing_tells_all_and_waits_for_nobody() -> None:
    stubborn = threading.Event()

    async def test(workers: PromptWorkers) -> None:
        tasks = [begin(workers, LARGE + 1, until_ended), begin(workers, 1, lambda has_ended: str(stubborn.wait(20)))]
        await asyncio.sleep(0.02)
        tasks += [begin(workers, size, lambda has_ended: "") for size in (1, LARGE + 1)]
        await asyncio.sleep(0.02)
        beginning = time.monotonic()
        closing = asyncio.ensure_future(workers.close(GONE))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes == [GONE] * 4
        assert time.monotonic() - beginning < 0.5
        await closing
        assert time.monotonic() - beginning < CLOSE_SECONDS + 0.5
        with pytest.raises(Overloaded):
            await workers.run(1, lambda has_ended: "")
        stubborn.set()

    run(test)

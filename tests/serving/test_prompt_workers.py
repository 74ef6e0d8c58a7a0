"""Who goes first, who is dropped, and that nobody is waited for at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import InvalidRequest, Overloaded
from agentcache.gateway import prompt_workers
from agentcache.gateway.prompt_workers import LARGE, AgedQueue, HasEnded, Workers
from tests.rounds import in_rounds, within

GONE = Overloaded("the server is shutting down", code="shutting_down")


def run(test: Callable[[Workers], Awaitable[None]], num_workers: int = 2) -> None:
    async def inside() -> None:
        workers = Workers(num_workers)
        try:
            await asyncio.wait_for(test(workers), 30)
        finally:
            await workers.close(GONE)

    asyncio.run(inside())


def until_ended(has_ended: HasEnded) -> str:
    while not has_ended():
        time.sleep(0.002)
    return "ended"


def begin(workers: Workers, size: int, work: Callable[[HasEnded], str]) -> asyncio.Task[str]:
    return asyncio.ensure_future(workers.run(size, work))


async def begun(workers: Workers, size: int, work: Callable[[HasEnded], str]) -> asyncio.Task[str]:
    """The same, when a thread is at work on it."""
    at_work = threading.Event()

    def say_and_work(has_ended: HasEnded) -> str:
        at_work.set()
        return work(has_ended)

    task = begin(workers, size, say_and_work)
    assert await asyncio.to_thread(at_work.wait, 10)
    return task


def test_results_and_errors_come_back() -> None:
    def fail(has_ended: HasEnded) -> str:
        raise InvalidRequest("no")

    async def test(workers: Workers) -> None:
        assert await workers.run(1, lambda has_ended: f"done {has_ended()}") == "done False"
        with pytest.raises(InvalidRequest, match="no"):
            await workers.run(1, fail)

    run(test)


def test_short_ones_go_first() -> None:
    order: list[int] = []
    gate = threading.Event()

    async def test(workers: Workers) -> None:
        first = await begun(workers, 0, lambda has_ended: str(gate.wait()))
        sizes = [50, 3, LARGE, 7, 3]
        tasks = [begin(workers, size, lambda has_ended, size=size: order.append(size) or "") for size in sizes]  # type: ignore[misc]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *tasks)
        assert order == sorted(sizes)

    run(test, num_workers=1)


def test_a_long_prompt_is_read_under_an_endless_stream_of_short_ones() -> None:
    """As soon as later ones that went first were as much work as it is."""
    size, order = 2000, list[str]()
    most = 2 + LARGE // size

    async def test(workers: Workers) -> None:
        loop, shorts = asyncio.get_running_loop(), list[asyncio.Task[str]]()

        async def add() -> None:
            shorts.append(begin(workers, size, read_and_add))
            await asyncio.sleep(0)

        def read_and_add(has_ended: HasEnded) -> str:
            """There is always another one before this one is done."""
            order.append("short")
            if "long" not in order and len(order) <= most:
                asyncio.run_coroutine_threadsafe(add(), loop).result(10)
            return ""

        gate = threading.Event()
        first = await begun(workers, 0, lambda has_ended: str(gate.wait()))
        await add()
        long = begin(workers, LARGE, lambda has_ended: order.append("long") or "")  # type: ignore[func-returns-value]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, long)
        await asyncio.gather(*shorts)

    run(test, num_workers=1)
    assert most // 2 < order.index("long") < most


def test_large_ones_leave_a_thread_free() -> None:
    async def test(workers: Workers) -> None:
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

    async def test(workers: Workers) -> None:
        running = await begun(workers, LARGE + 1, wait)
        waiting = begin(workers, LARGE + 2, lambda has_ended: ran.append("") or "")  # type: ignore[func-returns-value]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        running.cancel()
        assert await asyncio.to_thread(told.wait, 5)
        assert await workers.run(LARGE + 3, lambda has_ended: "next") == "next"
        assert ran == []

    run(test)


def test_one_thread_does_large_work_too() -> None:
    async def test(workers: Workers) -> None:
        assert await workers.run(LARGE + 1, lambda has_ended: "done") == "done"

    run(test, num_workers=1)


def test_no_more_than_so_many_jobs_wait() -> None:
    async def inside() -> None:
        workers = Workers(1, most_waiting=2)
        running = await begun(workers, 1, until_ended)
        waiting = [begin(workers, size, lambda has_ended: "done") for size in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many"):
            await workers.run(1, lambda has_ended: "")
        waiting.pop().cancel()  # that gives its place to another one
        await asyncio.sleep(0)
        waiting.append(begin(workers, 4, lambda has_ended: "done"))
        await asyncio.sleep(0)
        running.cancel()
        assert await asyncio.gather(*waiting) == ["done"] * 2
        await workers.close(GONE)

    asyncio.run(inside())


@in_rounds
def test_closing_tells_all_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_workers, "CLOSE_SECONDS", 0.3)
    stubborn = threading.Event()

    async def test(workers: Workers) -> None:
        tasks = [
            await begun(workers, LARGE + 1, until_ended),
            await begun(workers, 1, lambda has_ended: str(stubborn.wait(20))),
        ]
        tasks += [begin(workers, size, lambda has_ended: "") for size in (1, LARGE + 1)]
        await asyncio.sleep(0)
        with within(0.3 + 0.5):
            closing = asyncio.ensure_future(workers.close(GONE))
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert outcomes == [GONE] * 4
            assert not closing.done()
            await closing
        with pytest.raises(Overloaded):
            await workers.run(1, lambda has_ended: "")
        stubborn.set()

    run(test)


def test_items_that_came_together_go_by_cost() -> None:
    queue = AgedQueue[str]()
    for item in ("bbb", "a", "cc", "b"):
        queue.push(item, len(item))
    assert [queue.take(lambda item: True) for _ in range(5)] == ["a", "b", "cc", "bbb", None]


def test_items_that_may_not_go_let_others_go_and_keep_their_place() -> None:
    queue = AgedQueue[str]()
    for item in ("large", "a", "void"):
        queue.push(item, len(item))
    queue.drop(lambda item: item == "void")
    assert queue.take(lambda item: item != "a") == "large"
    assert list(queue) == ["a"] and queue.take(lambda item: item == "no") is None and len(queue) == 1
    queue.clear()
    assert queue.take(lambda item: True) is None


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 4)), max_size=60))
def test_later_items_that_go_first_cost_less_than_twice_the_item_that_waits(arrivals: list[tuple[int, int]]) -> None:
    queue, costs = AgedQueue[int](), dict[int, int]()
    overtaken: dict[int, int] = {}  # cost of later items that went first, by item that waits

    def take() -> None:
        taken = queue.take(lambda item: True)
        if taken is not None:
            del overtaken[taken]
            for number in overtaken:
                overtaken[number] += costs[taken] if taken > number else 0
                assert overtaken[number] < 2 * costs[number]

    for number, (cost, num_taken) in enumerate(arrivals):
        queue.push(number, cost)
        costs[number], overtaken[number] = cost, 0
        for _ in range(num_taken):
            take()
    while overtaken:
        take()


def test_an_item_is_next_when_later_ones_have_cost_as_much() -> None:
    queue = AgedQueue[str]()
    queue.push("large", 3)
    for item in "abc":
        queue.push(item, 1)
        assert queue.take(lambda item: True) == item
    queue.push("d", 1)
    assert queue.take(lambda item: True) == "large"

"""Bodies that are not small are read on threads: in which order, how many wait, and what ends that."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentcache.server.app import create_app
from agentcache.server.body import LargeJson
from agentcache.server.context import LARGE_BODY, MOST_UNREAD, READERS, SMALL_BODY, Context, body_weight
from agentcache.server.validate import ReadLimit, parse_object
from agentcache.settings.config import Config, Images
from tests.growth import units
from tests.rounds import check_bound, in_rounds, within
from tests.server.driver import BASE_URL, LeavingClient, refused, settle
from tests.server.fake_engine import FakeEngine
from tests.server.test_linear import DIALECTS
from tests.server.test_linear import read as read_body

Test = Callable[[Any, Context, httpx.AsyncClient], Awaitable[None]]


def run(test: Test) -> None:
    async def inside() -> None:
        app = create_app(FakeEngine(), Config())
        context: Context = app.state.context
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            try:
                await asyncio.wait_for(test(app, context, client), 60)
            finally:
                await context.close()

    asyncio.run(inside())


class Busy:
    """Work that goes on until it is told to stop, or has ended."""

    def __init__(self, context: Context, size: int) -> None:
        self.begun = threading.Event()
        self._stop = threading.Event()
        self.task = asyncio.ensure_future(context.workers.run(size, self._work))

    def _work(self, has_ended: Callable[[], bool]) -> None:
        self.begun.set()
        while not (self._stop.wait(0.002) or has_ended()):
            continue

    async def stop(self) -> None:
        self._stop.set()
        await self.task


async def until(is_so: Callable[[], bool]) -> None:
    with within(60):
        while not is_so():
            await asyncio.sleep(0.002)


def body_of(size: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 3}


def test_small_bodies_wait_for_no_others() -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        busy = [Busy(context, 1) for _ in range(READERS)]
        await until(lambda: all(each.begun.is_set() for each in busy))
        assert (await client.post("/v1/chat/completions", json=body_of(100))).status_code == 200
        waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=body_of(SMALL_BODY)))
        await settle()
        assert not waiting.done()
        await busy[0].stop()
        assert (await waiting).status_code == 200

    run(test)


def test_large_bodies_leave_a_thread_to_others() -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        busy = [Busy(context, LARGE_BODY + 1) for _ in range(READERS + 5)]
        await until(lambda: sum(each.begun.is_set() for each in busy) == READERS - 1)
        assert (await client.post("/v1/chat/completions", json=body_of(SMALL_BODY))).status_code == 200
        assert sum(each.begun.is_set() for each in busy) == READERS - 1

    run(test)


def test_too_many_that_wait() -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        busy = [Busy(context, 1) for _ in range(READERS)]
        await until(lambda: all(each.begun.is_set() for each in busy))
        busy += [Busy(context, 1) for _ in range(MOST_UNREAD)]
        await settle()
        answer = await client.post("/v1/chat/completions", json=body_of(SMALL_BODY))
        refused(answer, 503)
        assert answer.headers["Retry-After"]
        assert (await client.post("/v1/chat/completions", json=body_of(100))).status_code == 200

    run(test)


@pytest.mark.parametrize("size", [SMALL_BODY, LARGE_BODY])
def test_reading_ends_when_the_client_leaves(size: int) -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        busy = [Busy(context, 1) for _ in range(READERS)]
        await until(lambda: all(each.begun.is_set() for each in busy))
        has_left = False
        leaving = LeavingClient(leave=lambda sent: has_left)
        task = asyncio.ensure_future(leaving.post(app, "/v1/chat/completions", body_of(size)))
        await settle()
        assert not task.done()
        has_left = True
        await task
        assert not leaving.sent and not app.state.context.engine.requests

    run(test)


def test_closing_refuses_what_is_not_read() -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        busy = [Busy(context, 1) for _ in range(READERS)]
        await until(lambda: all(each.begun.is_set() for each in busy))
        waiting = [
            asyncio.ensure_future(client.post("/v1/chat/completions", json=body_of(SMALL_BODY))) for _ in range(3)
        ]
        await settle()
        with within(1):
            await context.close()
            answers = await asyncio.gather(*waiting)
        assert [refused(answer, 503)["code"] for answer in answers] == ["shutting_down"] * 3
        await asyncio.gather(*(each.task for each in busy), return_exceptions=True)

    run(test)


def test_a_body_is_handed_on_with_its_length() -> None:
    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        for path, body in {
            "/v1/chat/completions": body_of(10),
            "/v1/messages": body_of(10),
            "/v1/responses": {"input": "hi"},
        }.items():
            raw = json.dumps(body).encode()
            assert (await client.post(path, content=raw)).status_code == 200
            assert context.engine.requests[-1].prompt.num_bytes == len(raw)  # type: ignore[attr-defined]

    run(test)


# -- weight -----------------------------------------------------------------------------------------------------------

SMALL_UNITS = 3  # of CPU (`unit_of_work`, 1 to 2 ms), that the event loop may be held up; bodies take at most 2.2
KINDS = [
    (read, make, f"{dialect}: {name}") for dialect, (read, kinds) in DIALECTS.items() for name, make in kinds.items()
]


def largest_small(make: Callable[[int], dict[str, Any]], more: dict[str, Any]) -> bytes:
    def weight(size: int) -> int:
        return body_weight(json.dumps(make(size) | more).encode())

    size = 300 * SMALL_BODY // weight(300)
    while size > 1 and weight(size) > SMALL_BODY:
        size = size * 7 // 8
    return json.dumps(make(size) | more).encode()


@pytest.mark.parametrize(("reader", "make", "name"), KINDS, ids=[kind[2] for kind in KINDS])
@in_rounds
def test_small_bodies_take_a_few_milliseconds(reader: Any, make: Callable[[int], dict[str, Any]], name: str) -> None:
    raw = largest_small(make, {"max_tokens": 1} if name.startswith("messages") else {})
    taken = units(lambda: read_body(raw, reader, Config(images=Images.PLACEHOLDER)), SMALL_UNITS)
    check_bound(taken < SMALL_UNITS, f"{taken:.1f} units of work for {len(raw)} bytes")


@pytest.mark.parametrize(("count", "bound"), [(6_000, SMALL_BODY), (38_000, LARGE_BODY)])
def test_token_ids_weigh_little(count: int, bound: int) -> None:
    """A hot turn of so many ids is read in less time than another thread, or a process, would take to be asked."""
    assert body_weight(json.dumps({"prompt": [12345] * count, "max_tokens": 1}).encode()) <= bound


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@in_rounds
def test_parts_are_read_as_quickly_as_their_json(dialect: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 3_000}
    raw = json.dumps({"input" if dialect == "responses" else "messages": [message], "max_tokens": 1}).encode()
    gc.collect()
    parsing, all_of_it = [], []
    for _ in range(10):
        begun = time.thread_time()
        parse_object([raw])
        parsing.append(time.thread_time() - begun)
        begun = time.thread_time()
        read_body(raw, DIALECTS[dialect][0], Config())
        all_of_it.append(time.thread_time() - begun)
    check_bound(min(all_of_it) < 2 * min(parsing), f"{min(all_of_it) * 1e3:.2f} ms, {min(parsing) * 1e3:.2f} for JSON")


def test_many_values_are_read_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """15,000 parts in 450 KB: to read them here would take Python's lock from all else."""
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 15_000}]}
    seen: list[str] = []
    parse = LargeJson.parse

    def noted(self: LargeJson, *args: Any) -> dict[str, Any]:
        seen.append(threading.current_thread().name)
        return parse(self, *args)

    monkeypatch.setattr(LargeJson, "parse", noted)

    async def test(app: Any, context: Context, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/chat/completions", json=parts)).status_code == 200
        assert len(seen) == 1 and "bodies" in seen[0]

    run(test)


def test_a_thread_that_reads_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes for half a millisecond at most before others may."""
    naps: list[float] = []
    clock = iter(range(10**9))
    monkeypatch.setattr("agentcache.server.validate.time.perf_counter", lambda: next(clock) * 1e-4)
    monkeypatch.setattr("agentcache.server.validate.time.sleep", naps.append)
    for rests in (False, True):
        limit = ReadLimit(10**6, rests=rests)
        for _ in range(10_000):
            limit.step()
        assert bool(naps) is rests
    assert len(naps) > 30 and max(naps) < 0.005

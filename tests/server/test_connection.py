"""More connections than there is room for. What a connection does with requests is tested on whole servers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from agentcache.server import connection
from agentcache.server.compat import http_option
from agentcache.server.connection import ClientConnection, most_connections
from tests.rounds import check_bound, in_rounds

WRITE_SECONDS = 0.4
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


T = TypeVar("T")
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """A server of `app` for at most eight connections, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = http_option(partial(ClientConnection, head_seconds=30.0, write_seconds=WRITE_SECONDS, most=8))
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, ws="none")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([listener]))
    yield server, listener.getsockname()[1]
    server.should_exit = True
    await running


def run_client(app: App, client: Callable[[int], Awaitable[T]]) -> T:
    """What `client` returns, given the port of a server of `app`."""

    async def run() -> T:
        async with serving(app) as (_, port):
            return await asyncio.wait_for(client(port), 60)

    return asyncio.run(run())


def test_those_that_have_waited_longest_make_room_and_running_requests_stay() -> None:
    async def run() -> None:
        asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()

        async def waiting_app(scope: Scope, receive: Receive, send: Send) -> None:
            await asked.put(may_answer := asyncio.Event())
            await may_answer.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async with serving(waiting_app) as (server, port):
            address = ("127.0.0.1", port)
            busy_reader, busy_writer = await asyncio.open_connection(*address)
            busy_writer.write(GET)
            running = [await asked.get()]
            idle = [await asyncio.open_connection(*address) for _ in range(30)]
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET)
            running.append(await asked.get())
            for may_answer in running:
                may_answer.set()
            for answered in (busy_reader, reader):
                assert (await asyncio.wait_for(answered.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 204")
            for stream, _ in idle[:20]:
                assert await asyncio.wait_for(stream.read(), 60) == b""
            assert len(server.server_state.connections) <= 8
            for _, other in [(busy_reader, busy_writer), (reader, writer), *idle]:
                other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("soft", "hard", "most"), [(256, 4000, 3872), (256, resource.RLIM_INFINITY, 4096), (100, 100, 16)]
)
def test_the_process_is_given_as_many_as_it_may_have(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    assert most_connections() == most
    assert all(soft < limits[0] and limits[1] == hard for limits in given) or soft == hard


async def whole_body_app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def refusing_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body is there."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@in_rounds
def test_who_was_refused_does_not_stay_by_sending_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.3)

    async def client(port: int) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert b"413" in await reader.read(1000)
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < begun + 10:
                writer.write(b"x")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    if await asyncio.wait_for(reader.read(10), 0.05) == b"":
                        break
        writer.close()
        return time.monotonic() - begun

    seconds = run_client(refusing_app, client)
    check_bound(seconds < 5, seconds)


def test_a_request_that_is_sent_before_the_last_answer_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    half = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab"

    async def client(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(half + b"cd" + half)
        await asyncio.sleep(0.6)
        writer.write(b"cd")
        answered = b""
        while answered.count(b"200 OK") < 2 and (more := await reader.read(1000)):
            answered += more
        writer.close()
        return answered.count(b"200 OK")

    assert run_client(whole_body_app, client) == 2


def streaming(events: int, size: int) -> tuple[App, list[str]]:
    """An app that writes so many events, and what became of it."""
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(events):
            await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
        await send({"type": "http.response.body"})
        ends.append("written")

    return app, ends


async def slow_client(port: int, receive_buffer: int = 4096) -> socket.socket:
    """A client that has asked and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, GET)
    return client


@pytest.mark.parametrize(("events", "size"), [(400, 64 << 10), (1, 20 << 20), (1, 40)])
def test_an_answer_that_is_not_read_ends_its_connection(events: int, size: int) -> None:
    """A stream, one large body, and a small one that stays in the system's buffers."""
    app, ends = streaming(events, size)

    async def run() -> None:
        async with serving(app) as (server, port):
            client = await slow_client(port)
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            [served] = server.server_state.connections
            assert isinstance(served, ClientConnection)
            async with asyncio.timeout(60):
                while served in server.server_state.connections and (size > 1000 or not ends):
                    await asyncio.sleep(0.05)
            client.close()

    asyncio.run(run())
    assert ends == ["written"]


@in_rounds
def test_a_slow_reader_gets_all_of_it() -> None:
    """It reads something within each time limit. A round in which this process is stopped for long is void."""
    app, _ = streaming(60, 64 << 10)

    async def run() -> tuple[int, float]:
        async with serving(app) as (_, port):
            loop, count, reads = asyncio.get_running_loop(), 0, [time.monotonic()]
            client = await slow_client(port, 64 << 10)
            async with asyncio.timeout(60):
                while count < 60 * (64 << 10) and (read := await loop.sock_recv(client, 64 << 10)):
                    count += len(read)
                    reads.append(time.monotonic())
                    await asyncio.sleep(0.02)
            client.close()
            return count, max(later - sooner for sooner, later in pairwise(reads))

    count, longest = asyncio.run(run())
    check_bound(longest < WRITE_SECONDS / 2, f"{longest:.3f} s between two reads")
    assert count >= 60 * (64 << 10)

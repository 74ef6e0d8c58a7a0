"""More connections than there is room for. What a connection does with requests is tested on whole servers."""

from __future__ import annotations

import asyncio
import resource
import socket
from functools import partial

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from agentcache.server.connection import ClientConnection, most_connections

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_those_that_have_waited_longest_make_room_and_running_requests_stay() -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        http = partial(ClientConnection, head_seconds=30.0, most=8)
        config = uvicorn.Config(slow_app, http=http, lifespan="off", log_config=None, ws="none")  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        address = listener.getsockname()
        busy_reader, busy_writer = await asyncio.open_connection(*address)
        busy_writer.write(GET)
        await asyncio.sleep(0.05)
        idle = [await asyncio.open_connection(*address) for _ in range(30)]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        for answered in (busy_reader, reader):
            assert (await asyncio.wait_for(answered.readuntil(b"\r\n\r\n"), 10)).startswith(b"HTTP/1.1 204")
        await asyncio.sleep(0.05)
        assert len(server.server_state.connections) <= 8
        assert [stream.at_eof() for stream, _ in idle[:20]] == [True] * 20
        for _, other in [(busy_reader, busy_writer), (reader, writer), *idle]:
            other.close()
        server.should_exit = True
        await serving

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

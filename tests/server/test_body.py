"""Bodies: their size, their time, and the memory of those that are still coming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from agentcache.errors import Overloaded, RequestTooSlow
from agentcache.server.body import FREE_BYTES, WholeBody, note_read
from agentcache.settings.config import Config
from tests.server.driver import ask, refused, settle
from tests.server.fake_engine import FakeEngine

SMALL = Config(max_body_bytes=100)


def test_announced_length_over_the_limit() -> None:
    refused(ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=b"x" * 101), 413)


def test_chunked_bodies_are_counted() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 50

    answer = ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=chunks())
    assert refused(answer, 413)["code"] == "payload_too_large"


def test_a_body_at_the_limit_is_read() -> None:
    body = b'{"prompt": "x"}'.ljust(100)
    assert ask(FakeEngine(), "POST", "/v1/completions", config=SMALL, content=body).status_code == 200


@pytest.mark.parametrize(("length", "status"), [("-5", 400), ("ten", 400), ("9" * 5000, 413)])
def test_odd_lengths(length: str, status: int) -> None:
    headers = {"Content-Length": length}
    refused(ask(FakeEngine(), "POST", "/v1/completions", headers=headers, content=b"{}"), status)


class Sender:
    """Sends a body piece by piece, as it is told to."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, body: bytes, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


async def no_send(message: Message) -> None:
    raise AssertionError("nothing is sent here")


def start(layer: WholeBody, sender: Sender) -> asyncio.Task[None]:
    return asyncio.create_task(layer({"type": "http", "headers": []}, sender.messages.get, no_send))


class Taker:
    """An app that reads its body, and then waits for the client to leave."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert message["more_body"] is False
        self.bodies.append(message["body"])
        assert (await receive())["type"] == "http.disconnect"
        self.left += 1


def test_a_request_is_handed_on_when_its_body_is_there_and_hears_of_the_disconnect() -> None:
    async def run() -> None:
        taker, sender = Taker(), Sender()
        task = start(WholeBody(taker, 10**6, 5.0, 0), sender)
        sender.send(b"ab")
        sender.send(b"")
        await settle()
        assert taker.bodies == []
        sender.send(b"c", more=False)
        await settle()
        assert taker.bodies == [b"abc"] and taker.left == 0
        sender.leave()
        await task
        assert taker.left == 1

    asyncio.run(run())


@pytest.mark.parametrize("trickles", [False, True])
def test_a_body_that_takes_too_long(trickles: bool) -> None:
    async def run() -> None:
        taker, sender = Taker(), Sender()
        task = start(WholeBody(taker, 10**6, 0.05, 0), sender)
        while trickles and not task.done():
            sender.send(b"x")
            await asyncio.sleep(0.005)
        with pytest.raises(RequestTooSlow, match="within 0.05 s"):
            await task
        assert taker.bodies == []

    asyncio.run(run())


def test_the_time_limit_is_the_bodys_not_the_answers() -> None:
    async def run() -> None:
        taker, sender = Taker(), Sender()
        task = start(WholeBody(taker, 10**6, 0.02, 0), sender)
        sender.send(b"x", more=False)
        await asyncio.sleep(0.05)
        sender.leave()
        await task
        assert taker.left == 1

    asyncio.run(run())


def test_a_client_that_leaves_in_the_middle() -> None:
    async def run() -> None:
        taker, sender = Taker(), Sender()
        task = start(WholeBody(taker, 10**6, 5.0, 0), sender)
        sender.send(b"x")
        sender.leave()
        with pytest.raises(ClientDisconnect):
            await task

    asyncio.run(run())


def test_large_bodies_share_the_room_and_small_ones_need_none() -> None:
    async def run() -> None:
        taker = Taker()
        layer = WholeBody(taker, 10**6, 5.0, room=1000)
        first, second, small = Sender(), Sender(), Sender()
        tasks = [start(layer, sender) for sender in (first, second, small)]
        first.send(bytes(FREE_BYTES + 600))
        second.send(bytes(FREE_BYTES))
        await settle()
        second.send(bytes(500))
        with pytest.raises(Overloaded):
            await tasks[1]
        small.send(bytes(FREE_BYTES - 1))
        small.send(b"x", more=False)
        await settle()
        assert [len(body) for body in taker.bodies] == [FREE_BYTES]
        first.leave()
        with pytest.raises(ClientDisconnect):
            await tasks[0]
        again = Sender()
        task = start(layer, again)
        again.send(bytes(FREE_BYTES + 1000))
        again.send(b"", more=False)
        again.leave(), small.leave()
        await asyncio.gather(task, tasks[2])
        assert layer._room == 1000

    asyncio.run(run())


def test_a_body_takes_room_until_it_is_read() -> None:
    async def run() -> None:
        reading = asyncio.Event()

        async def slow_reader(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await reading.wait()
            note_read(Request(scope))
            await receive()

        layer, first, second = WholeBody(slow_reader, 10**6, 5.0, room=1000), Sender(), Sender()
        task = start(layer, first)
        first.send(bytes(FREE_BYTES + 600))
        first.send(b"", more=False)
        await settle()
        assert layer._room == 400
        refused_task = start(layer, second)
        second.send(bytes(FREE_BYTES + 600))
        with pytest.raises(Overloaded):
            await refused_task
        reading.set()
        await settle()
        assert layer._room == 1000 and not task.done()
        first.leave()
        await task

    asyncio.run(run())


def test_requests_whose_body_is_coming_take_nobodys_place() -> None:
    """With room for sixteen requests, forty half ones change nothing for the others."""

    async def run() -> None:
        import httpx

        from agentcache.server.app import create_app
        from tests.server.driver import BASE_URL

        async def half() -> AsyncIterator[bytes]:
            yield b'{"prompt": '
            await asyncio.sleep(60)

        app: Any = create_app(FakeEngine(), Config(max_concurrent_requests=1, body_timeout=0.3))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            halves = [asyncio.create_task(client.post("/v1/completions", content=half())) for _ in range(40)]
            await asyncio.sleep(0.05)
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            for answer in await asyncio.gather(*halves):
                error = refused(answer, 408)
                assert (error["code"], error["type"]) == ("request_too_slow", "timeout_error")
                assert answer.headers["connection"] == "close"

    asyncio.run(run())

"""Ways to ask the ASGI app: whole answers through httpx, and raw ASGI messages for streams and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Message

from agentcache.server.app import create_app
from agentcache.settings.config import Config
from tests.server.fake_engine import FakeEngine

BASE_URL = "http://127.0.0.1:8000"


def ask(
    engine: FakeEngine,
    method: str,
    path: str,
    *,
    config: Config | None = None,
    keep_alive_seconds: float = 10.0,
    base_url: str = BASE_URL,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> httpx.Response:
    """The answer to one request; `loop` makes the event loop that it is answered in."""

    async def send() -> httpx.Response:
        app = create_app(engine, config or Config(), keep_alive_seconds=keep_alive_seconds)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url) as client:
            return await client.request(method, path, **options)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(send())


async def ask_each(
    engine: FakeEngine, path: str, requests: Iterable[dict[str, Any]], *, config: Config | None = None
) -> list[httpx.Response]:
    """The answers of one server to POST requests, one after the other."""
    transport = httpx.ASGITransport(create_app(engine, config or Config()))
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        return [await client.post(path, **options) for options in requests]


def post(engine: FakeEngine, path: str, body: Any, **options: Any) -> httpx.Response:
    return ask(engine, "POST", path, json=body, **options)


def chat(engine: FakeEngine, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    return post(engine, "/v1/chat/completions", messages | (body or {}), **options)


def complete(engine: FakeEngine, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
    return post(engine, "/v1/completions", {"prompt": "hi"} | (body or {}), **options)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def settle() -> None:
    """Let all go on that waits for nothing but its turn in the event loop."""
    for _ in range(100):
        await asyncio.sleep(0)


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The `error` object of a refusal."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    assert "Traceback" not in response.text
    return dict(error)


@dataclass
class LeavingClient:
    """Posts a body and leaves when `leave` says so of what it has received."""

    leave: Callable[[list[Message]], bool]
    sent: list[Message] = field(default_factory=list)

    async def post(self, app: Any, path: str, body: dict[str, Any]) -> None:
        chunks = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Message:
            if chunks:
                return chunks.pop()
            while not self.leave(self.sent):
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        await app(scope, receive, send)

"""The log of requests: a line each, with what it cost and nothing of what it said."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentcache.api.report import AgentInfo, CacheState, Update
from agentcache.errors import Overloaded
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from tests.server.driver import BASE_URL, LeavingClient, ask, chat, complete
from tests.server.fake_engine import MODEL, POET, FakeEngine

ON = Config(log_requests=True)
SECRET = "xyzzy"

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """What was logged, without the milliseconds."""
    caplog.set_level(logging.INFO)

    def read() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "agentcache.requests"]
        assert all(re.search(r" ms=\d+$", line) for line in found)
        return [line.rpartition(" ")[0] for line in found]

    return read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_completion(stream: bool, n: int, lines: Lines) -> None:
    chat(FakeEngine(), {"agent": "alice", "stream": stream, "n": n}, config=ON)
    assert lines() == [f"POST /v1/chat/completions 200 agent=alice model={MODEL.id} in=7 out={3 * n} cached=5"]


def test_an_adapter_is_named_and_prompts_are_added_up(lines: Lines) -> None:
    engine = FakeEngine(model=replace(MODEL, adapters=(POET,)))
    complete(engine, {"prompt": ["a", "b"], "n": 2, "model": "poet"}, config=ON)
    assert lines() == ["POST /v1/completions 200 agent=- model=poet in=14 out=12 cached=10"]


def test_a_warm_up_says_what_it_computed(lines: Lines) -> None:
    alice = AgentInfo("alice", 0, 0, CacheState.COLD, 0, 0, 1.0, 2.0)
    ask(FakeEngine(known={"alice": alice}), "POST", "/v1/agents/alice/warm", json={"prompt": "a"}, config=ON)
    assert lines() == [f"POST /v1/agents/{{id}}/warm 200 agent=alice model={MODEL.id} in=7 out=0 cached=5"]


def test_refusals_and_unknown_routes(lines: Lines) -> None:
    def script(request: object) -> list[Update | float | Exception]:
        return [Overloaded("full")]

    chat(FakeEngine(script=script), {"agent": "alice"}, config=ON)
    chat(FakeEngine(), {"temperature": SECRET}, config=ON)
    ask(FakeEngine(), "GET", f"/{SECRET}%0AGET /health 200", config=ON)
    ask(FakeEngine(), f"FAKE{SECRET}"[:4], "/health", config=ON)
    assert lines() == [
        f"POST /v1/chat/completions 503 agent=alice model={MODEL.id} in=- out=- cached=-",
        "POST /v1/chat/completions 400 agent=- model=- in=- out=- cached=-",
        "GET unknown 404 agent=- model=- in=- out=- cached=-",
        "FAKE /health 405 agent=- model=- in=- out=- cached=-",
    ]


def test_a_client_that_leaves(lines: Lines) -> None:
    async def run() -> None:
        app = create_app(FakeEngine(script=lambda request: [5.0]), ON)
        client = LeavingClient(lambda sent: True)
        await client.post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})

    asyncio.run(run())
    assert lines() == [f"POST /v1/chat/completions 499 agent=- model={MODEL.id} in=- out=- cached=-"]


@pytest.mark.parametrize("stream", [False, True])
def test_neither_content_nor_keys_nor_names_that_clients_make_up(stream: bool, lines: Lines) -> None:
    config = replace(ON, api_key=f"key-{SECRET}")
    body: dict[str, Any] = {
        "model": f"gpt-{SECRET}",
        "messages": [{"role": "user", "content": SECRET}],
        "user": SECRET,
        "prompt_cache_key": f"{SECRET} {SECRET}",
        "stream": stream,
    }
    headers = {"Authorization": f"Bearer key-{SECRET}", "User-Agent": SECRET}
    chat(FakeEngine(), body, config=config, headers=headers, params={"q": SECRET})
    [line] = lines()
    assert " 200 agent=pck-" in line and SECRET not in line


def test_off_unless_asked_for(lines: Lines) -> None:
    chat(FakeEngine())
    assert lines() == []


def test_words_stay_words(lines: Lines) -> None:
    """A folder may be called anything."""
    chat(FakeEngine(model=replace(MODEL, id='my "model"\nGET')), config=ON)
    [line] = lines()
    assert r'model="my \"model\"\nGET" in=7' in line and "\n" not in line


def test_every_request_of_an_app_has_its_line(lines: Lines) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(create_app(FakeEngine(), ON))
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
            await asyncio.gather(*(client.get("/health") for _ in range(5)))

    asyncio.run(run())
    assert lines() == ["GET /health 200 agent=- model=- in=- out=- cached=-"] * 5

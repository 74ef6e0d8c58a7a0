from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentcache.api.report import FinishReason, Update
from agentcache.api.request import Request
from agentcache.errors import Overloaded
from agentcache.gateway.operations import CreateAgent
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from tests.rounds import in_rounds, within
from tests.server.driver import BASE_URL, chat, complete, events, post, refused
from tests.server.fake_engine import REPORT, FakeEngine

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TURNS = {"/v1/chat/completions": HI, "/v1/messages": HI, "/v1/completions": {"prompt": "hi"}}


def stuck(request: object) -> list[Update | float | Exception]:
    return [60.0]


def stuck_in_the_middle(request: object) -> list[Update | float | Exception]:
    return [Update("a", (1,), prompt_token_ids=(1,)), 60.0]


@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize("by", ["server", "request"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(path: str, by: str, stream: bool) -> None:
    engine = FakeEngine(script=stuck)
    config = Config(request_timeout=0.05 if by == "server" else 60)
    fields = {"request_timeout": 60 if by == "server" else 0.05, "stream": stream}
    answer = post(engine, path, TURNS[path] | fields, config=config)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert engine.cancelled == [engine.requests[0].request_id]


def test_a_timeout_without_a_stream_cancels_what_has_begun() -> None:
    engine = FakeEngine(script=stuck_in_the_middle)
    assert refused(chat(engine, {"request_timeout": 0.05}), 504)["code"] == "request_timeout"
    assert engine.cancelled


def test_a_timeout_in_mid_stream_is_an_event() -> None:
    engine = FakeEngine(script=stuck_in_the_middle)
    *_, last = events(chat(engine, {"stream": True, "request_timeout": 0.05}, keep_alive_seconds=0.02))
    assert last["error"]["code"] == "request_timeout"
    assert engine.cancelled


def test_timeouts_of_a_warm_up() -> None:
    engine = FakeEngine(script=stuck)

    async def run() -> httpx.Response:
        await engine.call(CreateAgent("a"))
        app = create_app(engine, Config())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            return await client.post("/v1/agents/a/warm", json={"prompt": "x", "request_timeout": 0.05})

    assert refused(asyncio.run(run()), 504)["code"] == "request_timeout"


@pytest.mark.parametrize("value", [0, -1, "1", True])
def test_a_time_limit_is_a_positive_number(value: object) -> None:
    assert refused(chat(FakeEngine(), {"request_timeout": value}), 400)["param"] == "request_timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_that_is_kept_changes_nothing(stream: bool) -> None:
    assert chat(FakeEngine(), {"request_timeout": 30, "stream": stream}).status_code == 200


@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_in_every_dialect(path: str, stream: bool) -> None:
    engine = FakeEngine(script=lambda request: [Overloaded("full")])
    answer = post(engine, path, TURNS[path] | {"stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["type"] == "overloaded_error"


def test_too_many_requests_are_refused_whatever_they_want() -> None:
    engine = FakeEngine(script=stuck)
    config = Config(max_concurrent_requests=1)

    async def run() -> dict[str, int]:
        app = create_app(engine, config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL) as client:
            waiting = [
                asyncio.create_task(client.post("/v1/chat/completions", json=HI))
                for _ in range(config.max_waiting_requests)
            ]
            while len(engine.requests) < len(waiting):
                await asyncio.sleep(0.001)
            asked: list[tuple[str, str, Any]] = [
                ("POST", "/v1/completions", {"prompt": "x"}),
                ("POST", "/v1/agents", {"id": "a"}),
                ("DELETE", "/v1/agents/a", None),
                ("GET", "/health", None),
                ("GET", "/v1/cache/stats", None),
            ]
            statuses = {}
            for method, path, body in asked:
                answer = await client.request(method, path, json=body)
                statuses[f"{method} {path}"] = answer.status_code
                assert ("retry-after" in answer.headers) == (answer.status_code == 503)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await client.post("/v1/agents", json={"id": "a"})).status_code == 201  # places are given back
        return statuses

    assert asyncio.run(run()) == {
        "POST /v1/completions": 503,
        "POST /v1/agents": 503,
        "DELETE /v1/agents/a": 503,
        "GET /health": 200,
        "GET /v1/cache/stats": 200,
    }


def test_prompts_of_one_call_run_at_the_same_time_but_not_more_than_the_engine_takes() -> None:
    running, most = 0, 0

    class Counting(FakeEngine):
        async def generate(self, request: Request, take: Callable[[Update], None], /) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await super().generate(request, take)
            finally:
                running -= 1

    def script(request: object) -> list[Update | float | Exception]:
        end = Update(finish_reason=FinishReason.STOP, report=REPORT)
        return [Update("a", (1,), prompt_token_ids=(1,)), 0.01, end]

    engine = Counting(script=script)
    answer = complete(engine, {"prompt": [f"p{i}" for i in range(9)]}, config=Config(max_concurrent_requests=3))
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(9))
    assert most == 3


@in_rounds
def test_the_first_prompt_that_fails_ends_the_others() -> None:
    def script(request: Any) -> list[Update | float | Exception]:
        return [0.01, Overloaded("full")] if request.prompt.text == "bad" else [60.0]

    engine = FakeEngine(script=script)
    with within(10):
        assert refused(complete(engine, {"prompt": ["good", "bad", "good"]}), 503)["code"] == "overloaded"
    assert len(engine.cancelled) == 2


@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize("priority", [None, "interactive", "background"])
def test_priorities_reach_the_engine(path: str, priority: str | None) -> None:
    engine = FakeEngine()
    post(engine, path, TURNS[path] | {"priority": priority})
    assert engine.requests[0].priority == priority
    assert not engine.requests[0].is_background or priority == "background"


def test_a_warm_up_is_a_background_request() -> None:
    engine = FakeEngine()
    complete(engine, {"max_tokens": 0})
    complete(engine, {"max_tokens": 0, "priority": "interactive"})
    assert [request.is_background for request in engine.requests] == [True, False]


def test_unknown_priorities_are_refused() -> None:
    assert refused(chat(FakeEngine(), {"priority": "high"}), 400)["param"] == "priority"

"""When the engine fails, everybody who waits is told, and /health says so. It is let fail at `Engine.step`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentcache.engine.engine import Engine
from agentcache.gateway import completions
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.server.app import create_app
from agentcache.settings.config import Config

BUDGETS: dict[str, Any] = {"ram_budget": 64_000_000, "disk_budget": 256_000_000}
LONG = {"max_tokens": 20_000, "ignore_eos": True}


@dataclass
class Trap:
    """Set, it lets the next step fail. While `door` is closed no prompt gets past its preparation."""

    is_set: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        self.door = threading.Event()
        self.door.set()


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Trap:
    trap = Trap()
    step, prepare = Engine.step, completions.prepare_request

    def step_or_fail(engine: Engine) -> None:
        trap.steps += 1
        if trap.is_set:
            raise RuntimeError("device lost")
        step(engine)

    def prepare_behind_the_door(*arguments: Any, **more: Any) -> Any:
        trap.door.wait(60)
        return prepare(*arguments, **more)

    monkeypatch.setattr(Engine, "step", step_or_fail)
    monkeypatch.setattr(completions, "prepare_request", prepare_behind_the_door)
    return trap


@asynccontextmanager
async def serving(model: Path, cache_dir: Path) -> AsyncGenerator[httpx.AsyncClient, None]:
    started = asyncio.Event()
    engine = AsyncEngine(Config(model=str(model), cache_dir=cache_dir, max_concurrent_requests=2, **BUDGETS))
    app = create_app(engine, engine.config, on_start=lambda failure: started.set())
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app):
        await started.wait()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def decoding(http: httpx.AsyncClient, trap: Trap) -> None:
    """Returns when something has been decoded for a while."""
    before = trap.steps

    async def steps_done() -> bool:
        return trap.steps > before + 10

    await until(steps_done)


def post(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(http.post(path, json=body))


def check_told(answer: httpx.Response) -> None:
    """The answer, whole or in the last event of a stream, says that the engine has stopped."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert '"code":"engine_stopped"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        return
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "engine_stopped"
    assert "device lost" not in answer.text


@pytest.mark.slow
def test_every_waiter_is_told(live_model: Path, tmp_path: Path, trap: Trap, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(live_model, tmp_path / "cache") as http:
            for agent in ("busy", "kept"):
                await http.post("/v1/completions", json={"prompt": "hi", "agent": agent, "max_tokens": 3})
            waiting = [
                post(http, {"prompt": "a", "stream": True, **LONG}),
                post(http, {"prompt": "b", "agent": "busy", **LONG}),
                post(http, {"prompt": "c", **LONG}),  # waits for a place in the batch
            ]
            await decoding(http, trap)
            waiting += [
                post(http, {"prompt": "d", "agent": "busy"}),  # waits for its agent
                post(http, {"prompt": ["e", "f", "g"]}),
                post(http, {}, "/v1/agents/busy/save"),
            ]
            await decoding(http, trap)
            trap.is_set = True
            async with asyncio.timeout(60):
                for answer in await asyncio.gather(*waiting):
                    check_told(answer)
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            assert "agentcache_up 0.0" in (await http.get("/metrics")).text
            check_told(await http.post("/v1/completions", json={"prompt": "x"}))
            check_told(await http.get("/v1/agents"))
        trap.is_set = False
        async with serving(live_model, tmp_path / "cache") as http:  # the folder was given back, with what it held
            agents = (await http.get("/v1/agents")).json()["data"]
            assert [(agent["id"], agent["tokens"] > 0) for agent in agents] == [("busy", True), ("kept", True)]

    asyncio.run(run())
    assert "device lost" in caplog.text


@pytest.mark.parametrize("fails", [True, False])
def test_a_request_whose_prompt_is_being_prepared_when_the_engine_ends(
    live_model: Path, tmp_path: Path, trap: Trap, fails: bool
) -> None:
    """It arrives at an engine that is not there any more, after a failure or because the server shuts down."""

    async def run() -> None:
        async with serving(live_model, tmp_path / "cache") as http:
            running = post(http, {"prompt": "a", **LONG})
            await decoding(http, trap)
            trap.door.clear()
            late = post(http, {"prompt": "b"})
            await asyncio.sleep(0.05)
            if fails:
                trap.is_set = True
                await running
            else:
                closing = asyncio.create_task(http._transport.app.state.context.engine.close())  # type: ignore[attr-defined]
                await running
            trap.door.set()
            async with asyncio.timeout(60):
                answer = await late
            if not fails:
                await closing
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == ("engine_stopped" if fails else "shutting_down")

    asyncio.run(run())

"""CPU time in Python of a decode step with many streaming requests.

It is the thread time of the engine thread and the event loop. The model has no layers, and MLX computes on other
threads.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentcache.engine.engine import Engine
from agentcache.gateway.async_engine import AsyncEngine

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

T = TypeVar("T")

_SHORT_TOKENS = 8
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class StepPlan:
    rows: int = 16
    steps: int = 200
    rounds: int = 5
    seed: int = 0


@dataclass(frozen=True)
class StepCost:
    """Milliseconds per step: CPU of the engine thread and of the event loop, and wall time."""

    engine_ms: float
    streaming_ms: float
    wall_ms: float

    @property
    def python_ms(self) -> float:
        return self.engine_ms + self.streaming_ms


async def measure_step(plan: StepPlan, engine: AsyncEngine, app: App) -> StepCost:
    """Return medians. Removes the layers of `engine`, which must be started and allow `plan.rows` requests."""
    await _on_thread(engine, lambda engine: engine.loaded.model.layers.clear())
    return await _StepBench(plan, engine, app).run()


async def _on_thread(engine: AsyncEngine, function: Callable[[Engine], T]) -> T:
    """Call `function` on the engine thread between two steps."""
    thread, result = engine._thread, Future[T]()

    def run() -> None:
        assert thread.engine is not None
        result.set_result(function(thread.engine))

    thread.post(run)
    return await asyncio.wrap_future(result)


@dataclass(frozen=True)
class _Clocks:
    """Seconds on each clock."""

    engine: float
    streaming: float
    wall: float

    def __sub__(self, other: _Clocks) -> _Clocks:
        return _Clocks(self.engine - other.engine, self.streaming - other.streaming, self.wall - other.wall)


class _StepBench:
    """Sends streams through the ASGI application, without sockets."""

    def __init__(self, plan: StepPlan, engine: AsyncEngine, app: App) -> None:
        self._plan = plan
        self._engine = engine
        self._app = app
        self._random = random.Random(plan.seed)

    async def run(self) -> StepCost:
        await self._spend(_SHORT_TOKENS)
        gc.collect()
        gc.freeze()  # as the server does
        costs = [await self._cost_of_a_step() for _ in range(self._plan.rounds)]
        gc.unfreeze()
        return StepCost(
            statistics.median(cost.engine_ms for cost in costs),
            statistics.median(cost.streaming_ms for cost in costs),
            statistics.median(cost.wall_ms for cost in costs),
        )

    async def _cost_of_a_step(self) -> StepCost:
        """Subtract short requests from long ones to cancel prompts and endings."""
        short, long = await self._spend(_SHORT_TOKENS), await self._spend(_SHORT_TOKENS + self._plan.steps)
        extra, steps = long - short, self._plan.steps
        return StepCost(extra.engine / steps * 1e3, extra.streaming / steps * 1e3, extra.wall / steps * 1e3)

    async def _spend(self, max_tokens: int) -> _Clocks:
        before = await self._clocks()
        await asyncio.gather(*(self._request(max_tokens) for _ in range(self._plan.rows)))
        return await self._clocks() - before

    async def _clocks(self) -> _Clocks:
        return _Clocks(
            await _on_thread(self._engine, lambda engine: time.thread_time()), time.thread_time(), time.perf_counter()
        )

    async def _request(self, max_tokens: int) -> None:
        vocab_size = self._engine.model.vocab_size
        body = {
            "prompt": self._random.choices(range(vocab_size - 64), k=_PROMPT_TOKENS),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        await _post(self._app, "/v1/completions", body)


async def _post(app: App, path: str, body: Message) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status: list[int] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def send(message: Message) -> None:
        status.append(message.get("status", 200))

    await app(scope, receive, send)
    if status[0] != 200:
        raise RuntimeError(f"the application answered {status[0]}")

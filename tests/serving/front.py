"""The real HTTP app on the real engine, in this process: for what a model is made to say, see `scripted`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import CheckIntegrity
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from agentcache.text.tokenizer import Tokenizer
from tests.serving.conversation import DISK_BUDGET, RAM_BUDGET


class Front:
    """Asks the app. Attributes: tokenizer: the served model's."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncEngine, config: Config) -> None:
        self._runner = runner
        self._engine = engine
        self._app = create_app(engine, config)
        self.tokenizer: Tokenizer = engine._thread.view.model.tokenizer

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        return self._ask("POST", path, json=body, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **options)

        response = self._runner.run(send())
        assert response.status_code == 200, response.text
        return response

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        text = self.post(path, body | {"stream": True}).text
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


@contextmanager
def open_front(model: Path, cache_dir: Path, **settings: Any) -> Iterator[Front]:
    values = {"ram_budget": RAM_BUDGET, "disk_budget": DISK_BUDGET} | settings
    config = Config(model=str(model), cache_dir=cache_dir, **values)
    with asyncio.Runner() as runner:
        engine = AsyncEngine(config)
        runner.run(engine.start())
        try:
            yield Front(runner, engine, config)
            runner.run(engine.call(CheckIntegrity()))
        finally:
            runner.run(engine.close())

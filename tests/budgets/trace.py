"""What of the package runs while something is served: modules, functions and classes, on all threads.

The real app and the real engine serve the embedded model in this process. A case is what three turns enter together, so
that whatever depends on time (which thread was quicker, which file was written already) has shown itself.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from agentcache.gateway.async_engine import AsyncEngine
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from agentcache.settings.tables import parse_adapters
from tests.adapters_factory import ATTENTION, make_adapter

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("agentcache", "cli", "metal_kernels", "server"))
TURNS = 3
ADAPTER = "ann"
UNLIMITED = 1e6  # divergence: no request is computed exactly instead
PROMPT = "The red fox keeps 17 keys in a tin. " * 18 + "How many keys are in the tin?"


@dataclass(frozen=True)
class Entered:
    """Number of different modules, functions and classes of the package that ran."""

    modules: int
    functions: int
    classes: int


@dataclass
class Tracer:
    """Notes the code that is entered while `is_on`, on threads that start while it is installed.

    Functions are `def`s: lambdas and comprehensions count as part of the function around them. A class is entered when
    one of the methods that it defines runs; methods that a dataclass generates count for their class.
    """

    is_on: bool = False
    codes: set[CodeType] = field(default_factory=set)
    generated: dict[CodeType, tuple[str, str]] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self.is_on:
            return
        code = frame.f_code
        if code not in self.codes:
            self.codes.add(code)
        if code.co_filename == "<string>" and code not in self.generated:
            owner = type(frame.f_locals.get("self"))
            self.generated[code] = (owner.__module__, owner.__qualname__)

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def on(self) -> Iterator[None]:
        gc.collect()  # finalizers of what tests before left behind are no part of it
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def functions(self) -> set[tuple[str, str]]:
        """File and qualified name of each, without bodies of modules and of classes."""
        found = set()
        for code in self.codes:
            path = _path(code)
            is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            if path is not None and is_function:
                found.add((path, code.co_qualname))
        return found

    def entered(self) -> Entered:
        functions = self.functions()
        classes = {(path, owner) for path, name in functions if (owner := _owner(name))}
        for module, name in self.generated.values():
            if module.startswith("agentcache."):
                path = Path(inspect.getfile(sys.modules[module])).resolve()
                classes.add((str(path.relative_to(ROOT)), name))
        return Entered(len({path for path, _ in functions}), len(functions), len(classes))


def _path(code: CodeType) -> str | None:
    """File relative to the repository, links resolved; None for code of others."""
    if not code.co_filename.startswith(OURS):
        return None
    return str(Path(code.co_filename).resolve().relative_to(ROOT))


def _owner(name: str) -> str:
    """Class that a function with this qualified name is a method of; empty if it is none."""
    return name.rpartition("<locals>.")[2].rpartition(".")[0]


def measure_turn(folder: Path) -> dict[str, Entered]:
    """Entered in a streamed turn.

    Args:
        folder: the model and a cache folder are written there.
    """
    turn = Tracer()
    embedded_model_path(folder)
    with turn.installed():
        asyncio.run(_turns(_plain(folder), turn, [_body("first"), _body("second"), _body("second", " And the fox?")]))
    return {"turn": turn.entered()}


def measure_others(folder: Path) -> dict[str, Entered]:
    """Entered in a restart with a warm turn, and in a turn of the policy residual.

    Args:
        folder: as `measure_turn` has left it.
    """
    adapter = make_adapter(folder / ADAPTER, embedded_model_path(folder), rank=4, strength=0.3, targets=ATTENTION)
    restart, residual = Tracer(), Tracer()
    with restart.installed(), restart.on():
        asyncio.run(_turns(_plain(folder), None, [_body("second", " And the fox?", " And the tin?")]))
    lossy = _config(
        folder / "lossy", adapters=parse_adapters({ADAPTER: adapter}), max_divergence=UNLIMITED, trunk_budget=0
    )
    asked = {"model": ADAPTER, "agentcache": {"policy": "residual"}}
    with residual.installed():
        asyncio.run(_turns(lossy, residual, [_body(name, **asked) for name in ("first", "second", "first")]))
    return {"restart": restart.entered(), "residual turn": residual.entered()}


def _plain(folder: Path) -> Config:
    return _config(folder / "plain")


def _config(cache_dir: Path, **settings: Any) -> Config:
    return Config(cache_dir=cache_dir, kv="4", ram_budget=64 << 20, disk_budget=1 << 30, **settings)


def _body(agent: str, *more: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    for text in more:
        messages += [{"role": "assistant", "content": "17"}, {"role": "user", "content": text}]
    sampling = {"max_tokens": 3, "temperature": 0}
    return {
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "agent": agent,
        **sampling,
        **fields,
    }


async def _turns(config: Config, tracer: Tracer | None, bodies: Sequence[dict[str, Any]]) -> None:
    async with _client(config) as client:
        for body in bodies:
            if tracer is None:
                await _stream(client, body)
            else:
                with tracer.on():
                    await _stream(client, body)


@asynccontextmanager
async def _client(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has started."""
    engine = AsyncEngine(config)
    started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_start(failure: Exception | None) -> None:
        started.set_result(None) if failure is None else started.set_exception(failure)

    app = create_app(engine, config, on_start=on_start)
    async with app.router.lifespan_context(app):
        await started
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            yield client


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post("/v1/chat/completions", json=body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and events[-1] == "[DONE]", response.text
    said = [json.loads(event) for event in events[:-1]]
    report = next(event["agentcache"] for event in reversed(said) if "agentcache" in event)
    assert report["policy"] == body.get("agentcache", {"policy": "exact"})["policy"], report

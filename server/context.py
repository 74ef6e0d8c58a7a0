"""What every route needs: the engine, the settings, the body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from agentcache.config import Config
from agentcache.errors import EngineStopped, Overloaded
from agentcache.server.engine import Engine
from agentcache.server.metrics import ServerMetrics
from agentcache.server.validate import Reader, parse_object, refuse_long_lists, refuse_many_values

T = TypeVar("T")

SERVER_NAME = "agentcache"  # of the Server header, by which the command line knows its own kind
SMALL_BODY = 128 << 10  # bytes that are read in a millisecond or two


@dataclass(frozen=True)
class Context:
    """The server's parts. `keep_alive_seconds` is the longest silence of a stream."""

    engine: Engine
    config: Config
    keep_alive_seconds: float
    metrics: ServerMetrics = field(default_factory=ServerMetrics)


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def engine_of(request: Request) -> Engine:
    """The engine, once it can answer."""
    engine = context_of(request).engine
    if engine.failure is not None:
        raise EngineStopped(str(engine.failure)) from engine.failure
    if not engine.ready:
        raise Overloaded("The model is still loading.", code="loading")
    return engine


async def read_body(request: Request) -> Reader:
    return await _read(await request.body(), Reader)


async def read_prompt_body(request: Request, param: str, read: Callable[[Reader], T], *, empty: bytes = b"") -> T:
    """What `read` makes of a body that holds a prompt, under the name `param`; `empty` stands for no body."""
    raw = await request.body() or empty
    max_context = engine_of(request).model.max_context
    refuse_many_values(raw, max_context, param)

    def check_and_read(value: dict[str, Any]) -> T:
        refuse_long_lists(value, max_context)
        return read(Reader(value))

    return await _read(raw, check_and_read)


async def _read(raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the JSON object in a body; of a large one on a thread, while the event loop goes on."""

    def work() -> T:
        return read(parse_object(raw))

    return work() if len(raw) <= SMALL_BODY else await asyncio.to_thread(work)

"""What every route needs: the engine, the settings, the body."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from agentcache.config import Config
from agentcache.errors import EngineStopped, Overloaded
from agentcache.server.engine import Engine
from agentcache.server.metrics import ServerMetrics
from agentcache.server.validate import Reader, parse_object

SERVER_NAME = "agentcache"  # of the Server header, by which the command line knows its own kind


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
    return Reader(parse_object(await request.body()))


async def read_optional_body(request: Request) -> Reader:
    return Reader(parse_object(await request.body() or b"{}"))

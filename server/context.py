"""What every route needs: the engine, the settings, the body."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request

from agentcache.config import Config
from agentcache.errors import EngineStopped, Overloaded
from agentcache.server.engine import Engine
from agentcache.server.metrics import ServerMetrics
from agentcache.server.validate import Reader, parse_object
from agentcache.serving.report import ModelInfo

SERVER_NAME = "agentcache"  # of the Server header, by which the command line knows its own kind


@dataclass(frozen=True)
class Context:
    """The server's parts. `keep_alive_seconds` is the longest silence of a stream."""

    engine: Engine
    config: Config
    keep_alive_seconds: float
    metrics: ServerMetrics = field(default_factory=ServerMetrics)


@dataclass(frozen=True)
class Call:
    """One request as it is read: what was sent, to which model, and the settings that say what it means.

    Args:
        notes: what was read in another way than it was sent, for the client to know.
    """

    body: Reader
    headers: Headers
    model: ModelInfo
    config: Config
    notes: list[str] = field(default_factory=list)


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


async def read_call(request: Request, *, without_body: bytes = b"") -> Call:
    """The request, once the engine can answer.

    Args:
        without_body: what stands for an empty body.
    """
    model = engine_of(request).model
    body = Reader(parse_object(await request.body() or without_body))
    return Call(body, request.headers, model, context_of(request).config)


def name_agent(request: Request, agent: str | None) -> None:
    """Has the response say whose request it is, also if it is a refusal."""
    request.state.agent = agent

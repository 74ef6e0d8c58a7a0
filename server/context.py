"""The server's context, and reading request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from agentcache.errors import ContextLengthExceeded, EngineStopped, Overloaded
from agentcache.gateway.prompt_workers import Workers, shutting_down
from agentcache.report import ModelInfo
from agentcache.server.body import note_read
from agentcache.server.engine import Engine
from agentcache.server.known_clients import KnownClients
from agentcache.server.large_json import LargeJson
from agentcache.server.last_turns import LastTurns
from agentcache.server.metrics import ServerMetrics
from agentcache.server.read_limit import ReadLimit
from agentcache.server.response_echo import json_size
from agentcache.server.stream import until_disconnect
from agentcache.server.validate import Reader, parse_object, refuse_long_lists
from agentcache.settings.config import Config
from agentcache.store.response_files import Continued

T = TypeVar("T")

SERVER_NAME = "agentcache"  # in the Server header; recognised by the CLI
# Of `body_weight`: small bodies take up to 3 ms on the event loop. Large ones would hold the GIL: a child process
# parses them.
SMALL_BODY = 128 << 10
LARGE_BODY = 1_000_000
_BYTES_PER_GROUP = 192  # an object or list takes up to 5 µs
_BYTES_PER_QUOTE = 12  # two per string
_BYTES_PER_COMMA = 2  # of token ids
MOST_NOTES = 32
READERS = 2  # one for large bodies; they compete for the GIL
MOST_UNREAD = 64  # queued bodies


@dataclass(frozen=True)
class Context:
    engine: Engine
    config: Config
    keep_alive_seconds: float
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    last_turns: LastTurns = field(default_factory=LastTurns)
    clients: KnownClients = field(default_factory=KnownClients)

    @cached_property
    def workers(self) -> Workers:
        return Workers(READERS, name="agentcache-bodies", large=LARGE_BODY, most_waiting=MOST_UNREAD)

    async def close(self) -> None:
        self.large_json.close()
        await asyncio.gather(self.workers.close(shutting_down()), self.engine.close())

    @cached_property
    def large_json(self) -> LargeJson:
        return LargeJson(self.engine)


class Notes:
    """Notes to the client: the first `MOST_NOTES`, and a count of the rest."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._more = 0

    def add(self, note: str, *, once: bool = False) -> None:
        if once and note in self._first:
            return
        if len(self._first) < MOST_NOTES:
            self._first.append(note)
        else:
            self._more += 1

    @property
    def told(self) -> tuple[str, ...]:
        return (*self._first, *([f"and {self._more} more of this kind"] if self._more else []))


@dataclass(frozen=True)
class Call:
    """One request while it is read.

    Args:
        num_bytes: length of the body.
        continued: stored responses and items that it refers to.
        fallback_agent: agent if nothing names one.
    """

    body: Reader
    headers: Headers
    model: ModelInfo
    config: Config
    num_bytes: int = 0
    notes: Notes = field(default_factory=Notes)
    clients: KnownClients = field(default_factory=KnownClients)
    continued: Continued = field(default_factory=Continued)
    fallback_agent: str | None = None


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def engine_of(request: Request) -> Engine:
    """The engine, if it can answer."""
    engine = context_of(request).engine
    if isinstance(engine.failure, EngineStopped):
        raise engine.failure
    if engine.failure is not None:
        raise EngineStopped(str(engine.failure)) from engine.failure
    if not engine.ready:
        raise Overloaded("The model is still loading.", code="loading")
    return engine


async def read_call(request: Request, *, without_body: bytes = b"") -> Call:
    """Read a request without a prompt; `without_body` replaces an empty body."""
    return await _read(request, None, lambda call: call, without_body)


async def read_prompt(request: Request, param: str, read: Callable[[Call], T], *, without_body: bytes = b"") -> T:
    """Apply `read` to a request with a prompt in field `param`. May raise ContextLengthExceeded."""
    return await _read(request, param, read, without_body)


async def _read(request: Request, param: str | None, read: Callable[[Call], T], without_body: bytes) -> T:
    """Read a small body at once, others on a thread until the client leaves, large ones in a child process."""
    model, context = engine_of(request).model, context_of(request)
    raw = await _body_of(request) or [without_body]
    size, weight = len(raw[0]), body_weight(raw[0])

    def work(has_ended: Callable[[], bool]) -> T:
        limit = ReadLimit(size, has_ended, rests=weight > SMALL_BODY)
        value = parse_object(raw) if weight <= LARGE_BODY else context.large_json.parse(raw, param, limit.check)
        refuse_long_lists(value, model.max_context)
        body = Reader(value, limit=limit)
        return read(Call(body, request.headers, model, context.config, size, clients=context.clients))

    try:
        if weight <= SMALL_BODY:
            return work(_never)
        return await until_disconnect(request.receive, context.workers.run(weight, work))
    finally:
        raw.clear()
        note_read(request)


async def read_again(request: Request, call: Call, read: Callable[[Call], T]) -> T:
    """Apply `read` again after stored items were added.

    Raises ContextLengthExceeded for more items than tokens in the context.
    """
    items = [*call.continued.history(), *call.continued.items.values()]
    given = call.body.get("input")
    count = len(items) + (len(given) if isinstance(given, list) else 1)
    if count > call.model.max_context:
        message = f"The conversation has {count} items; the model's context has {call.model.max_context} tokens."
        raise ContextLengthExceeded(message, param="previous_response_id")

    def work(has_ended: Callable[[], bool]) -> T:
        num_bytes = call.num_bytes + json_size(items)
        body = Reader(call.body.value, limit=ReadLimit(num_bytes, has_ended, rests=True))
        return read(replace(call, body=body, num_bytes=num_bytes))

    size = call.num_bytes + _BYTES_PER_GROUP * len(items)
    return await until_disconnect(request.receive, context_of(request).workers.run(size, work))


def body_weight(raw: bytes) -> int:
    """Return the cost of reading a body, in bytes of plain text."""
    if len(raw) > LARGE_BODY:  # counting takes 1 ms per MB
        return len(raw)
    num_groups = raw.count(b"{") + raw.count(b"[")
    values = _BYTES_PER_QUOTE * raw.count(b'"') + _BYTES_PER_COMMA * raw.count(b",")
    return len(raw) + _BYTES_PER_GROUP * num_groups + values


def _never() -> bool:
    return False


async def _body_of(request: Request) -> list[bytes]:
    """Return the body in a list that the parser empties; `body` would keep it. `WholeBody` sends one message."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect()
    return [message["body"]] if message.get("body") else []


def name_agent(request: Request, agent: str | None) -> None:
    """Set the agent in the response header, also of errors."""
    request.state.agent = agent

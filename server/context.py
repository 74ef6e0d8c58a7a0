"""State of the server; reading requests."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import shorten
from threading import Lock
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from agentcache.api.model import ModelInfo
from agentcache.api.report import Match, Report
from agentcache.errors import ContextLengthExceeded, EngineStopped, Overloaded
from agentcache.gateway.prompt_workers import Workers, shutting_down
from agentcache.server.body import LargeJson, note_read
from agentcache.server.engine import Engine
from agentcache.server.metrics import ServerMetrics, log_word
from agentcache.server.validate import Reader, ReadLimit, never, parse_object, refuse_long_lists
from agentcache.settings.config import Config
from agentcache.store.response_files import Continued

log = logging.getLogger("agentcache.sessions")

_MOST_INSTALLATIONS = 256
_MOST_UNKEPT = 64
_MOST_NAME_CHARS = 40
_VERSION = re.compile(r"/v?[0-9].*")

_MOST_AGENTS = 1024
_MOST_LINE_CHARS = 80

_WHY = {
    Match.NEW: "no conversation of the agent began like this prompt",
    Match.PARTIAL: "the prompt changes the end of the conversation",
    Match.DIVERGE: "the prompt differs from the conversation at an early point",
}

T = TypeVar("T")

SERVER_NAME = "agentcache"
# By `body_weight`; small ones are read on the event loop.
SMALL_BODY = 128 << 10
LARGE_BODY = 1_000_000
_BYTES_PER_GROUP = 192  # an object or list
_BYTES_PER_QUOTE = 12  # two per string
_BYTES_PER_COMMA = 2  # of token ids
_BYTES_PER_VALUE = 4
MOST_NOTES = 32
READERS = 2  # one for large bodies
MOST_UNREAD = 64


class KnownClients:
    """Facts from clients' earlier requests. Bounded, thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._agents: OrderedDict[str, str] = OrderedDict()
        self._unkept: set[str] = set()

    def note_session(self, installation: str, agent: str) -> None:
        with self._lock:
            self._agents[installation] = agent
            self._agents.move_to_end(installation)
            while len(self._agents) > _MOST_INSTALLATIONS:
                self._agents.popitem(last=False)

    def latest_session(self, installation: str) -> str | None:
        with self._lock:
            return self._agents.get(installation)

    def note_unkept(self, user_agent: str) -> None:
        name = client_name(user_agent)
        with self._lock:
            if name in self._unkept or len(self._unkept) >= _MOST_UNKEPT:
                return
            self._unkept.add(name)
        log.info(
            "requests of %s name no agent or session, so nothing of them is kept; --default-agent NAME keeps those of"
            " all such clients, --default-agent %s=NAME of this one, and the header X-Session-ID of one session",
            *(log_word(name), log_word(name.lower())),
        )


def client_name(user_agent: str) -> str:
    words = user_agent.split(None, 1)
    return (_VERSION.sub("", words[0])[:_MOST_NAME_CHARS] if words else "") or "unknown"


class LastTurns:
    """Last turns of recent agents. Not thread-safe."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[float, Report]] = OrderedDict()  # with time.time()

    def note(self, report: Report) -> None:
        if report.agent is None:
            return
        self._turns[report.agent] = time.time(), report
        self._turns.move_to_end(report.agent)
        while len(self._turns) > _MOST_AGENTS:
            self._turns.popitem(last=False)

    def describe(self, agent: str, lineages: tuple[str, ...]) -> dict[str, Any] | None:
        """The last turn as JSON; None without one, or if its lineage is gone."""
        at, report = self._turns.get(agent, (0.0, None))
        if report is None or report.lineage not in lineages:
            return None
        return {
            "at": at,
            "lineage": report.lineage,
            "match": report.match,
            "cache_state": report.cache_state,
            "prompt_tokens": report.prompt_tokens,
            "reused_tokens": report.reused_tokens,
            "computed_tokens": report.computed_tokens,
            "time_to_first_token_ms": report.time_to_first_token_ms,
            "why": why(report),
        }


def why(report: Report) -> str | None:
    if report.lost_tokens:
        return f"{report.lost_tokens} tokens of the conversation were neither in RAM nor on disk"
    if report.volatile is not None and not report.volatile.moved:
        line = shorten(report.volatile.lines[0], _MOST_LINE_CHARS, placeholder=" …")
        return f"a line in front has changed: {line!r} (--stable-prefix moves it behind the conversation)"
    return _WHY.get(report.match)


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
    """Notes to the client: the first `MOST_NOTES`, then a count."""

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
    """One request while it is read; `continued` are stored responses and items that it refers to."""

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
    """Return the engine. Raises EngineStopped, or Overloaded while it loads."""
    engine = context_of(request).engine
    if isinstance(engine.failure, EngineStopped):
        raise engine.failure
    if engine.failure is not None:
        raise EngineStopped(str(engine.failure)) from engine.failure
    if not engine.ready:
        raise Overloaded("The model is still loading.", code="loading")
    return engine


async def read_call(request: Request, *, without_body: bytes = b"") -> Call:
    return await read_prompt(request, None, lambda call: call, without_body=without_body)


async def read_prompt(
    request: Request, param: str | None, read: Callable[[Call], T], *, without_body: bytes = b""
) -> T:
    """Apply `read` to a request with its prompt in `param`, on a thread if the body is large.

    Raises InvalidRequest, ContextLengthExceeded, or ClientDisconnect.
    """
    model, context = engine_of(request).model, context_of(request)
    message = await request.receive()  # the whole body; `request.body` would keep it
    if message["type"] == "http.disconnect":
        raise ClientDisconnect()
    raw = [message.pop("body", b"") or without_body]  # emptied by the parser
    size, weight = len(raw[0]), body_weight(raw[0])

    def work(has_ended: Callable[[], bool]) -> T:
        limit = ReadLimit(size, has_ended, rests=weight > SMALL_BODY)
        value = parse_object(raw) if weight <= LARGE_BODY else context.large_json.parse(raw, param, limit.check)
        refuse_long_lists(value, model.max_context)
        body = Reader(value, limit=limit)
        return read(Call(body, request.headers, model, context.config, size, clients=context.clients))

    try:
        if weight <= SMALL_BODY:
            return work(never)
        return await until_disconnect(request.receive, context.workers.run(weight, work))
    finally:
        raw.clear()
        note_read(request)


async def read_again(request: Request, call: Call, read: Callable[[Call], T]) -> T:
    """Apply `read` again with stored items. Raises ContextLengthExceeded."""
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
    """Cost of reading, in bytes of plain text."""
    if len(raw) > LARGE_BODY:  # counting takes 1 ms per MB
        return len(raw)
    num_groups = raw.count(b"{") + raw.count(b"[")
    values = _BYTES_PER_QUOTE * raw.count(b'"') + _BYTES_PER_COMMA * raw.count(b",")
    return len(raw) + _BYTES_PER_GROUP * num_groups + values


def json_size(value: Any, most: float = math.inf) -> int:
    """Approximate length as JSON, counted to about `most`."""
    size, rest = 0, [value]
    while rest and size <= most:
        part = rest.pop()
        size += _BYTES_PER_VALUE
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += sum(map(len, part))
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)
    return size


def name_agent(request: Request, agent: str | None) -> None:
    request.state.agent = agent


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client leaves, cancel it and raise ClientDisconnect.

    The body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect()
        return working.result()
    finally:
        await end(leaving)
        await end(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel and await a task; drop its exception."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # else asyncio would log it

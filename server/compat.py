"""Undocumented interfaces of HTTP libraries, in the versions of `READ`, and of asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import h11
import uvicorn
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# pyproject.toml excludes later minor versions.
READ = {"uvicorn": "0.54.0", "h11": "0.16.0", "sse-starlette": "3.7.0", "starlette": "1.10.0"}

# sse-starlette would cut streams off at SIGTERM; a running turn finishes and is saved.
AppStatus.enable_automatic_graceful_drain = False


class HeadParser(h11.Connection):
    """h11's parser; passes raw heads to `check_head`, because events merge repeated lengths.

    Between requests `trailing_data` starts with the head that `next_event` consumes.
    """

    def __init__(self, check_head: Callable[[bytes], None]) -> None:
        super().__init__(h11.SERVER)
        self._check_head = check_head

    def next_event(self) -> Any:
        head = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check_head(head)
        return event


class UvicornConnection(H11Protocol):
    """uvicorn's connection with another parser."""

    def __init__(self, *args: Any, parser: h11.Connection, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = parser

    @property
    def waits_for_client(self) -> bool:
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    @property
    def is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_write_paused(self) -> bool:
        return self.flow.write_paused

    def disconnect_request(self) -> None:
        """Send `http.disconnect` if the request is unanswered."""
        if not self.is_answered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class UvicornServer(uvicorn.Server):
    """uvicorn's server; subclasses override `on_tick` (ten times a second) and `shutdown`."""

    @property
    def connections(self) -> list[UvicornConnection]:
        return [each for each in self.server_state.connections if isinstance(each, UvicornConnection)]


def http_option(factory: Callable[..., UvicornConnection]) -> type[asyncio.Protocol]:
    """`uvicorn.Config(http=...)` documents a class, but only calls it."""
    return cast(type[asyncio.Protocol], factory)


def limit_read(transport: asyncio.Transport, num_bytes: int) -> None:
    """Limit asyncio's bytes per read (Python 3.11 to 3.13)."""
    transport.max_size = num_bytes  # type: ignore[attr-defined]


class EventStream(EventSourceResponse):
    """Sends events until their end or a disconnect, then awaits `close`.

    No pings: some clients cannot parse comments. No cancel scope per event: it is slow.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, ping=0, sep="\n")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)


def path_pattern(route: Route) -> re.Pattern[str]:
    """The route's pattern; `Route.matches` also compares methods."""
    return route.path_regex

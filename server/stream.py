"""Server-sent events, and what ends them early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from agentcache.errors import BrokenInvariant
from agentcache.serving.request import Update

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 10.0
DONE = ServerSentEvent("[DONE]", sep="\n")

# At SIGTERM a running turn finishes and is saved (uvicorn waits for it); sse-starlette would cut it off.
AppStatus.enable_automatic_graceful_drain = False


def event(data: dict[str, Any]) -> ServerSentEvent:
    """One event. ASCII only, since some clients split lines at U+2028 and U+0085 too."""
    return ServerSentEvent(json.dumps(data, allow_nan=False, separators=(",", ":")), sep="\n")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    The request's body must have been read: the next thing to receive is the disconnect.

    Raises:
        ClientDisconnect: the client left first; `work` has ended by then.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect()
        return working.result()
    finally:
        await _end(leaving)
        await _end(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen, so that asyncio does not report it as never retrieved


async def close(iterator: AsyncIterator[Any]) -> None:
    """Closes an iterator if it can be closed, which cancels an engine's generation."""
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()


class UpdateStream:
    """Updates of one completion, which can be waited for with a time limit.

    One `__anext__` of the engine may be under way across several waits; it is cancelled only by `close`.
    """

    def __init__(self, updates: AsyncIterator[Update]) -> None:
        self._updates = updates
        self._next: asyncio.Task[Update] | None = None

    async def begin(self, seconds: float) -> None:
        """Waits up to `seconds` for the first update and leaves it to be taken; raises at once if it is an error."""
        if await self.wait(seconds):
            assert self._next is not None
            self._next.result()

    async def wait(self, seconds: float) -> bool:
        """Whether the next update (or an error) is there within `seconds`."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._advance())
        done, _ = await asyncio.wait({self._next}, timeout=seconds)
        return bool(done)

    async def _advance(self) -> Update:
        try:
            return await anext(self._updates)
        except StopAsyncIteration:
            raise BrokenInvariant("a completion ended without its last update") from None

    def take(self) -> Update:
        """The update that `wait` announced; raises what the engine raised."""
        assert self._next is not None
        update, self._next = self._next, None
        return update.result()

    async def close(self) -> None:
        if self._next is not None:
            await _end(self._next)
        await close(self._updates)


class EventStream(EventSourceResponse):
    """Sends events until they end or the client leaves; then closes their generator and `source`.

    `source` is closed here, since a generator that never began runs no `finally` of its own. sse-starlette's own pings
    are comments, which some clients cannot parse: keep-alive is in the events themselves.
    """

    def __init__(self, events: AsyncGenerator[ServerSentEvent, None], source: UpdateStream) -> None:
        super().__init__(events, ping=0, sep="\n")
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.close()

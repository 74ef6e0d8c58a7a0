"""uvicorn's server with a graceful shutdown: requests get time to finish, then an answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import uvicorn

from agentcache.server.compat import UvicornServer
from agentcache.server.connection import ClientConnection

# For running requests after a signal.
DRAIN_SECONDS = 5.0
# For clients to read their answers; then connections are cut.
CUT_SECONDS = 15
# For clients that read nothing.
STALL_SECONDS = 1.0
# /health reports a failed engine this long. Then the process ends, and a supervisor restarts it.
FAILED_SECONDS = 5.0


class DrainingServer(UvicornServer):
    """Calls `close`, which ends streams, after `drain_seconds`, and cuts incomplete requests.

    Also ends `FAILED_SECONDS` after the engine fails.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        close: Callable[[], Awaitable[None]],
        has_failed: Callable[[], bool],
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        super().__init__(config)
        self._close = close
        self._has_failed = has_failed
        self._drain_seconds = drain_seconds
        self._failed_at: float | None = None

    async def on_tick(self, counter: int) -> bool:
        """Whether to shut down."""
        if self._failed_at is None and self._has_failed():
            self._failed_at = time.monotonic()
        is_over = self._failed_at is not None and time.monotonic() - self._failed_at > FAILED_SECONDS
        return await super().on_tick(counter) or is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.wait({ending})

    async def _end_requests(self) -> None:
        await asyncio.sleep(max(0.0, self._drain_seconds - STALL_SECONDS))
        cutting = asyncio.create_task(self._cut_stalled())
        try:
            await asyncio.sleep(min(STALL_SECONDS, self._drain_seconds))
            for connection in self._connections:
                if connection.waits_for_client and not connection.unwritten:
                    connection.cut()
            await self._close()
            await asyncio.wait({cutting})
        finally:
            cutting.cancel()

    async def _cut_stalled(self) -> None:
        while True:
            before = {connection: connection.unwritten for connection in self._connections}
            await asyncio.sleep(STALL_SECONDS)
            for connection, unwritten in before.items():
                if 0 < unwritten <= connection.unwritten:
                    connection.cut()

    @property
    def _connections(self) -> list[ClientConnection]:
        return [each for each in self.connections if isinstance(each, ClientConnection)]

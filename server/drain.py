"""uvicorn's server, which on a signal lets requests finish for a while, and then has them end with an answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import uvicorn

from agentcache.server.connection import ClientConnection

# How long running requests may take to finish after a signal; then they are told that the server is shutting down.
DRAIN_SECONDS = 5.0
# For clients that do not take their answer; then their connections are cut.
CUT_SECONDS = 15
# For clients that read nothing of it.
STALL_SECONDS = 1.0
# After the engine has failed /health says so for as long; then the process ends, for a supervisor to start it again.
FAILED_SECONDS = 5.0


class DrainingServer(uvicorn.Server):
    """Calls `close` when it has drained for `drain_seconds`, which ends streams properly; uvicorn would cut them.

    Requests of which not everything has come by then are cut. It ends by itself some time after the engine has failed.
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
        """Whether to shut down; called ten times a second."""
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
        """Cut connections whose clients read nothing; uvicorn would wait for them until `CUT_SECONDS`."""
        while True:
            before = {connection: connection.unwritten for connection in self._connections}
            await asyncio.sleep(STALL_SECONDS)
            for connection, unwritten in before.items():
                if 0 < unwritten <= connection.unwritten:
                    connection.cut()

    @property
    def _connections(self) -> list[ClientConnection]:
        return [each for each in self.server_state.connections if isinstance(each, ClientConnection)]

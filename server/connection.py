"""An HTTP/1.1 connection with timeouts, and a server that drains."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import uvicorn

from agentcache.errors import InvalidRequest, RequestError, RequestTooSlow
from agentcache.server.compat import HeadParser, UvicornConnection, UvicornServer, limit_read
from agentcache.server.errors import wire_error
from agentcache.text.json_values import write_json

# Over clients' and proxies' 60 s: a request during a close gets no answer.
IDLE_SECONDS = 75
# While a refused client sends: a reset could lose the answer.
LINGER_SECONDS = 2.0
_OTHER_FILES = 128  # cache, libraries, model
_LOOKS = 4  # checks of a write per timeout
_MOST_CONNECTIONS = 4096
# asyncio's 256 KiB would delay other requests.
_READ_BYTES = 16 << 10

DRAIN_SECONDS = 5.0  # for running requests after a signal
CUT_SECONDS = 15  # for clients to read answers; then connections are cut
STALL_SECONDS = 1.0  # for clients that read nothing
FAILED_SECONDS = 5.0  # /health reports a failed engine; then the process ends


def _check_length(head: bytes) -> None:
    """Refuse repeated lengths: a proxy may have used another one."""
    lines = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0].split(b"\n")[1:]
    fields = [(name.strip().lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
    lengths = [value for name, value in fields if name == b"content-length"]
    encodings = [value for name, value in fields if name == b"transfer-encoding"]
    if len(lengths) + len(encodings) > 1 or any(b"," in length for length in lengths):
        raise h11.RemoteProtocolError("The length of the body is stated more than once.")


class ClientConnection(UvicornConnection):
    """One client's connection. Beyond `most`, those that have waited longest are closed."""

    def __init__(self, *args: Any, head_seconds: float, write_seconds: float, most: int, **kwargs: Any) -> None:
        super().__init__(*args, parser=HeadParser(_check_length), **kwargs)
        self._head_seconds = head_seconds
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._write_seconds = write_seconds
        self._writing: asyncio.TimerHandle | None = None
        self._left = 0  # unwritten bytes at the last progress
        self._progress_at = 0.0
        self._waiting_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit_read(transport, _READ_BYTES)
        self._set_timer(self._head_seconds, self._end_head)
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._end_linger()
        self._end_write_watch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._waiting_since = self.loop.time()
            self._set_timer(self._head_seconds, self._end_head)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        if self.conn.their_state is not h11.SEND_BODY:
            self._end_linger()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.unwritten:
            self._watch_writing()
        self._waiting_since = self.loop.time()
        if self.is_answered and self.conn.their_state is h11.SEND_BODY:  # else the next request may have begun
            self._linger = self.loop.call_later(LINGER_SECONDS, self.cut)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg, code="invalid_http"))

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    @property
    def unwritten(self) -> int:
        return self.transport.get_write_buffer_size()

    def _watch_writing(self) -> None:
        if self._writing is None:
            self._left, self._progress_at = self.unwritten, self.loop.time()
            self._writing = self.loop.call_later(self._write_seconds / _LOOKS, self._look_at_writing)

    def _look_at_writing(self) -> None:
        """Cut a client that reads nothing. Unwritten bytes of a paused or complete answer cannot grow."""
        self._writing, left, now = None, self.unwritten, self.loop.time()
        if not left:
            return
        if left < self._left or not (self.is_write_paused or self.is_answered):
            self._left, self._progress_at = left, now
        if now - self._progress_at >= self._write_seconds:
            self.cut()
        else:
            self._writing = self.loop.call_later(self._write_seconds / _LOOKS, self._look_at_writing)

    def _end_write_watch(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def cut(self) -> None:
        self._cancel_timer()
        self._end_linger()
        self._end_write_watch()
        self.transport.abort()

    def _end_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _make_room(self) -> None:
        """Close a sixteenth at once: each search scans all."""
        waiting = [other for other in self.connections if isinstance(other, ClientConnection)]
        waiting = [other for other in waiting if other.waits_for_client and not other.transport.is_closing()]
        *others, newest = sorted(waiting, key=lambda other: other._waiting_since)
        for other in others[: 1 + self._most // 16] or [newest]:
            other.cut()

    def _end_head(self) -> None:
        self._timer = None
        if self.conn.trailing_data[0]:
            self._refuse(RequestTooSlow("The headers were not there in time."))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        self._cancel_timer()
        self.disconnect_request()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            wire = wire_error(error)
            body = write_json(wire.body).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            response = h11.Response(status_code=wire.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.unwritten:
            self._watch_writing()

    def _set_timer(self, seconds: float, function: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, function)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def most_connections() -> int:
    """Raise the limit of open files; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(soft, wanted) - _OTHER_FILES)


class DrainingServer(UvicornServer):
    """Ends after a signal, or `FAILED_SECONDS` after the engine fails.

    After `drain_seconds`, incomplete requests are cut and `close` ends streams.
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

"""One client's connection: uvicorn's h11 protocol, which waits for nobody for ever and reads no request in two ways."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentcache.errors import InvalidRequest, RequestError, RequestTooSlow
from agentcache.models.text.json_values import write_json
from agentcache.server.errors import wire_error

# So long a connection is kept on which nothing is asked: longer than clients keep theirs (httpx 5 s, aiohttp 15 s,
# proxies up to 60 s), for whoever asks at the moment at which it is closed here gets no answer.
IDLE_SECONDS = 75
# What a client that was refused may still send, so that it can read why; a reset would lose that on some systems.
LINGER_SECONDS = 2.0
# For everything that is no connection: the cache's files, libraries, the model.
_OTHER_FILES = 128
_LOOKS = 4  # at what is being written, within the time it may stand still
_MOST_CONNECTIONS = 4096
# What is read of a connection before the next one has its turn (asyncio: 256 KiB): a hundred large bodies at once
# held up everybody else for as long as it took to copy that of each.
_READ_BYTES = 16 << 10


class StrictConnection(h11.Connection):
    """Refuses requests whose end is stated twice: somebody between us and the client may have read the other."""

    def next_event(self) -> Any:
        head = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_length(head)
        return event


def _check_length(head: bytes) -> None:
    """h11 merges equal lengths and prefers Transfer-Encoding, so the bytes themselves are looked at."""
    lines = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0].split(b"\n")[1:]
    fields = [(name.strip().lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
    lengths = [value for name, value in fields if name == b"content-length"]
    encodings = [value for name, value in fields if name == b"transfer-encoding"]
    if len(lengths) + len(encodings) > 1 or any(b"," in length for length in lengths):
        raise h11.RemoteProtocolError("The length of the body is stated more than once.")


class ClientConnection(H11Protocol):
    """A connection that is closed when a request's head takes longer than `head_seconds`, and cut when the client reads
    nothing of its answer for `write_seconds`.

    Where the process has no room for more, those that have waited longest for their clients are closed.
    """

    def __init__(self, *args: Any, head_seconds: float, write_seconds: float, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER)
        self._head_seconds = head_seconds
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._write_seconds = write_seconds
        self._writing: asyncio.TimerHandle | None = None
        self._left = 0  # bytes to write at the last progress
        self._progress_at = 0.0
        self._waiting_since = self.loop.time()

    # -- uvicorn's and asyncio's calls --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
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
        if self._is_answered and self.conn.their_state is h11.SEND_BODY:  # else the next request may have begun
            self._linger = self.loop.call_later(LINGER_SECONDS, self.cut)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg, code="invalid_http"))

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    # -- who keeps whom waiting ---------------------------------------------------------------------------------------

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing can be done before the client sends more."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    @property
    def unwritten(self) -> int:
        """Bytes that the client's side has yet to take."""
        return self.transport.get_write_buffer_size()

    def _watch_writing(self) -> None:
        if self._writing is None:
            self._left, self._progress_at = self.unwritten, self.loop.time()
            self._writing = self.loop.call_later(self._write_seconds / _LOOKS, self._look_at_writing)

    def _look_at_writing(self) -> None:
        """Only what is paused, or all written, is watched: what is left can only become less."""
        self._writing, left, now = None, self.unwritten, self.loop.time()
        if not left:
            return
        if left < self._left or not (self.flow.write_paused or self._is_answered):
            self._left, self._progress_at = left, now
        if now - self._progress_at >= self._write_seconds:
            self.cut()
        else:
            self._writing = self.loop.call_later(self._write_seconds / _LOOKS, self._look_at_writing)

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_write_watch(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def cut(self) -> None:
        """Close the connection, whatever is under way on it."""
        self._cancel_timer()
        self._end_linger()
        self._end_write_watch()
        self.transport.abort()

    def _end_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _make_room(self) -> None:
        """Close many at once, since finding the right ones takes a look at all."""
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
        """Answer what is no request, or not yet one, and close."""
        self._cancel_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
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
    """Connections that leave the process enough file descriptors; of these it is given as many as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(soft, wanted) - _OTHER_FILES)

"""What a new version of uvicorn, h11, sse-starlette, starlette or asyncio has changed of what the server relies on."""

from __future__ import annotations

import ast
import asyncio
import inspect
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from sse_starlette import sse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http import h11_impl
from uvicorn.server import ServerState

from agentcache.server import compat
from agentcache.server.connection import ClientConnection, DrainingServer
from tests.versions import check_versions

ROOT = Path(__file__).parent.parent.parent


def test_versions_are_those_that_were_read() -> None:
    check_versions(compat.READ)


def test_no_other_module_uses_them() -> None:
    modules = ("uvicorn.", "sse_starlette", "h11.", "starlette._", "asyncio.")
    attributes = {"cycle", "flow", "server_state", "max_size", "path_regex"}
    for path in [*(ROOT / "server").glob("*.py"), *(ROOT / "cli").glob("*.py")]:
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(modules)], f"{path.name} imports {names}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in attributes, f"{path.name}:{node.lineno} uses {node.attr}"


# -- uvicorn ----------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_methods_that_are_overridden_are_called_with_the_same_arguments() -> None:
    for base, own, expected in (
        (h11_impl.H11Protocol, ClientConnection, {"connection_made", "connection_lost", "data_received"}),
        (h11_impl.H11Protocol, ClientConnection, {"handle_events", "on_response_complete", "send_400_response"}),
        (h11_impl.H11Protocol, ClientConnection, {"pause_writing", "shutdown"}),
        (uvicorn.Server, DrainingServer, {"on_tick", "shutdown"}),
        (sse.EventSourceResponse, compat.EventStream, {"_send_with_timeout"}),
    ):
        for name in expected:
            assert name in vars(base), f"{base.__name__}.{name} is gone: nothing calls {own.__name__}.{name}"
            assert name in vars(own), f"{own.__name__}.{name} is gone: take it out of this list"
            assert parameters(getattr(base, name)) == parameters(getattr(own, name)), f"{base.__name__}.{name}"
            is_async = inspect.iscoroutinefunction(getattr(base, name))
            assert is_async == inspect.iscoroutinefunction(getattr(own, name)), f"{base.__name__}.{name}"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.max_size = 256 << 10
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def run_on_connection(test: Callable[[ClientConnection, Transport, list[Message]], Any]) -> None:
    """Run `test` on a connection of a server whose application waits for bodies and answers `ok`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            received.append(message)
        received.append(message)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    received: list[Message] = []

    async def run() -> None:
        factory = partial(ClientConnection, head_seconds=30.0, write_seconds=30.0, most=8)
        config = uvicorn.Config(app, http=compat.http_option(factory), lifespan="off", log_config=None, ws="none")  # type: ignore[arg-type]
        config.load()
        assert config.http_protocol_class is factory, "uvicorn.Config(http=...) no longer takes any callable"
        state = ServerState()
        # As uvicorn.Server.startup makes each connection.
        connection = config.http_protocol_class(config=config, server_state=state, app_state={}, _loop=None)  # type: ignore[call-arg]
        assert isinstance(connection, ClientConnection)
        transport = Transport()
        connection.connection_made(transport)
        assert state.connections == {connection}, "uvicorn keeps connections elsewhere"
        await test(connection, transport, received)
        connection.connection_lost(None)

    asyncio.run(run())


def test_the_state_of_a_connection_is_where_it_was() -> None:
    async def check(connection: ClientConnection, transport: Transport, received: list[Message]) -> None:
        assert isinstance(connection.conn, compat.HeadParser), "uvicorn replaced the parser"
        assert transport.max_size < 256 << 10
        assert connection.is_answered and connection.waits_for_client and not connection.is_write_paused
        connection.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab")
        await asyncio.sleep(0)
        assert not connection.is_answered and connection.waits_for_client
        connection.data_received(b"cd")
        assert not connection.waits_for_client
        for _ in range(10):
            await asyncio.sleep(0)
        assert connection.is_answered and transport.written.endswith(b"\r\n\r\nok")
        assert b"".join(message["body"] for message in received) == b"abcd"
        connection.pause_writing()
        assert connection.is_write_paused
        connection.resume_writing()

    run_on_connection(check)


def test_an_application_hears_that_its_request_is_over() -> None:
    async def check(connection: ClientConnection, transport: Transport, received: list[Message]) -> None:
        connection.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab")
        await asyncio.sleep(0)
        connection.disconnect_request()
        for _ in range(10):
            await asyncio.sleep(0)
        assert received[-1]["type"] == "http.disconnect"

    run_on_connection(check)


def test_a_server_shows_its_connections_and_its_ticks() -> None:
    server = compat.UvicornServer(uvicorn.Config(lambda *call: None, log_config=None))  # type: ignore[arg-type]
    assert server.connections == [] and server.server_state.connections == set()
    assert "self.on_tick(" in inspect.getsource(uvicorn.Server.main_loop)
    assert "self.shutdown(" in inspect.getsource(uvicorn.Server._serve)


def test_uvicorn_raises_signals_again_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`leave_in_order` of `agentcache serve` counts on it, and on `should_exit` being set by then."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    server = uvicorn.Server(uvicorn.Config(lambda *call: None, log_config=None))  # type: ignore[arg-type]
    with server.capture_signals():
        server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and raised == [signal.SIGTERM]


# -- h11 --------------------------------------------------------------------------------------------------------------


def test_one_event_takes_a_whole_head_from_the_buffer() -> None:
    heads: list[bytes] = []
    parser = compat.HeadParser(heads.append)
    first, second = b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /2 HTTP/1.1\r\nHost: b\r\n\r\n"
    parser.receive_data(first[:20])
    assert parser.next_event() is h11.NEED_DATA and heads == []
    parser.receive_data(first[20:] + second)
    assert isinstance(parser.next_event(), h11.Request)
    assert [head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for head in heads] == [first]
    assert isinstance(parser.next_event(), h11.EndOfMessage) and parser.next_event() is h11.PAUSED
    for event in (h11.Response(status_code=204, headers=[]), h11.EndOfMessage()):
        parser.send(event)
    parser.start_next_cycle()
    assert isinstance(parser.next_event(), h11.Request) and heads[1] == second


def test_h11_hides_a_repeated_length() -> None:
    """Else `HeadParser` is not needed."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n")
    request = parser.next_event()
    assert isinstance(request, h11.Request)
    assert [name for name, _ in request.headers].count(b"content-length") == 1


# -- sse-starlette, starlette, asyncio --------------------------------------------------------------------------------


def test_streams_outlive_a_signal_and_have_no_pings() -> None:
    assert vars(sse.AppStatus).get("enable_automatic_graceful_drain") is False
    assert "AppStatus.enable_automatic_graceful_drain" in inspect.getsource(sse._shutdown_watcher)

    async def run() -> list[Message]:
        async def events() -> Any:
            await asyncio.sleep(0.02)
            yield b"data: 1\n\n"

        async def receive() -> Message:
            await asyncio.sleep(30)
            return {"type": "http.disconnect"}

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def ended() -> None:
            sent.append({"body": b"ended"})

        response = compat.EventStream(events(), ended)
        assert response.ping_interval == 0
        await response({"type": "http", "method": "GET", "asgi": {"spec_version": "2.3"}}, receive, send)
        return sent

    start, *chunks = asyncio.run(run())
    assert start["status"] == 200
    assert [chunk["body"] for chunk in chunks] == [b"data: 1\n\n", b"", b"ended"], "events are not sent as they are"


def test_a_route_has_its_expression() -> None:
    pattern = compat.path_pattern(Route("/v1/agents/{agent}", lambda request: None))
    assert pattern.match("/v1/agents/a") and not pattern.match("/v1/agents/a/b")


def test_asyncio_reads_as_much_as_it_is_told() -> None:
    async def run() -> int:
        largest = 0

        class Reading(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                compat.limit_read(transport, 1000)

            def data_received(self, data: bytes) -> None:
                nonlocal largest
                largest = max(largest, len(data))

            def connection_lost(self, error: Exception | None) -> None:
                ended.set()

        ended = asyncio.Event()
        server = await asyncio.get_running_loop().create_server(Reading, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(bytes(10_000))
        writer.close()
        await asyncio.wait_for(ended.wait(), 60)
        server.close()
        return largest

    assert asyncio.run(run()) == 1000

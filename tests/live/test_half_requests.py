"""Clients that send half a request, or one that can be read in two ways: others notice nothing, and SIGTERM works."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, complete, http_of, log_of, make_ids, serving, stop
from tests.rounds import check_bound, in_rounds, queued_seconds, within

pytestmark = pytest.mark.slow

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_BODY = HEAD + b'Content-Length: 1000\r\n\r\n{"prompt": '
SECONDS = 3.0  # that heads and bodies may take here


@pytest.fixture(scope="module")
def server(live_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache_dir = tmp_path_factory.mktemp("half") / "cache"
    with serving(live_model, cache_dir, header_timeout=str(SECONDS), body_timeout=str(SECONDS)) as server:
        complete(server, make_ids(20), 2)
        yield server


def connect(server: ServerProcess) -> socket.socket:
    host, _, port = server.client.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


@contextlib.contextmanager
def many(server: ServerProcess, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections, on each of which only `data` is sent."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(count)]
        for connection in connections:
            connection.sendall(data)
        yield connections


def ask(server: ServerProcess, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """The answer to these bytes; the connection must be closed behind it."""
    with connect(server) as connection:
        connection.sendall(data)
        return answer_on(connection)


def answer_on(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while data := connection.recv(65536):
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    return int(status.split()[1]), {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in fields)}, body


def check_others(server: ServerProcess) -> None:
    """Health is quick, and a completion with another connection for each works."""
    seconds, queued = [], []
    for _ in range(20):
        with http_of(server) as http:
            beginning, queued_before = time.monotonic(), queued_seconds(server.pid, threading.get_native_id())
            assert http.get("/health").status_code == 200
            seconds.append(time.monotonic() - beginning)
            queued.append(queued_seconds(server.pid, threading.get_native_id()) - queued_before)
    own = sorted(taken - waited for taken, waited in zip(seconds, queued, strict=True))
    check_bound(own[18] < 0.2, f"{own}, while other processes had the processors {queued}")
    assert complete(server, make_ids(20), 2)["usage"]["completion_tokens"] == 2


ATTACKS: dict[str, tuple[int, bytes]] = {
    "half bodies": (400, HALF_BODY),
    "half chunked bodies": (300, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
    "half heads": (400, HEAD),
    "idle connections": (600, b""),
    "idle after an answer": (300, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}


@pytest.mark.parametrize("name", ATTACKS)
@in_rounds
def test_others_notice_nothing(server: ServerProcess, name: str) -> None:
    with many(server, *ATTACKS[name]):
        check_others(server)


@pytest.mark.parametrize(("data", "limit"), [(HALF_BODY, "body"), (HEAD, "head")])
@in_rounds
def test_half_requests_are_answered_in_the_end(server: ServerProcess, data: bytes, limit: str) -> None:
    beginning = time.monotonic()
    with many(server, 3, data) as connections:
        for connection in connections:
            status, headers, body = answer_on(connection)
            error = json.loads(body)["error"]
            assert (status, headers["connection"], error["code"]) == (408, "close", "request_too_slow")
            assert set(error) == {"message", "type", "param", "code"}
    taken = time.monotonic() - beginning
    assert taken > SECONDS - 0.5
    check_bound(taken < SECONDS + 2, taken)


@pytest.mark.parametrize("data", [HEAD, HALF_BODY], ids=["head", "body"])
@in_rounds
def test_a_trickle_is_not_enough(server: ServerProcess, data: bytes) -> None:
    beginning = time.monotonic()
    with connect(server) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):
            while time.monotonic() - beginning < PATIENCE:
                connection.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    if connection.recv(65536):
                        break
                connection.sendall(b"x")
    taken = time.monotonic() - beginning
    assert taken > SECONDS - 0.5
    check_bound(taken < SECONDS + 2, taken)


def test_idle_connections_are_closed_without_a_word(server: ServerProcess) -> None:
    with connect(server) as connection:
        assert connection.recv(100) == b""


def test_a_connection_is_used_again_and_again(server: ServerProcess) -> None:
    """Also when its requests come later than a head may take, counted from the connection's start."""
    with http_of(server) as http:
        beginning = time.monotonic()
        while time.monotonic() - beginning < SECONDS + 1:
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            time.sleep(0.2)
        pool = http._transport._pool  # type: ignore[attr-defined]
        assert len(pool.connections) == 1


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(server: ServerProcess) -> None:
    """httpx gives up its own after five seconds: who sends while the server closes gets no answer."""
    host, _, port = server.client.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    with contextlib.closing(connection):
        for rest in (0.0, 6.0):
            time.sleep(rest)
            connection.request("GET", "/health")  # on the same connection, or it fails
            with connection.getresponse() as response:
                assert response.status == 200 and response.read()


DOUBLE = {
    "length and encoding": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "encoding and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "the same length twice": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "lengths in a list": b"Content-Length: 5, 5\r\n\r\nhello",
    "two encodings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", DOUBLE)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
def test_a_length_that_is_stated_twice(server: ServerProcess, name: str, path: bytes) -> None:
    smuggled = b"GET /v1/agents HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = HEAD.replace(b"/v1/completions", path)
    status, headers, body = ask(server, head + DOUBLE[name] + smuggled)
    assert (status, headers["connection"]) == (400, "close")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"  # and nothing behind it


def test_such_a_request_behind_another_on_the_same_connection(server: ServerProcess) -> None:
    sound = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with connect(server) as connection:
        connection.sendall(sound + HEAD + DOUBLE["the same length twice"])
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.count(b"HTTP/1.1 400") == 2 and received.endswith(b'"code": "invalid_http"}}')


def test_what_is_no_http(server: ServerProcess) -> None:
    status, headers, body = ask(server, b"\x16\x03\x01 hello\r\n\r\n")
    assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (400, "close", "invalid_http")


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


@in_rounds
def test_large_bodies_that_never_end_share_what_they_may_take(server: ServerProcess) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("there is no /proc here")
    before = resident_bytes(server.pid)
    chunk = b" " * (8 << 20)

    def send(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # most are refused
            connection.sendall(chunk)

    with many(server, 100, HEAD + b"Content-Length: 30000000\r\n\r\n") as connections:
        threads = [threading.Thread(target=send, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        check_others(server)
        assert resident_bytes(server.pid) - before < 300 << 20  # of 840
        for thread in threads:
            thread.join(PATIENCE)


@in_rounds
def test_sigterm_while_all_of_it_goes_on(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache") as server, contextlib.ExitStack() as stack:
        for count, data in ATTACKS.values():
            stack.enter_context(many(server, count // 4, data))
        stack.enter_context(many(server, 10, HEAD + b"Content-Length: 30000000\r\n\r\n" + b" " * 200_000))
        stack.enter_context(many(server, 10, HEAD + DOUBLE["length and encoding"]))
        check_others(server)
        with within(DRAIN_SECONDS + 2):
            assert stop(server) == 0
    assert "Traceback" not in log_of(tmp_path / "cache")

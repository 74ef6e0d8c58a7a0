"""Clients that do not read their answers: they keep no place, little memory, and their connections not for ever."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache.server.connection import DRAIN_SECONDS
from agentcache.server_process import ServerProcess
from tests.live.servers import PATIENCE, complete, make_ids, serving, stats, stop, wait_until, wait_until_idle
from tests.rounds import check_bound, in_rounds

pytestmark = pytest.mark.slow

CLIENTS = 50
LOGPROBS = {"logprobs": True, "top_logprobs": 20}  # large events
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {"max_tokens": 120, "ignore_eos": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", MESSAGES | LONG | LOGPROBS | {"stream": True}),
    ("/v1/chat/completions", MESSAGES | LONG | LOGPROBS),
    ("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 120, "ignore_eos": True}),
    ("/v1/completions", {"prompt": make_ids(20), "stream": True, "agent": "slow", **LONG}),
]


def request_of(path: str, body: dict[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def connect(server: ServerProcess) -> socket.socket:
    host, _, port = server.client.url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    if sys.platform == "linux":
        # A network's segments: for its own large ones the system holds 2 MB unread, and every answer here would fit.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
    client.settimeout(PATIENCE)
    client.connect((host, int(port)))
    return client


@contextmanager
def not_reading(server: ServerProcess, count: int = CLIENTS) -> Iterator[list[socket.socket]]:
    """Clients that have asked all kinds of things and read nothing."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(count)]
        for number, client in enumerate(clients):
            client.sendall(request_of(*ASKED[number % len(ASKED)]))
        for client in clients[:8]:  # and pages upon pages behind it
            client.sendall(request_of("/metrics", None) * 200 + request_of("/v1/agents", None) * 200)
        yield clients


def resident(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def connections(server: ServerProcess) -> int:
    descriptors = Path(f"/proc/{server.pid}/fd").iterdir()
    return sum(1 for each in descriptors if each.is_symlink() and str(each.readlink()).startswith("socket:"))


def wait_until_generated(server: ServerProcess) -> None:
    """All answers are, though nothing is read."""
    wanted = CLIENTS * LONG["max_tokens"] - CLIENTS
    wait_until(lambda: stats(server)["generated_tokens"] >= wanted, "all is generated")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells")
@in_rounds
def test_they_keep_no_place(live_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with serving(live_model, cache, "--max-concurrent-requests", "4", write_timeout="4") as server:
        complete(server, make_ids(20), 2, agent="slow")
        before, sockets = resident(server), connections(server)
        with not_reading(server):
            wait_until_generated(server)
            wait_until(lambda: stats(server)["running"] == 0, "no place is taken")
            begun = time.monotonic()
            complete(server, make_ids(20), 2, agent="slow")  # nor is the agent's turn theirs
            quick = time.monotonic() - begun
            assert resident(server) - before < 300 << 20
            # A small answer lies in the system's buffers: its connection counts as idle, and has longer.
            small = CLIENTS // 2
            wait_until(lambda: connections(server) <= sockets + small + 2, "their connections are ended")
        check_bound(quick < 1.0, quick)
        assert stop(server) == 0


@in_rounds
def test_they_do_not_keep_the_server_from_ending(live_model: Path, tmp_path: Path) -> None:
    with serving(live_model, tmp_path / "cache", "--max-concurrent-requests", "4", write_timeout="60") as server:
        with not_reading(server):
            wait_until_generated(server)
            begun = time.monotonic()
            assert stop(server) == 0
            taken = time.monotonic() - begun
        check_bound(taken < DRAIN_SECONDS + 2, taken)


@in_rounds
def test_a_time_limit_ends_what_is_not_read(live_model: Path, tmp_path: Path) -> None:
    """Its generation too: the place in the batch is free."""
    with serving(live_model, tmp_path / "cache", "--max-concurrent-requests", "1", write_timeout="60") as server:
        body = MESSAGES | LOGPROBS | {"max_tokens": 30_000, "ignore_eos": True, "stream": True, "request_timeout": 2.0}
        with connect(server) as client:
            client.sendall(request_of("/v1/chat/completions", body))
            begun = time.monotonic()
            complete(server, make_ids(20), 2)
            taken = time.monotonic() - begun
        wait_until_idle(server)
        check_bound(taken < 20, taken)

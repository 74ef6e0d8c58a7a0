"""A rank that is gone is known by the ring's sockets; what is sent on these, and other sockets, are left alone."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentcache.errors import RankLost
from agentcache.ranks.lost import Connections, ring_connections
from agentcache.ranks.worker_link import WorkerLink
from tests.ranks.by_threads import SECONDS, ThreadWire
from tests.throwing import PanicException


class Ring:
    """This process is rank 1 of three; the sockets of the others are here too, and of somebody who is no rank."""

    def __init__(self, stack: ExitStack) -> None:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        self.ranks = [[f"127.0.0.1:{listener.getsockname()[1]}"] for listener in listeners[:3]]
        self.to_next, self.of_next = _connect(stack, listeners[2])
        self.of_former, self.to_former = _connect(stack, listeners[1])
        self.clients = _connect(stack, listeners[3])


def _connect(stack: ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection: who connected, who accepted."""
    connecting = stack.enter_context(socket.create_connection(listener.getsockname()))
    return connecting, stack.enter_context(listener.accept()[0])


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    with ExitStack() as stack:
        ring = Ring(stack)
        (tmp_path / "hosts.json").write_text(json.dumps(ring.ranks))
        monkeypatch.setenv("MLX_RANK", "1")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
        yield ring


def test_a_neighbour_that_closes_is_gone_whatever_it_sent_before(ring: Ring) -> None:
    connections = ring_connections()
    ring.of_next.sendall(b"a sum")
    assert not connections.are_cut()
    ring.of_next.close()
    assert connections.are_cut()
    assert ring.to_next.recv(9) == b"a sum"  # looking has taken nothing


def test_the_one_before_counts_as_the_one_after(ring: Ring) -> None:
    connections = ring_connections()
    ring.of_former.close()
    assert connections.are_cut()


def test_who_is_no_rank_may_come_and_go(ring: Ring) -> None:
    connections = ring_connections()
    for end in ring.clients:
        end.close()
    assert not connections.are_cut()


def test_without_a_ring_nothing_is_ever_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    assert not ring_connections().are_cut()


@pytest.mark.slow
def test_rank_0_gives_up_its_thread_that_waits_for_one_that_is_gone(ring: Ring) -> None:
    """However long ranks are given to answer."""
    lost: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    connections = Connections([ring.to_next.fileno()])
    link = WorkerLink(ThreadWire(), lambda function: None, lost.put, 1e6, connections)  # type: ignore[arg-type]
    with link.waiting(), pytest.raises(queue.Empty):
        lost.get(timeout=0.6)
    with link.waiting():
        ring.of_next.close()
        assert "is gone" in str(lost.get(timeout=SECONDS))
    with pytest.raises(RankLost):
        link.exchange()


def test_a_watch_that_fails_gives_up_the_thread_it_watches() -> None:
    class Broken(Connections):
        def are_cut(self) -> bool:
            raise PanicException("the poll is broken")

    lost: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    link = WorkerLink(ThreadWire(), lambda function: None, lost.put, 1e6, Broken())  # type: ignore[arg-type]
    assert "the watch over the other processes has failed" in str(lost.get(timeout=SECONDS))
    with pytest.raises(RankLost):
        link.exchange()


def test_rank_0_that_waits_for_nobody_asks_at_once(ring: Ring) -> None:
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    connections = Connections([ring.to_next.fileno()])
    link = WorkerLink(ThreadWire(), posted.put, lambda lost: None, 1e6, connections)  # type: ignore[arg-type]
    ring.of_next.close()
    posted.get(timeout=SECONDS)
    link._ended.set()

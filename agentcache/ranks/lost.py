"""Detect lost ranks: cut connections, silence, and errors of MLX."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentcache.errors import RankLost, UnsupportedModel
from agentcache.system.threads import start_thread

_BACK_ENDS: Sequence[str] = ("ring", "jaccl", "nccl", "mpi")


def lost_rank(error: BaseException) -> RankLost | None:
    """The `RankLost` behind `error`; connection errors of `mx.distributed` back ends count."""
    due, seen = [error], set[int]()
    while due:
        link = due.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, RankLost):
            return link
        if isinstance(link, (RuntimeError, UnsupportedModel)) and any(f"[{name}]" in str(link) for name in _BACK_ENDS):
            lost = RankLost(f"another process that computes the model is gone: {link}")
            lost.__cause__ = link
            return lost
        due += [each for each in (link.__context__, link.__cause__) if each is not None]
    return None


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn connection errors inside into `RankLost`."""
    try:
        yield
    except (RuntimeError, UnsupportedModel) as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error


Address = tuple[str, int]

# macOS has no POLLRDHUP: polling for reading reports POLLHUP when the other end has closed.
_ASKED = getattr(select, "POLLRDHUP", select.POLLIN)
_CUT = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Connections:
    """Polls the connections to neighbour ranks, whose sockets MLX owns; without sockets, only silence shows a loss."""

    def __init__(self, sockets: Sequence[int] = ()) -> None:
        self._poll = select.poll()
        for descriptor in sockets:
            self._poll.register(descriptor, _ASKED)

    def are_cut(self) -> bool:
        return any(events & _CUT for _, events in self._poll.poll(0))


def ring_connections() -> Connections:
    rank, hosts = os.environ.get("MLX_RANK", ""), os.environ.get("MLX_HOSTFILE", "")
    if not rank.isdigit() or not os.path.isfile(hosts):
        return Connections()
    ranks = [[_address(text) for text in texts] for texts in json.loads(Path(hosts).read_text())]
    own, following = set(ranks[int(rank)]), set(ranks[(int(rank) + 1) % len(ranks)])
    return Connections([descriptor for descriptor, here, there in _connected() if here in own or there in following])


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return socket.gethostbyname(host), int(port)


def _connected() -> Iterator[tuple[int, Address, Address]]:
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # already closed, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family == socket.AF_INET:
                    yield descriptor, connection.getsockname(), connection.getpeername()


log = logging.getLogger("agentcache.ranks")

EXIT_CODE = 3
LOOK_SECONDS = 0.25
CUT_SECONDS = 1.0  # after a cut, for MLX to raise an error in the waiting thread


class Watchdog:
    """Ends a worker, whose thread may be stuck in MLX, if a connection is cut or after `seconds` of silence."""

    def __init__(self, seconds: float, connections: Connections, close: Callable[[], None] = lambda: None) -> None:
        self._seconds = seconds
        self._connections = connections
        self._close = close
        self._heard_at: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        self._heard_at = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread = start_thread("agentcache-patience", self._look, self._died)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if self._connections.are_cut():
                if not self._ended.wait(CUT_SECONDS):
                    self._leave("the connection to another rank is cut")
            elif self._heard_at is not None and time.monotonic() - self._heard_at > self._seconds:
                self._leave(f"rank 0 has said nothing for {self._seconds:.0f} s")

    def _died(self, error: Exception) -> None:
        self._leave(f"the watch over rank 0 has failed: {error}")

    def _leave(self, why: str) -> None:
        log.error("%s; this rank ends", why)
        try:
            self._close()
        finally:
            os._exit(EXIT_CODE)

"""Detection of lost neighbour ranks, at the sockets of MLX's ring.

A thread inside MLX may wait forever after a rank dies: the first of a step's reductions fails, later ones never return
(mlx 0.32.4, `SocketThread::worker` in `ring.cpp`).
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]

# macOS has no POLLRDHUP: polling for reading reports POLLHUP when the other end has closed.
_ASKED = getattr(select, "POLLRDHUP", select.POLLIN)
_CUT = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Connections:
    """Polls the connections to neighbour ranks. MLX owns the sockets until the process ends.

    `sockets` is empty for other back ends, whose losses are not detected.
    """

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

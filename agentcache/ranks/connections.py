"""Whether the ranks beside this one are still connected, looked up at the sockets of MLX's ring.

Who waits inside MLX may wait for good where a rank has died: of a step's reductions the first one fails, and those
behind it are never answered (mlx 0.32.4, `SocketThread::worker` in its `ring.cpp`, ends at the first lost connection).
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

# macOS has no POLLRDHUP: of a socket that is polled for reading it says POLLHUP when the other end has closed.
_ASKED = getattr(select, "POLLRDHUP", select.POLLIN)
_CUT = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Connections:
    """To the next ranks of the ring. Looking reads nothing: the sockets are MLX's, and open until the process ends.

    Args:
        sockets: descriptors; none where another back end connects the ranks: then nothing is ever known to be cut.
    """

    def __init__(self, sockets: Sequence[int] = ()) -> None:
        self._poll = select.poll()
        for descriptor in sockets:
            self._poll.register(descriptor, _ASKED)

    def are_cut(self) -> bool:
        """Whether a rank at the other end has closed one, or is gone."""
        return any(events & _CUT for _, events in self._poll.poll(0))


def ring_connections() -> Connections:
    """Of this process, which the ring has connected as MLX_RANK and MLX_HOSTFILE say."""
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
    """Descriptors of all TCP connections of this process, with the addresses of both ends."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # it is closed by now, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family == socket.AF_INET:
                    yield descriptor, connection.getsockname(), connection.getpeername()

"""`python -m tests.live.fuzz_attack URL SEED COUNT`: sends hostile requests, one after the other.

Prints JSON: how many had which status, and those that were an internal error.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
from collections import Counter, deque
from http.client import HTTPException, HTTPResponse

from tests.server.hostile import Hostile, hostile

HELD_OPEN = 60  # connections of clients that read nothing or send no more
SECONDS = 60.0


class Attacker:
    """One client with many connections."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._kept: deque[socket.socket] = deque()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    def send(self, request: Hostile) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10 if request.reads else 2048)
        client.settimeout(SECONDS)
        client.connect(self._address)
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            client.sendall(request.raw)
        if request.reads and request.share == 1.0:
            self._note(request, client)
            return
        self._kept.append(client)
        if len(self._kept) > HELD_OPEN:
            self._kept.popleft().close()

    def _note(self, request: Hostile, client: socket.socket) -> None:
        answer = HTTPResponse(client, method=request.method)
        with client, contextlib.closing(answer), contextlib.suppress(ConnectionError, HTTPException):
            answer.begin()
            body = answer.read()
            self.statuses[answer.status] += 1
            if (answer.status >= 500 and answer.status not in (503, 504)) or b"internal_error" in body:
                self.wrong.append(f"{answer.status} for {request}"[:2000])


def main(url: str, seed: str, count: str) -> None:
    attacker, rng = Attacker(url), random.Random(int(seed))
    for _ in range(int(count)):
        attacker.send(hostile(rng))
    print(json.dumps([attacker.statuses, attacker.wrong]))


if __name__ == "__main__":
    main(*sys.argv[1:])

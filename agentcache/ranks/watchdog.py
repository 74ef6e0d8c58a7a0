from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from agentcache.ranks.connections import Connections
from agentcache.system.threads import start_thread

log = logging.getLogger("agentcache.ranks")

EXIT_CODE = 3
LOOK_SECONDS = 0.25
CUT_SECONDS = 1.0  # after a cut, for MLX to raise an error in the waiting thread


class Watchdog:
    """Ends a worker, whose thread may be stuck in MLX, if a connection is cut or after `seconds` of silence.

    `close` is called before; it completes running writes.
    """

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

"""The end of a rank that hears nothing any more: its thread waits inside MLX, and cannot be told."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger("agentcache.ranks")

EXIT_CODE = 3
_LOOK_SECONDS = 0.25


class Patience:
    """Inside, the process ends when nothing was heard for so long.

    Args:
        close: called before; what is being written is whole then.
    """

    def __init__(self, seconds: float, close: Callable[[], None]) -> None:
        self._seconds = seconds
        self._close = close
        self._heard_at: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="agentcache-patience", daemon=True)

    def renew(self) -> None:
        """Something was heard."""
        self._heard_at = time.monotonic()

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if self._heard_at is not None and time.monotonic() - self._heard_at > self._seconds:
                log.error("rank 0 has said nothing for %.0f s; this rank ends", self._seconds)
                self._close()
                os._exit(EXIT_CODE)

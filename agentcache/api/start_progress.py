"""Progress of a start, for the log and for `/health`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("agentcache.start")

QUIET_SECONDS = 2.0  # shorter phases are not logged
LOG_SECONDS = 5.0  # between lines of one phase


@dataclass(frozen=True)
class Phase:
    """One phase of a start; `done` and `total` are 0 if not countable."""

    doing: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.doing}: {self.done} of at most {self.total}" if self.total else self.doing


@dataclass(frozen=True)
class Measuring:
    """Progress of the precision search: forward passes, at most `most`."""

    done: int
    most: int = 0
    chosen: str | None = None


class StartProgress:
    """The current phase; None outside a start. Changed by one thread at a time, read by any."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self._logged_at = 0.0
        self._timer: threading.Timer | None = None

    def begin(self, doing: str) -> None:
        self._enter(Phase(doing))

    def _enter(self, phase: Phase | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.phase, self._timer, self._logged_at = phase, None, time.monotonic()
        if phase is not None:
            self._timer = threading.Timer(QUIET_SECONDS, log.info, ("%s", phase))
            self._timer.daemon = True
            self._timer.start()

    @contextmanager
    def inner(self, doing: str) -> Iterator[None]:
        outer = self.phase
        self.begin(doing)
        try:
            yield
        finally:
            self._enter(outer)

    def advance(self, done: int, total: int) -> None:
        if self.phase is None:
            return
        self.phase = Phase(self.phase.doing, done, total)
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.info("%s", self.phase)

    def end(self) -> None:
        self._enter(None)

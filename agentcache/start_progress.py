"""What a start is doing now, for the log and for `/health`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("agentcache.start")

QUIET_SECONDS = 2.0  # a phase that is over by then is not in the log
LOG_SECONDS = 5.0  # between two lines on the same phase


@dataclass(frozen=True)
class Phase:
    """One phase of a start.

    Args:
        doing: such as "reading the weights".
        done, total: pieces of it; 0 of 0 if it has none.
    """

    doing: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.doing}: {self.done} of at most {self.total}" if self.total else self.doing


@dataclass(frozen=True)
class Measuring:
    """How far the choice of a precision for keys and values has come.

    Args:
        done: forward passes.
        most: forward passes that it can take, as far as is known; most models need a few.
        chosen: the precision, such as "4"; None before the end.
    """

    done: int
    most: int = 0
    chosen: str | None = None


class StartProgress:
    """The current phase. One thread at a time changes it, any thread reads it.

    Attributes:
        phase: None before and after a start.
    """

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self._logged_at = 0.0
        self._timer: threading.Timer | None = None

    def begin(self, doing: str) -> None:
        """Enter a phase. The log says so if it lasts."""
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
        """A phase inside another one, which continues at the end."""
        outer = self.phase
        self.begin(doing)
        try:
            yield
        finally:
            self._enter(outer)

    def advance(self, done: int, total: int) -> None:
        """So many pieces of the phase are done. Every few seconds the log says so."""
        if self.phase is None:
            return
        self.phase = Phase(self.phase.doing, done, total)
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.info("%s", self.phase)

    def end(self) -> None:
        """The start is over, or has failed."""
        self._enter(None)

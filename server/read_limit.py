"""Limits the time for reading one body."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentcache.errors import InvalidRequest, Overloaded

BASE_SECONDS = 2.0
SECONDS_PER_MEGABYTE = 0.5
STEPS = 32  # between checks, some 0.01 ms
# A computing thread keeps the GIL for up to 5 ms; the event loop needs it several times per request.
_WORK_SECONDS = 0.0005
_REST_SECONDS = 0.0005


def _never() -> bool:
    return False


class ReadLimit:
    """CPU time limit by length of the body. For one thread.

    Args:
        has_ended: whether the result is no longer needed; called on the reading thread.
        rests: whether the thread sleeps to release the GIL; False on the event loop.
    """

    def __init__(self, num_bytes: int, has_ended: Callable[[], bool] = _never, *, rests: bool = False) -> None:
        self._seconds = BASE_SECONDS + SECONDS_PER_MEGABYTE * num_bytes / 1e6
        self._deadline: float | None = None
        self._has_ended = has_ended
        self._steps = 0
        self._rests = rests
        self._rested = time.perf_counter()

    def step(self) -> None:
        """Count one item. Raises InvalidRequest over the limit, Overloaded if the request has ended."""
        self._steps += 1
        if self._steps % STEPS == 0:
            self.look()

    def look(self) -> None:
        """Count `STEPS` items."""
        self.check()
        self._rest()

    def _rest(self) -> None:
        if self._rests and time.perf_counter() - self._rested > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._rested = time.perf_counter()

    def check(self) -> None:
        """Check the limit at once; raises as `step`."""
        if self._has_ended():
            raise Overloaded("the request has ended")
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + self._seconds
        elif now > self._deadline:
            message = f"The body could not be read: it took longer than {self._seconds:.1f} s."
            raise InvalidRequest(message, code="body_not_read")

"""The writer thread. It runs jobs in order, so that a manifest never precedes its blocks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentcache.errors import StoreError
from agentcache.system.threads import start_thread

T = TypeVar("T")

log = logging.getLogger("agentcache.writer")


@dataclass(frozen=True)
class _Job(Generic[T]):
    run: Callable[[], T]
    done: Callable[[T | StoreError], None]
    num_bytes: int

    def finish(self) -> None:
        self.tell(_outcome(self.run))

    def tell(self, outcome: T | StoreError) -> None:
        try:
            self.done(outcome)
        except BaseException:
            log.exception("the outcome of a write was not taken")


class Writer:
    """Runs jobs in order on one thread.

    Args:
        max_bytes: bytes of queued jobs above which `submit` blocks.
    """

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        self._max_bytes = max_bytes
        self._jobs: deque[_Job[Any]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._ended = False
        self._thread = start_thread("agentcache-writer", self._loop, self._died)

    def submit(self, run: Callable[[], T], done: Callable[[T | StoreError], None], num_bytes: int = 0) -> None:
        """Queue `run`; `done` gets its result or error on the writer thread, after `close` at once."""
        if not self._queue(_Job(run, done, num_bytes)):
            done(StoreError("the writer is closed"))

    def _queue(self, job: _Job[Any]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes <= self._max_bytes or self._ended)
            if self._ended:
                return False
            self._jobs.append(job)
            self._waiting_bytes += job.num_bytes
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Finish queued jobs, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            job.finish()
            with self._changed:
                self._waiting_bytes -= job.num_bytes
                self._changed.notify_all()

    def _died(self, error: Exception) -> None:
        """Fail remaining jobs, so that no sender waits forever."""
        with self._changed:
            self._ended = True
            jobs, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in jobs:
            job.tell(StoreError(f"the writer has failed: {error}"))

    def _next(self) -> _Job[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closing)
            self._ended = not self._jobs
            return None if self._ended else self._jobs.popleft()


def _outcome(run: Callable[[], T]) -> T | StoreError:
    """Turn errors into results: none may end the thread."""
    try:
        return run()
    except StoreError as error:
        return error
    except BaseException as error:
        log.exception("a write has failed")
        return StoreError(f"{type(error).__name__}: {error}")

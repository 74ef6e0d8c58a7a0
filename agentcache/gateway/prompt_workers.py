from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentcache.errors import AgentCacheError, Overloaded
from agentcache.system.threads import as_exception, start_thread

log = logging.getLogger("agentcache.engine")

T = TypeVar("T")
HasEnded = Callable[[], bool]

LARGE = 64_000  # characters or token ids
CLOSE_SECONDS = 1.5
MOST_WAITING = 256
_LOOK_SECONDS = 0.005
_LEAST_COST = 100  # so that many tiny jobs are not free
_PATIENCE = 10_000  # characters or token ids


@dataclass(eq=False)
class _Entry(Generic[T]):
    item: T
    cost: int
    overtaken: int = 0


class AgedQueue(Generic[T]):
    """Yields the cheapest item, or the oldest overdue one. For one thread at a time.

    An item is overdue once later items that went first cost as much as itself, and at least `patience`.
    """

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self._entries: list[_Entry[T]] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    def push(self, item: T, cost: int) -> None:
        self._entries.append(_Entry(item, cost))

    def take(self, may_go: Callable[[T], bool]) -> T | None:
        """Remove the next item that may go. O(n)."""
        candidates = [entry for entry in self._entries if may_go(entry.item)]
        if not candidates:
            return None
        overdue = (entry for entry in candidates if entry.overtaken >= max(entry.cost, self._patience))
        taken = next(overdue, None) or min(candidates, key=lambda entry: entry.cost)
        index = self._entries.index(taken)
        for entry in self._entries[:index]:
            entry.overtaken += taken.cost
        del self._entries[index]
        return taken.item

    def drop(self, is_void: Callable[[T], bool]) -> None:
        self._entries = [entry for entry in self._entries if not is_void(entry.item)]

    def clear(self) -> None:
        self._entries.clear()


@dataclass(eq=False)
class _PromptJob(Generic[T]):
    size: int
    work: Callable[[HasEnded], T]
    future: asyncio.Future[T]
    ended: bool = False

    def has_ended(self) -> bool:
        return self.ended

    def run(self) -> None:
        try:
            result = self.work(self.has_ended)
        except BaseException as error:
            self._tell(self.future.set_exception, as_exception(error))
        else:
            self._tell(self.future.set_result, result)

    def fail(self, error: AgentCacheError) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_exception(error)

    def _tell(self, finish: Callable[[Any], None], outcome: Any) -> None:
        def tell() -> None:
            if not self.future.done():
                finish(outcome)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.future.get_loop().call_soon_threadsafe(tell)


class Workers:
    """Daemon threads that run the smallest job first (`AgedQueue`); one of several stays free of large jobs.

    `run` and `close` belong to one event loop. `num_workers`: None for one per core, from 2 to 4.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        name: str = "agentcache-prepare",
        large: int = LARGE,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._num_workers = num_workers or min(4, max(2, os.cpu_count() or 1))
        self._name = name
        self._large = large
        self._most_waiting = most_waiting
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._waiting = AgedQueue[_PromptJob[Any]](_PATIENCE)
        self._running: list[_PromptJob[Any]] = []
        self._closed: AgentCacheError | None = None

    async def run(self, size: int, work: Callable[[HasEnded], T]) -> T:
        """Run `work` on a thread. Its argument returns True once the result is not needed. Raises Overloaded."""
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _PromptJob(size, work, future)
        with self._changed:
            self._refuse_too_many()
            self._start_thread()
            self._waiting.push(job, size + _LEAST_COST)
            self._changed.notify()
        try:
            return await future
        finally:
            job.ended = True

    async def close(self, error: AgentCacheError) -> None:
        """Fail all jobs, signal running ones to stop, and wait briefly."""
        self._closed = error
        with self._changed:
            for job in [*self._waiting, *self._running]:
                job.fail(error)
            self._waiting.clear()
            self._changed.notify_all()
        await self._until_stopped()

    def _start_thread(self) -> None:
        if len(self._threads) >= self._num_workers:
            return
        try:
            self._threads.append(start_thread(self._name, self._work, self._died))
        except RuntimeError as error:
            if not self._threads:
                raise Overloaded(f"no thread can be started: {error}") from error

    def _died(self, error: Exception) -> None:
        with self._changed:
            self._threads.remove(threading.current_thread())

    def _refuse_too_many(self) -> None:
        if len(self._waiting) < self._most_waiting:
            return
        self._waiting.drop(lambda job: job.ended)
        if len(self._waiting) >= self._most_waiting:
            raise Overloaded("too many requests are waiting to be read; try again later")

    async def _until_stopped(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        while any(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                log.warning("%s: work goes on after %.1f s; it is left behind", self._name, CLOSE_SECONDS)
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running.remove(job)
                self._changed.notify_all()
            del job  # release the prompt

    def _next(self) -> _PromptJob[Any] | None:
        with self._changed:
            while self._closed is None:
                self._waiting.drop(lambda job: job.ended)
                if (job := self._waiting.take(self._may_run)) is not None:
                    self._running.append(job)
                    return job
                self._changed.wait()
        return None

    def _may_run(self, job: _PromptJob[Any]) -> bool:
        if job.size <= self._large:
            return True
        return sum(other.size > self._large for other in self._running) < max(1, self._num_workers - 1)


def shutting_down() -> Overloaded:
    return Overloaded("the server is shutting down", code="shutting_down")

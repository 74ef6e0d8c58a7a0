"""Convert exceptions at thread boundaries; let no thread end unnoticed.

A Rust panic (pyo3's PanicException) is a `BaseException`, which `except Exception` and asyncio's tasks do not catch.
A future rejects `StopIteration`.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from agentcache.errors import InternalError

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("agentcache.system.threads")


def as_exception(error: BaseException) -> Exception:
    """`error`, or an `InternalError` caused by it if futures or tasks would not accept it."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = InternalError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def start_thread(name: str, run: Callable[[], None], died: Callable[[Exception], None]) -> threading.Thread:
    """Start a daemon thread. `died` gets an exception of `run`, once logged, on that thread."""

    def top() -> None:
        try:
            run()
        except BaseException as error:
            log.error("thread %s has failed", name, exc_info=error)
            died(as_exception(error))

    thread = threading.Thread(target=top, name=name, daemon=True)
    thread.start()
    return thread


class DaemonPool(Executor):
    """An executor on up to `most` daemon threads, which do not delay the process's end."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = threading.Semaphore(0)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` on a thread. Raises RuntimeError if none can start."""
        future: Future[T] = Future()
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._threads < self._most:
                start_thread(self._name, partial(_run_jobs, self._jobs, self._idle), lambda error: None)
                self._threads += 1
        self._jobs.put(partial(_run_job, future, partial(fn, *args, **kwargs)))
        return future


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
        idle.release()
    jobs.put(None)  # ends the next thread


def _run_job(future: Future[Any], run: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = run()
    except BaseException as error:
        future.set_exception(as_exception(error))
    else:
        future.set_result(result)

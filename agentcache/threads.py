"""The boundary of a thread: every exception crosses it as an ordinary one, and no thread ends unnoticed.

Libraries raise more than `Exception`. A Rust panic (pyo3's PanicException) is a `BaseException`, which `except
Exception` and asyncio's tasks let through, and a future takes no `StopIteration`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from agentcache.errors import InternalError

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("agentcache.threads")


def as_exception(error: BaseException) -> Exception:
    """Return `error`, or an `InternalError` caused by it where a future, task or handler would not take it."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = InternalError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def contained(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, for another thread: it raises what `as_exception` returns."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if (ordinary := as_exception(error)) is error:
                raise
            raise ordinary from error

    return run


def start_thread(name: str, run: Callable[[], None], died: Callable[[Exception], None]) -> threading.Thread:
    """Start a daemon thread.

    Args:
        died: called on that thread with whatever `run` raises, after it has been logged.
    """

    def top() -> None:
        try:
            run()
        except BaseException as error:
            log.error("thread %s has failed", name, exc_info=error)
            died(as_exception(error))

    thread = threading.Thread(target=top, name=name, daemon=True)
    thread.start()
    return thread

"""Observer of attention results, for the proof at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

_observer: ContextVar[Callable[[mx.array], None] | None] = ContextVar("observer", default=None)


def observe(y: mx.array) -> mx.array:
    """Pass `y` to this thread's observer and return it."""
    if (observer := _observer.get()) is not None:
        observer(y)
    return y


@contextmanager
def observing(observer: Callable[[mx.array], None]) -> Iterator[None]:
    """Pass this thread's attention results to `observer`."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)

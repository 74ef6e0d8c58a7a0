"""Which processors a thread runs on. Linux only; elsewhere threads stay where the system puts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def share_processors(helpers: int) -> tuple[Collection[int], Collection[int]]:
    """Split the usable processors between this thread and `helpers` more threads; both empty without a choice.

    Linux tends to wake a thread on its waker's processor. Threads that exchange the GIL then share one processor while
    another idles.
    """
    if sys.platform != "linux":
        return (), ()
    usable = sorted(os.sched_getaffinity(0))
    own = len(usable) // (helpers + 1)
    return (usable[:own], usable[own:]) if own and helpers else ((), ())


@contextmanager
def kept_to(processors: Collection[int]) -> Iterator[None]:
    """Run this thread on these processors inside the block; on any if empty."""
    if sys.platform != "linux" or not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # no longer available
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)

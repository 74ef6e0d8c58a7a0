"""On which processors threads run.

Linux likes to wake a thread on the processor of the thread that wakes it. Two that hand Python's lock to each other end
up on one so, and stay there while another idles: nothing happens side by side then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def share_processors(helpers: int) -> tuple[Collection[int], Collection[int]]:
    """Of the processors that this thread may use, its own share and that of so many helpers.

    Nothing where there is no choice.
    """
    if sys.platform != "linux":
        return (), ()
    usable = sorted(os.sched_getaffinity(0))
    own = len(usable) // (helpers + 1)
    return (usable[:own], usable[own:]) if own and helpers else ((), ())


@contextmanager
def kept_to(processors: Collection[int]) -> Iterator[None]:
    """Meanwhile this thread runs on these; anywhere where there are none."""
    if sys.platform != "linux" or not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # somebody has just taken them away from this process
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)

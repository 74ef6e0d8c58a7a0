"""How the time of some work grows with the size of what it is about."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

MOST = 6.0  # for input of four times the size: linear work takes 4 times as long, quadratic work 16 times


def growth(make: Callable[[int], Any], work: Callable[[Any], object], size: int, *, rounds: int = 4) -> float:
    """By how much longer `work` takes for `make(4 * size)` than for `make(size)`: CPU time, the best of `rounds`."""
    small, large = make(size), make(4 * size)
    seconds = [(_seconds(work, small), _seconds(work, large)) for _ in range(rounds)]
    return min(each[1] for each in seconds) / min(each[0] for each in seconds)


def _seconds(work: Callable[[Any], object], given: Any) -> float:
    gc.collect()
    gc.disable()  # a collection in one of the two would be most of it
    try:
        begun = time.thread_time()
        work(given)
        return time.thread_time() - begun
    finally:
        gc.enable()

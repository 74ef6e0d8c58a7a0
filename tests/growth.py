"""CPU time of some work: how it grows with the size of its input, and in units that hold on machines of any speed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

MOST = 6.0  # for input of four times the size: linear work takes 4 times as long, quadratic work 16 times
ROUNDS = 8


def growth(make: Callable[[int], Any], work: Callable[[Any], object], size: int, *, most: float = MOST) -> float:
    """Return CPU time of `work` for `make(4 * size)` over that for `make(size)`.

    Each is the least of two to `ROUNDS` rounds, which end when the quotient is less than `most`: other processes may
    slow any one of them.
    """
    small, large = make(size), make(4 * size)
    shorter = longer = math.inf
    for number in range(ROUNDS):
        shorter = min(shorter, _seconds(work, small))
        longer = min(longer, _seconds(work, large))
        if number and longer < most * shorter:
            break
    return longer / shorter


def unit_of_work() -> list[dict[str, int | str]]:
    """A fixed piece of Python: 1 to 2 ms."""
    return [{"number": number, "name": str(number)} for number in range(10_000)]


def units(work: Callable[[], object], most: float, unit: Callable[[], object] = unit_of_work) -> float:
    """Return CPU time of `work` over that of `unit`.

    Each is the least of up to `ROUNDS` rounds, which end when the quotient is less than `most`.
    """
    taken = one = math.inf
    for _ in range(ROUNDS):
        taken = min(taken, _seconds(lambda _: work(), None))
        one = min(one, *(_seconds(lambda _: unit(), None) for _ in range(3)))
        if taken < most * one:
            break
    return taken / one


def _seconds(work: Callable[[Any], object], given: Any) -> float:
    gc.collect()
    gc.disable()  # a collection in one of the two would be most of it
    try:
        begun = time.thread_time()
        work(given)
        return time.thread_time() - begun
    finally:
        gc.enable()

"""CPU time of some work: how it grows with the size of its input, and in units that hold on machines of any speed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

MOST = 6.0  # for input of four times the size: linear work takes 4 times as long, quadratic work 16 times
ROUNDS = 8
TIMES = 4
LONGEST = 15


def growth(make: Callable[[int], Any], work: Callable[[Any], object], size: int, *, most: float = MOST) -> float:
    """Return CPU time of `work` for `make(4 * size)` over that for `make(size)`.

    It is the median of two to `LONGEST` rounds, which end when the median is less than `most`. Other processes slow a
    round by up to two, but slow both parts of most rounds equally: the parts follow each other, and read equally much
    memory for equally long, one large input or four small ones.
    """
    small, large = [make(size) for _ in range(TIMES)], [make(TIMES * size)]
    quotients: list[float] = []
    while len(quotients) < 2 or (len(quotients) < LONGEST and median_high(quotients) >= most):
        before = _seconds_each(work, small)
        quotients.append(TIMES * _seconds_each(work, large) / before)
    return median_high(quotients)


def _seconds_each(work: Callable[[Any], object], inputs: list[Any]) -> float:
    """Results are kept to the end, so that they take equally much memory, too."""
    return _seconds(lambda _: [work(each) for each in inputs], None)


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

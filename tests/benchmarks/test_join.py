"""The arithmetic of what a join costs, on made-up token times."""

from __future__ import annotations

import pytest

from benchmarks.batched.join import JoinCost, cost_of_join
from benchmarks.streams import Stream


def cost(*, request_ms: float = 0, join_ms: float = 0, leave_ms: float = 0) -> JoinCost:
    """Steps of 5 ms, and of 8 ms while the other row is there, that take so much longer where it is worked on."""
    with_row = [8 + join_ms, 8, 8, 8, 8]
    steps = [*[5] * 8, 5 + request_ms, 5, *with_row, 5 + leave_ms, *[5] * 10]
    times = [1.0]
    for step in steps:
        times.append(times[-1] + step / 1e3)
    other = tuple(moment + 0.0002 for moment in times[11:16])
    return cost_of_join(1024, times, Stream(times[8] + 0.001, other, times[-1], "", {"completion_tokens": 5}, {}))


def test_an_undisturbed_join_costs_nothing() -> None:
    assert cost() == JoinCost(1024, *(pytest.approx(ms, abs=1e-6) for ms in (0, 0, 0, 5, 8)))


def test_what_the_steps_take_longer_is_the_cost() -> None:
    assert cost(join_ms=3, leave_ms=2) == JoinCost(1024, *(pytest.approx(ms) for ms in (3, 2, 3, 5, 8)))


def test_what_the_request_delays_before_its_row_is_let_in_is_told_apart() -> None:
    measured = cost(request_ms=4, join_ms=3)
    assert (measured.join_ms, measured.request_ms) == (pytest.approx(3), pytest.approx(7))

"""Measuring how work grows: noise does not fail linear work, and does not pass quadratic work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import growth as module
from tests.growth import LONGEST, MOST, TIMES, growth

SLOWER = st.floats(1.0, 2.6)  # the most by which a part of a round is slowed; by 1.9 was measured
PARTS = 2 * LONGEST


class Clock:
    """Time that goes by as work says, times a factor for each part of a round."""

    def __init__(self, factors: Iterator[float]) -> None:
        self.now = 0.0
        self.factors = factors

    def seconds(self, work: object, given: object) -> float:
        begun, factor = self.now, next(self.factors)
        work(given)  # type: ignore[operator]
        return (self.now - begun) * factor

    def work(self, seconds: float) -> None:
        self.now += seconds


def measured(power: int, factors: list[float]) -> float:
    clock = Clock(chain(factors, repeat(1.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_seconds", clock.seconds)
        return growth(lambda size: float(size**power), clock.work, 100)


@pytest.mark.parametrize(("power", "expected"), [(0, 1), (1, 4), (2, 16), (3, 64)])
def test_without_noise_the_quotient_is_exact(power: int, expected: int) -> None:
    assert measured(power, []) == pytest.approx(expected)


@given(st.lists(SLOWER, min_size=PARTS, max_size=PARTS))
def test_no_noise_passes_quadratic_work(factors: list[float]) -> None:
    assert measured(2, factors) >= MOST


@given(st.lists(SLOWER, min_size=PARTS, max_size=PARTS))
def test_noise_in_less_than_half_of_the_rounds_does_not_fail_linear_work(factors: list[float]) -> None:
    noisy = {number for number in range(LONGEST) if factors[2 * number + 1] >= 1.5 * factors[2 * number]}
    if len(noisy) <= LONGEST // 2:
        assert measured(1, factors) < MOST


@given(st.floats(1.0, 100.0), st.integers(0, PARTS))
def test_a_machine_that_becomes_slow_does_not_fail_linear_work(slower: float, at: int) -> None:
    assert measured(1, [*[1.0] * at, *[slower] * (PARTS - at)]) < MOST


def test_quadratic_work_is_told_on_this_machine() -> None:
    def pairs(row: list[int]) -> int:
        return sum(one == other for one in row for other in row)

    assert growth(lambda size: list(range(size)), pairs, 30 * TIMES) >= MOST


def test_linear_work_is_told_on_this_machine() -> None:
    assert growth(lambda size: list(range(size)), lambda row: [str(each) for each in row], 5_000) < MOST

"""Combinations that cover all pairs."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import covering


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_any_two_values_occur_together(sizes: list[int]) -> None:
    parameters = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    found = {pair for each in covering(*parameters) for pair in combinations(each, 2)}
    assert found == {pair for each in product(*parameters) for pair in combinations(each, 2)}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_none_occurs_twice_and_few_do(sizes: list[int]) -> None:
    found = covering(*(range(size) for size in sizes))
    assert len(found) == len(set(found))
    largest, next_largest = sorted(sizes)[-2:][::-1]
    assert largest * next_largest <= len(found) <= 2 * largest * next_largest

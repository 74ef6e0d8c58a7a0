"""Few combinations of parameters in which any two values of two parameters occur together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

from tests.marks import slow

Combination = tuple[int, ...]


def covering(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of the parameters' values, as `itertools.product` orders them, that cover all pairs.

    A fault that needs two parameters' values is found by them. One of three may be missed.
    """
    every = list(product(*(range(len(values)) for values in parameters)))
    missing = {pair for combination in every for pair in _pairs(combination)}
    chosen = set[Combination]()
    while missing:
        best = max(every, key=lambda combination: sum(pair in missing for pair in _pairs(combination)))
        chosen.add(best)
        missing.difference_update(_pairs(best))
    return [tuple(values[i] for values, i in zip(parameters, each, strict=True)) for each in sorted(chosen)]


def and_slow_pairs(always: Sequence[tuple[Any, ...]], *parameters: Sequence[Any]) -> list[Any]:
    """For `pytest.mark.parametrize`: combinations that always run, and slow ones that cover all pairs."""
    return [*always, *(slow(*each) for each in covering(*parameters) if each not in always)]


def _pairs(combination: Combination) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    return combinations(enumerate(combination), 2)

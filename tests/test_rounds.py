"""A bound may be missed twice; three times it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.rounds import ROUNDS, BoundMissed, check_bound, in_rounds, within


def test_one_round_within_the_bound_is_enough(tmp_path: Path) -> None:
    folders: list[Path] = []

    @in_rounds
    def run(*, tmp_path: Path) -> str:
        folders.append(tmp_path)
        check_bound(len(folders) == ROUNDS, "too slow")
        return "done"

    assert run(tmp_path=tmp_path) == "done"
    assert len(set(folders)) == ROUNDS and all(folder.is_dir() for folder in folders)


def test_all_figures_are_told() -> None:
    seconds = iter([0.3, 0.2, 0.4])

    @in_rounds
    def run() -> None:
        taken = next(seconds)
        check_bound(taken < 0.1, taken)

    with pytest.raises(BoundMissed, match=r"in each of 3 rounds: 0\.3; 0\.2; 0\.4"):
        run()


def test_what_is_no_bound_fails_at_once() -> None:
    runs: list[int] = []

    @in_rounds
    def run() -> None:
        runs.append(1)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        run()
    assert runs == [1]


def test_within_measures() -> None:
    with within(60):
        pass
    with pytest.raises(BoundMissed, match=r"s, where 0\.001 s is the bound"), within(0.001):
        time.sleep(0.002)
    with pytest.raises(ValueError), within(0.0):
        raise ValueError

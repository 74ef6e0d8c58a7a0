"""Bugs that a rebuilding makes, planted one by one: tests/planted; `python -m tests.planted run`."""

from __future__ import annotations

import pytest

from tests.planted.run import Bug, bugs, exists, misplaced


def test_every_planted_bug_has_its_place() -> None:
    wrong = misplaced()
    assert not wrong, "\n".join([*wrong, "Code has moved: move the entries in tests/planted along with it."])
    assert len(bugs()) >= 100


def test_a_bug_applies_to_exactly_one_place() -> None:
    bug = Bug("twice", "blocks", "a.py", was="x += 1", now="x += 2", idea="", tests=())
    assert bug.planted_in("x = 0\nx += 1\n") == "x = 0\nx += 2\n"
    for text in ("x += 1\nx += 1\n", "x = 1\n"):
        with pytest.raises(ValueError, match="twice: . places in a.py"):
            bug.planted_in(text)


def test_a_bug_may_name_a_file_of_tests_or_one_test() -> None:
    name = test_every_planted_bug_has_its_place.__name__
    assert exists("tests/test_planted.py") and exists(f"tests/test_planted.py::{name}[a]")
    assert not exists("tests/test_planted.py::test_of_before") and not exists("tests/of_before.py")

"""What Python costs is measured on the real engine and application; here only that it is measured at all."""

from __future__ import annotations

import pytest

from benchmarks.python import MatchPlan, PythonCost, PythonPlan, StepPlan, measure_python, python_rows

PLAN = PythonPlan(StepPlan(rows=3, steps=100, rounds=1), MatchPlan(agents=4, prompt_tokens=2000, repeats=1))


@pytest.fixture(scope="module")
def cost() -> PythonCost:
    return measure_python(PLAN, lambda line: None)


@pytest.mark.slow
def test_the_prompt_is_long_and_the_tree_is_wide(cost: PythonCost) -> None:
    assert cost.match.prompt_tokens >= 2000
    # The agent's own blocks, and for each of the others two of its own and a tail, if not more.
    assert cost.match.tree_nodes >= 2000 // 256 + 3 * 3


@pytest.mark.slow
def test_everything_takes_some_time(cost: PythonCost) -> None:
    rows = python_rows(PLAN, cost)
    assert all(row["ms"] > 0 for row in rows)
    assert [row["limit_ms"] for row in rows if row["limit_ms"]] == [1.0, 2.0]
    assert cost.step.python_ms == cost.step.engine_ms + cost.step.streaming_ms

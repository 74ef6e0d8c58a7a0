"""Gaps are measured beside a form and without; how large they are depends on the machine."""

from __future__ import annotations

import pytest

from benchmarks.forms_benchmark import (
    FormsPlan,
    FormsResult,
    Gaps,
    build_report,
    forms_rows,
    forms_table,
    measure_forms,
)
from tests.conftest import ModelFolder


@pytest.mark.slow
def test_rows_are_measured_with_a_form_and_without(model_folder: ModelFolder) -> None:
    plan = FormsPlan(str(model_folder("qwen3_tied")), free_rows=2, tokens=30, rounds=2)
    result = measure_forms(plan, lambda line: None)
    for gaps in (result.without, result.formed):
        assert len(gaps.turns) == 2 and all(0 < len(turn) <= 2 * 29 for turn in gaps.turns)
    table = forms_table(build_report(plan, result))
    assert table.row_count == 4


def test_ratios_and_what_chance_makes_of_them() -> None:
    result = FormsResult(without=Gaps([[1.0, 2.0], [2.0, 4.0]]), formed=Gaps([[2.0], [6.0]]))
    p50, *_, p99 = forms_rows(result)
    assert (p50["without_ms"], p50["formed_ms"], p50["ratio"]) == (2.0, 2.0, 1.0)
    assert (p99["ratio"], p99["without_beside_itself"], p99["formed_beside_itself"]) == (1.5, 2.0, 3.0)

"""The start benchmark on a tiny model: its spans follow one another, and the second start knows what was chosen."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.start import START, Span, StartPlan, StartResult, build_report, measure_start
from tests.conftest import ModelFolder


@pytest.mark.slow
def test_a_small_run(model_folder: ModelFolder) -> None:
    plan = StartPlan(str(model_folder("qwen3_tied")))
    result = measure_start(plan, lambda line: None)
    assert result.load.seconds > 0
    assert 0 < result.ready.seconds <= result.chosen.seconds
    assert result.again.seconds > 0
    assert result.precision
    for span in (result.load, result.ready, result.chosen, result.again):
        assert span.cpu_seconds is None or span.cpu_seconds > 0.1


def test_a_bound_is_two_loads_and_twenty_seconds() -> None:
    loaded, ready = Span(5.0, 4.0), Span(15.0, None)
    result = StartResult(loaded, ready, Span(60.0, 50.0), ready, "8")
    report = build_report(StartPlan("folder"), result)
    shares = {row["what"]: row.get("share_of_bound") for row in report["rows"]}
    assert shares == {"load": None, "ready": 0.5, "chosen": 2.0, "again": 0.5}
    console = Console(width=200, record=True)
    for table in START.tables:
        console.print(table(report))
    shown = console.export_text()
    assert "0.50" in shown and "2.00" in shown and "chosen: 8" in shown

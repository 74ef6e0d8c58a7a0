"""The restore benchmark on a tiny model: every turn is of the kind it is said to be, and the report adds up."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from benchmarks.restore import RESTORE, RestorePlan, build_report, measure_restore
from tests.conftest import ModelFolder


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_small_run(model_folder: ModelFolder) -> None:
    reread = hasattr(os, "posix_fadvise")
    plan = RestorePlan(str(model_folder("qwen3_tied")), context=512, restarts=1, rounds=1, reread=reread)
    result = measure_restore(plan, lambda line: None)
    assert result.restored_bytes > 0
    report = build_report(plan, result)
    rows = {row["what"]: row for row in report["rows"]}
    assert list(rows) == ["hot", "evicted", "restarted", "alone", "read", "together", "kept"]
    for what in ("evicted", "restarted"):
        assert rows[what]["turn_ms"] >= rows[what]["restore_ms"] > 0
    for what in ("evicted", "restarted", "alone"):
        assert rows[what]["read_share"] == pytest.approx(rows[what]["gb_per_s"] / rows["read"]["gb_per_s"])
        for reads in ("together", "kept"):
            assert rows[what][f"{reads}_share"] == pytest.approx(rows[what]["gb_per_s"] / rows[reads]["gb_per_s"])
    console = Console(width=200, record=True)
    for table in RESTORE.tables:
        console.print(table(report))
    assert "restarted" in console.export_text()

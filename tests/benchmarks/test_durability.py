"""The durability benchmark on a tiny model: it counts every sync of a turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from agentcache.system.durable import Durability
from benchmarks.durability import DURABILITY, DurabilityPlan, build_report, measure_durability, ways
from tests.conftest import ModelFolder


@pytest.mark.slow
def test_a_small_run(model_folder: ModelFolder, tmp_path: Path) -> None:
    plan = DurabilityPlan(str(model_folder("qwen3_tied")), cache_dir=tmp_path, turns=3)
    rows = measure_durability(plan, lambda line: None)
    assert [row.durability for row in rows] == ways() and Durability.FULL in ways()
    for row in rows:
        # Blocks and their folders, new ones among them, the log, the manifest and its folder.
        assert 5 <= sum(row.syncs.values()) <= 16
        assert row.turn_ms > row.sync_ms > 0
        assert row.syncs.get("F_FULLFSYNC", 0) == (row.durability == Durability.FULL and len(rows) > 1)
    console = Console(width=200, record=True)
    for table in DURABILITY.tables:
        console.print(table(build_report(plan, rows)))
    assert "full" in console.export_text()
    assert list(tmp_path.iterdir()) == []

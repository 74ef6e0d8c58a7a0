"""Many adapters over one context, small: what is computed and kept, and that a report can be made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.multilora_benchmark import (
    PLENTIFUL,
    QUICK,
    REPORTER,
    MultiPlan,
    build_report,
    make_family,
    measure_memory,
    measure_pipeline,
    measure_workload,
    memory_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLAN: MultiPlan = replace(
    QUICK, context=300, tool_tokens=25, workflows=3, turns=2, rounds=2, new_tokens=3, agents=(1, 3), rate=50.0
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_family(tmp_path_factory.mktemp("family"), None, 5, 8, "q,v")


@pytest.fixture(scope="module")
def plentiful(adapters: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {policy: measure_workload(PLAN, adapters, "MapReduce", policy, PLENTIFUL, None) for policy in PLAN.policies}


def test_what_each_policy_computes(plentiful: dict[str, dict[str, Any]]) -> None:
    forks = PLAN.workflows * PLAN.context
    computed = {policy: row["computed_tokens"] for policy, row in plentiful.items()}
    assert forks <= computed["exact"] < 1.3 * forks
    assert computed["residual"] > computed["exact"]
    # All forks come at once: base reads the context once, and with one residual for all that is all there is to read.
    assert computed["residual-shared-a"] < 0.7 * computed["residual"]
    assert plentiful["auto"]["answered_by"] == plentiful["exact"]["answered_by"]


def test_what_each_policy_keeps(tmp_path: Path) -> None:
    rows = measure_memory(PLAN, tmp_path, lambda line: None)
    kept = {(row["policy"], row["agents"]): row for row in rows}
    together = {key: row["base"] + row["residual"] for key, row in kept.items()}
    grown = {policy: together[policy, 3] - together[policy, 1] for policy in ("exact", "residual", "residual-shared-a")}
    assert grown["residual-shared-a"] < grown["residual"] < grown["exact"] / 3
    assert kept["residual", 3]["base"] == kept["residual", 1]["base"]
    assert kept["residual", 3]["disk"] < kept["exact", 3]["disk"]


def test_a_pipeline_reads_its_context_once(adapters: dict[str, Path]) -> None:
    computed = {
        policy: measure_pipeline(PLAN, adapters, policy)["computed_tokens"] for policy in ("exact", "activated")
    }
    assert computed["activated"] < 1.5 * PLAN.context
    assert computed["exact"] > 5 * PLAN.context


def test_a_report(plentiful: dict[str, dict[str, Any]], adapters: dict[str, Path], tmp_path: Path) -> None:
    budget = memory_for(PLAN, adapters)
    assert 0 < budget < 1 << 28
    found = {"budget": budget, "workloads": list(plentiful.values()), "pipelines": [], "memory": []}
    report = build_report(PLAN, found)
    console = Console(width=200, record=True)
    for table in REPORTER.tables:
        console.print(table(report))
    assert "MapReduce, plentiful, residual-shared-a" in console.export_text()
    assert tmp_path / "multilora.json" in REPORTER.write(report, tmp_path)

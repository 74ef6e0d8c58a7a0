"""The batching benchmark on a real server, small: what it counts, its report, its plots. Nothing about how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.batched.arrivals import ArrivalsPlan
from benchmarks.batched.join import JoinPlan
from benchmarks.batched.measure import BATCHED, QUICK, BatchedPlan, BatchedResult, build_report, measure_batched
from benchmarks.batched.throughput import ThroughputPlan
from tests.conftest import ModelFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan(model_folder: ModelFolder) -> BatchedPlan:
    return BatchedPlan(
        ThroughputPlan(agents=(1, 3), context=40, new_tokens=150, rounds=1),
        JoinPlan(contexts=(256, 512), joins=2),
        ArrivalsPlan(running=2, context=40, long_prompt=1500, short_tokens=4, quiet_steps=20, shorts=1),
        model=str(model_folder("qwen3_tied", num_hidden_layers=2)),
    )


@pytest.fixture(scope="module")
def result(plan: BatchedPlan) -> BatchedResult:
    return measure_batched(plan, lambda line: None)


@pytest.fixture(scope="module")
def report(plan: BatchedPlan, result: BatchedResult) -> dict[str, Any]:
    return build_report(plan, result)


def test_there_is_one_result_for_every_number_of_agents(result: BatchedResult) -> None:
    assert [t.agents for t in result.throughput] == [p.rows for p in result.products] == [1, 3]
    for throughput in result.throughput:
        assert throughput.system >= throughput.per_agent > 0
        assert throughput.serial > 0 and throughput.turns_seconds > 0
        assert throughput.speedup == throughput.system / throughput.serial


def test_joins_are_measured_for_every_context_and_copy_no_keys_or_values(result: BatchedResult) -> None:
    assert [join.context for join in result.joins] == [256, 512]
    assert all(join.step_ms > 0 and join.step_with_ms > 0 for join in result.joins)
    assert result.copied_blocks in (None, 0)


def test_gaps_of_running_agents_are_seen_before_and_during_the_long_prompt(result: BatchedResult) -> None:
    arrivals = result.arrivals
    for gaps in (arrivals.quiet, arrivals.prefill, arrivals.same):
        assert 0 < gaps.p50_ms <= gaps.p95_ms <= gaps.max_ms
        assert gaps.tokens_per_s > 0
    assert arrivals.timeline and all(0 <= moment * 1e3 <= arrivals.long_ttft_ms for moment, _ in arrivals.timeline)
    assert arrivals.kept_rate == arrivals.prefill.tokens_per_s / arrivals.same.tokens_per_s
    assert min(arrivals.short_alone_ms, arrivals.short_among_ms, arrivals.short_during_ms, arrivals.long_alone_ms) > 0


def test_the_report_begins_with_caveats_and_says_where_it_ran(report: dict[str, Any], plan: BatchedPlan) -> None:
    assert next(iter(report)) == "caveats"
    assert {"machine", "versions", "commit", "command", "finished"} <= set(report)
    assert report["plan"]["joins"]["contexts"] == (256, 512)
    assert [t["speedup"] for t in report["throughput"]] == [t["system"] / t["serial"] for t in report["throughput"]]
    assert not any("random" in caveat for caveat in report["caveats"])
    assert report["gap_limit_ms"] == 150 + report["arrivals"]["quiet"]["p50_ms"]


def test_random_models_are_confessed(result: BatchedResult) -> None:
    assert "random" in build_report(QUICK, result)["caveats"][0]


def test_tables_and_files(report: dict[str, Any], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        console = Console(width=160, record=True, file=file)
        for table in BATCHED.tables:
            console.print(table(report))
        text = console.export_text()
    assert "Agents decoding at once" in text and "joins or leaves" in text and "a prompt of 1500 tokens" in text
    data, *plots = BATCHED.write(report, tmp_path / "results")
    assert json.loads(data.read_text())["throughput"][1]["agents"] == 3
    assert [plot.name for plot in plots] == ["batched_throughput.png", "batched_joins.png", "batched_arrivals.png"]
    for plot in plots:
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert plot.stat().st_size > 4096

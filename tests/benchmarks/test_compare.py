"""The comparison on real processes of both servers, small: same prompts, both killed, who reuses what, its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.compare import (
    COMPARE,
    OURS,
    PEER,
    ComparePlan,
    CompareResult,
    build_report,
    measure_comparison,
    peer_wins,
)
from tests.conftest import ModelFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan(model_folder: ModelFolder) -> ComparePlan:
    return ComparePlan(
        agents=2,
        turns=2,
        first_tokens=200,
        turn_tokens=30,
        answer_tokens=4,
        together_tokens=8,
        model=str(model_folder("qwen3_tied", num_hidden_layers=2)),
    )


@pytest.fixture(scope="module")
def result(plan: ComparePlan) -> CompareResult:
    return measure_comparison(plan, lambda line: None)


@pytest.fixture(scope="module")
def report(plan: ComparePlan, result: CompareResult) -> dict[str, Any]:
    return build_report(plan, result)


def test_both_servers_take_every_turn(result: CompareResult) -> None:
    turns = {name: sorted((t.turn, t.agent) for t in result.turns if t.server == name) for name in (OURS, PEER)}
    assert turns[OURS] == turns[PEER] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_first_prompt_is_the_same_to_the_token(result: CompareResult) -> None:
    firsts = {(t.agent, t.prompt_tokens) for t in result.turns if t.turn == 0}
    assert len(firsts) == 2


def test_only_agentcache_remembers_a_conversation_after_the_restart(result: CompareResult) -> None:
    for sample in result.turns:
        if sample.turn == 1:
            reused = sample.cached_tokens / sample.prompt_tokens
            assert reused > 0.5 if sample.server == OURS else reused < 0.5


def test_servers_are_weighed(result: CompareResult) -> None:
    ours, theirs = result.servers
    assert (ours.server, theirs.server) == (OURS, PEER)
    assert ours.cache_ram_bytes and ours.cache_disk_bytes > 0
    assert theirs.cache_ram_bytes is not None and theirs.cache_disk_bytes == 0
    for server in result.servers:
        assert server.process_ram_bytes > 10_000_000
        assert server.start_seconds > 0 and server.together_tokens_per_s > 0


def test_what_the_other_server_is_better_at_is_said() -> None:
    def turn(ours: float, theirs: float) -> dict[str, Any]:
        same = {"decode_tokens_per_s": 10.0}
        return {"turn": 0, "kind": "first", OURS: {"ttft_ms": ours, **same}, PEER: {"ttft_ms": theirs, **same}}

    def servers(ours: float, theirs: float) -> dict[str, dict[str, float]]:
        rates = {OURS: ours, PEER: theirs}
        return {name: {"together_tokens_per_s": rate, "start_seconds": 1.0} for name, rate in rates.items()}

    assert peer_wins([turn(100, 101), turn(100, 97)], servers(10, 9)) == []
    assert peer_wins([turn(100, 80)], servers(10, 20)) == [
        "turn 1 (first): first token after 80 ms, here 100 ms",
        "all agents at once: 20.0 tokens/s, here 10.0",
    ]


def test_report_tables_and_files(report: dict[str, Any], tmp_path: Path) -> None:
    assert list(report)[:2] == ["caveats", "peer_wins"]
    assert [turn["kind"] for turn in report["turns"]] == ["first", "after the restart"]
    assert "mlx-lm" in report["versions"]
    with (tmp_path / "out").open("w") as file:
        console = Console(width=160, record=True, file=file)
        for table in COMPARE.tables:
            console.print(table(report))
        text = console.export_text()
    assert "after the restart" in text and PEER in text
    data, plot = COMPARE.write(report, tmp_path / "results")
    assert json.loads(data.read_text())["servers"][PEER]["server"] == PEER
    assert plot.read_bytes().startswith(b"\x89PNG")

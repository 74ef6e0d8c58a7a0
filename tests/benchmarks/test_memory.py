"""The memory benchmark on a fake server, whose words depend on all it was told: flow, counts, report, plot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentcache.bench.ways import WAYS, first_difference, from_disk
from agentcache.workflow.transcript import WorkflowTranscript
from benchmarks.memory import MEMORY, MemoryPlan, SeedResult, build_report, measure_memory, memory_table

ROOT = Path(__file__).parent.parent.parent
FAKE = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
SCRIPT = """
[workflow]
name = "hunt"
max_tokens = 12

[draw.places]
from = ["mill", "tower", "quay", "church"]
as = ["place"]

[[agents]]
id = "ann"
system = "You are Ann."

[[phases]]
name = "told"
[[phases.turns]]
speaker = "ann"
prompt = "It is at the {place}. Remember that, for you will not hear it again from anybody here, not today."

[[phases]]
name = "asked"
[[phases.turns]]
speaker = "ann"
prompt = "Where?"
expect = ["{place}"]
[[phases.turns]]
speaker = "ann"
prompt = "Again?"
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> MemoryPlan:
    path = tmp_path_factory.mktemp("memory") / "hunt.toml"
    path.write_text(SCRIPT)
    return MemoryPlan(str(path), seeds=(1, 4), command=FAKE)


@pytest.fixture(scope="module")
def results(plan: MemoryPlan) -> list[SeedResult]:
    return measure_memory(plan, lambda line: None)


@pytest.fixture(scope="module")
def report(plan: MemoryPlan, results: list[SeedResult]) -> dict[str, Any]:
    return build_report(plan, results)


@pytest.mark.slow
def test_every_seed_is_run_in_every_way(results: list[SeedResult]) -> None:
    assert [result.seed for result in results] == [1, 4]
    for result in results:
        assert list(result.runs) == list(WAYS)
        assert {len(run.turns) for run in result.runs.values()} == {3}
        assert {run.values["place"] for run in result.runs.values()} == {result.runs["hot"].values["place"]}


@pytest.mark.slow
def test_states_and_tokens_are_as_meant(results: list[SeedResult]) -> None:
    for result in results:
        states = {way: [turn.cache_state for turn in run.turns] for way, run in result.runs.items()}
        assert states["hot"] == ["cold", "hot", "hot"]
        assert states["warm"] == ["cold", "warm", "hot"]
        assert states["cold"] == states["none"] == ["cold"] * 3
        cold, none = result.runs["cold"].turns, result.runs["none"].turns
        assert all(turn.computed_tokens == turn.prompt_tokens for turn in (*cold, *none))
        assert none[1].prompt_tokens < cold[1].prompt_tokens


@pytest.mark.slow
def test_only_without_memory_are_the_words_others(results: list[SeedResult]) -> None:
    for result in results:
        hot = result.runs["hot"]
        assert first_difference(hot, result.runs["warm"]) is None
        assert first_difference(hot, result.runs["cold"]) is None
        assert (first_difference(hot, result.runs["none"]) or "").startswith('phase 2 ("asked"), ann: ')
        assert result.restored


@pytest.mark.slow
def test_a_server_that_forgets_is_the_first_caveat(plan: MemoryPlan) -> None:
    forgetful = replace(plan, seeds=(4,), command=(*FAKE, "--fault", "forget"))
    results = measure_memory(forgetful, lambda line: None)
    assert not from_disk(results[0].runs["warm"])
    assert build_report(forgetful, results)["caveats"][0].startswith("NOT AS MEANT: ")


@pytest.mark.slow
def test_the_report_counts_words_points_and_tokens(report: dict[str, Any]) -> None:
    assert next(iter(report)) == "caveats"
    assert report["phases"] == ["told", "asked"]
    ways = report["ways"]
    assert {way: (part["same_words"], part["turns"]) for way, part in ways.items()} == {
        "cold": (6, 6),
        "warm": (6, 6),
        "hot": (6, 6),
        "none": (2, 6),
    }
    assert (ways["warm"]["found"], ways["warm"]["expected"], ways["warm"]["recall"]) == (0, 2, 0.0)
    assert ways["warm"]["by_phase"]["1"]["recall"] is None
    assert ways["warm"]["computed_tokens"] == ways["hot"]["computed_tokens"] < ways["cold"]["computed_tokens"]
    assert len(report["transcripts"]) == 8


def test_table_and_files(report: dict[str, Any], tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(memory_table(report))
    assert "0/2 (0%)" in captured.get()
    assert "2/6 turns" in captured.get()
    data, plot = MEMORY.write(report, tmp_path / "out")
    assert json.loads(data.read_text())["ways"]["none"]["turns"] == 6
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 1024


def test_a_difference_says_where_and_why(results: list[SeedResult]) -> None:
    hot = results[0].runs["hot"]

    def with_second(**changes: Any) -> WorkflowTranscript:
        turns = list(hot.turns)
        turns[1] = replace(turns[1], **changes)
        return replace(hot, turns=tuple(turns))

    assert first_difference(hot, replace(hot, turns=hot.turns[:2])) == "3 turns in one run, 2 in the other"
    assert (first_difference(hot, with_second(token_ids=(1,))) or "").endswith("and [1]")
    spoken = first_difference(hot, with_second(text="Hm.", prompt_tokens=7)) or ""
    assert "'Hm.' in the other (the same text as prompts of " in spoken
    assert spoken.endswith("and 7 tokens)")

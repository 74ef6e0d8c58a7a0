"""Recall across phases and its cost, in the ways of `agentcache.bench.ways`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.plots import Panel, count, milliseconds, percent, plot_by_phase
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.bench.ways import WAYS, Ways, from_disk, same_words, summarise
from agentcache.server_process import SERVE
from agentcache.workflow.parse import read_script
from agentcache.workflow.transcript import WorkflowTranscript, as_json
from benchmarks.workload import Progress, temporary_folder

DEFAULT_SCRIPT = "prisoners_dilemma"
CAVEATS = (
    "Recall is exact: an expected word stands in the answer as a whole word, and no rejected one.",
    "Times are the client's, over loopback HTTP, one turn after the other on an idle server; compare ratios within one "
    "run rather than times across machines.",
    "Warm reads come from files written moments before, so from the operating system's page cache.",
    "none still hears what others said since the agent's last turn: only the agent's own earlier phases are cut.",
)


@dataclass(frozen=True)
class MemoryPlan:
    script: str = DEFAULT_SCRIPT
    seeds: tuple[int, ...] = (1, 2, 3)
    model: str | None = None
    max_tokens: int | None = None
    command: tuple[str, ...] = SERVE


@dataclass(frozen=True)
class SeedResult:
    seed: int
    runs: Mapping[str, WorkflowTranscript]

    @property
    def restored(self) -> bool:
        return from_disk(self.runs["warm"])


def measure_memory(plan: MemoryPlan, progress: Progress) -> list[SeedResult]:
    return [_measure_seed(plan, seed, progress) for seed in plan.seeds]


def _measure_seed(plan: MemoryPlan, seed: int, progress: Progress) -> SeedResult:
    runs: dict[str, WorkflowTranscript] = {}
    with temporary_folder() as home:
        script = read_script(plan.script, seed)
        ways = Ways(script, home, home, lambda way, record: None, plan.model, plan.max_tokens, plan.command)
        for way in WAYS:
            runs[way] = ways.run(way)
            progress(f"seed {seed}  {way:<4}  {_line(summarise(runs[way].turns))}")
    return SeedResult(seed, runs)


def _line(summary: Mapping[str, Any]) -> str:
    return (
        f"recall {summary['found']:>3} of {summary['expected']}, {summary['computed_tokens']:>6} tokens computed, "
        f"first token {summary['ttft_ms_median']:7.0f} ms"
    )


def summarise_way(results: Iterable[SeedResult], way: str) -> dict[str, Any]:
    pairs = [(result.runs[way], result.runs["hot"]) for result in results]
    turns = [record for run, _ in pairs for record in run.turns]
    same = [same_words(*both) for run, hot in pairs for both in zip(run.turns, hot.turns, strict=True)]
    phases = sorted({record.phase for record in turns})
    return {
        **summarise(turns),
        "same_words": sum(same),
        "consistency": sum(same) / len(same),
        "by_phase": {str(phase): summarise([turn for turn in turns if turn.phase == phase]) for phase in phases},
    }


def build_report(plan: MemoryPlan, results: Sequence[SeedResult]) -> Report:
    first = results[0].runs["hot"]
    return MEMORY.report(
        plan,
        [*_not_restored(results), *CAVEATS],
        model={"name": plan.model or "embedded"},
        phases=list(dict.fromkeys(record.phase_name for record in first.turns)),
        ways={way: summarise_way(results, way) for way in WAYS},
        seeds=[{"seed": result.seed, "restored": result.restored, "ways": _by_way(result)} for result in results],
        transcripts=[as_json(run) for result in results for run in result.runs.values()],
    )


def _by_way(result: SeedResult) -> dict[str, Any]:
    return {way: summarise_way([result], way) for way in WAYS}


def _not_restored(results: Sequence[SeedResult]) -> list[str]:
    lost = [str(result.seed) for result in results if not result.restored]
    return [f"NOT AS MEANT: agents did not come back from disk with seed {', '.join(lost)}."] if lost else []


def memory_table(report: Report) -> Table:
    title = f"Memory across {len(report['phases'])} phases: {_about(report)}"
    costs = ("words as hot", "tokens computed", "of prompts", "first token")
    table = number_table(title, ("way", "recall", "in the last phase", *costs), named=True, no_wrap=True)
    for way, summary in report["ways"].items():
        table.add_row(way, *_cells(summary))
    return table


def _cells(summary: dict[str, Any]) -> list[str]:
    *_, last_phase = summary["by_phase"].values()
    return [
        _recall(summary),
        _recall(last_phase),
        f"{summary['same_words']}/{summary['turns']} turns",
        f"{summary['computed_tokens']:,}",
        f"{summary['computed_tokens'] / summary['prompt_tokens']:.0%}",
        f"{summary['ttft_ms_median']:.0f} ms",
    ]


def _recall(summary: dict[str, Any]) -> str:
    return "-" if summary["recall"] is None else f"{summary['found']}/{summary['expected']} ({summary['recall']:.0%})"


def _about(report: Report) -> str:
    seeds = ", ".join(str(result["seed"]) for result in report["seeds"])
    return f"{Path(report['plan']['script']).stem}, seeds {seeds}, {report['model']['name']} model"


def plot_memory(report: Report, path: Path) -> None:
    def series(key: str) -> dict[str, list[float | None]]:
        return {way: [part[key] for part in summary["by_phase"].values()] for way, summary in report["ways"].items()}

    panels = [
        Panel("recall: share of the expected words", series("recall"), percent, top=1.0),
        Panel("prompt tokens computed", series("computed_tokens"), count),
        Panel("time to first token, median (ms)", series("ttft_ms_median"), milliseconds),
    ]
    labels = [f"{number} {name}" for number, name in enumerate(report["phases"], 1)]
    machine = report["machine"]
    plot_by_phase(labels, panels, f"{_about(report)}; {machine['cores']} cores, {machine['device']}", path)


MEMORY = Reporter("memory", "memory across phases", (memory_table,), {"": plot_memory})

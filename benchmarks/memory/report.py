from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.plots import Panel, count, milliseconds, percent, plot_by_phase
from agentcache.bench.reporter import Report, Reporter, number_table
from agentcache.bench.ways import WAYS
from agentcache.workflow.transcript_files import as_json
from benchmarks.memory.measure import MemoryPlan, SeedResult, summarise_way

CAVEATS = (
    "Recall is exact: an expected word stands in the answer as a whole word, and no rejected one.",
    "Times are the client's, over loopback HTTP, one turn after the other on an idle server; compare ratios within one "
    "run rather than times across machines.",
    "Warm reads come from files written moments before, so from the operating system's page cache.",
    "none still hears what others said since the agent's last turn: only the agent's own earlier phases are cut.",
)


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

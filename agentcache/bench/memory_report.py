"""The memory benchmark's numbers for people and programs: a table, a JSON file, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agentcache.bench.memory import MemoryPlan, SeedResult, summarise_way
from agentcache.bench.memory_plots import Panel, count, milliseconds, percent, plot_by_phase
from agentcache.bench.reporting import write_json
from agentcache.bench.ways import WAYS
from agentcache.machine import describe_run
from agentcache.workflow.transcript_files import as_json

CAVEATS = (
    "Recall is exact: an expected word stands in the answer as a whole word, and no rejected one.",
    "Times are the client's, over loopback HTTP, one turn after the other on an idle server; compare ratios within one "
    "run rather than times across machines.",
    "Warm reads come from files written moments before, so from the operating system's page cache.",
    "none still hears what others said since the agent's last turn: only the agent's own earlier phases are cut.",
)


def build_memory_report(plan: MemoryPlan, results: Sequence[SeedResult]) -> dict[str, Any]:
    """All of a run as plain data, caveats first."""
    first = results[0].runs["hot"]
    return {
        "caveats": [*_not_restored(results), *CAVEATS],
        **describe_run("memory across phases"),
        "model": {"name": plan.model or "embedded"},
        "plan": asdict(plan),
        "phases": list(dict.fromkeys(record.phase_name for record in first.turns)),
        "ways": {way: summarise_way(results, way) for way in WAYS},
        "seeds": [{"seed": result.seed, "restored": result.restored, "ways": _by_way(result)} for result in results],
        "transcripts": [as_json(run) for result in results for run in result.runs.values()],
    }


def _by_way(result: SeedResult) -> dict[str, Any]:
    return {way: summarise_way([result], way) for way in WAYS}


def _not_restored(results: Sequence[SeedResult]) -> list[str]:
    lost = [str(result.seed) for result in results if not result.restored]
    return [f"NOT AS MEANT: agents did not come back from disk with seed {', '.join(lost)}."] if lost else []


def memory_table(report: dict[str, Any]) -> Table:
    """A line a way: what was remembered, whether the words are the reference's, what it cost."""
    table = Table(title=f"Memory across {len(report['phases'])} phases: {_about(report)}")
    table.add_column("way", no_wrap=True)
    for heading in ("recall", "in the last phase", "words as hot", "tokens computed", "of prompts", "first token"):
        table.add_column(heading, justify="right", no_wrap=True)
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


def write_memory_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `memory.json` and `memory.png`; their paths."""
    data, plot = folder / "memory.json", folder / "memory.png"
    write_json(report, data, ensure_ascii=False)
    machine = report["machine"]
    title = f"{_about(report)}; {machine['cores']} cores, {machine['device']}"
    plot_by_phase(_labels(report["phases"]), memory_panels(report), title, plot)
    return [data, plot]


def _about(report: dict[str, Any]) -> str:
    seeds = ", ".join(str(result["seed"]) for result in report["seeds"])
    return f"{Path(report['plan']['script']).stem}, seeds {seeds}, {report['model']['name']} model"


def _labels(names: Sequence[str]) -> list[str]:
    return [f"{number} {name}" for number, name in enumerate(names, 1)]


def memory_panels(report: dict[str, Any]) -> list[Panel]:
    """Recall, tokens and times by phase; phases in which nothing is expected show no recall."""

    def series(key: str) -> dict[str, list[float | None]]:
        return {way: [part[key] for part in summary["by_phase"].values()] for way, summary in report["ways"].items()}

    return [
        Panel("recall: share of the expected words", series("recall"), percent, top=1.0),
        Panel("prompt tokens computed", series("computed_tokens"), count),
        Panel("time to first token, median (ms)", series("ttft_ms_median"), milliseconds),
    ]

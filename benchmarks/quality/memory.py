"""Recall across phases by way of remembering and KV precision."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.bench.plots import draw_bars, new_figure, percent
from agentcache.bench.reporter import Report
from agentcache.bench.ways import Ways, same_words, summarise
from agentcache.server_process import SERVE
from agentcache.workflow.parse import read_script
from agentcache.workflow.transcript import WorkflowTranscript
from benchmarks.quality.plan import Part, QualityPlan, ResultTable
from benchmarks.workload import Progress

_SCRIPT = "prisoners_dilemma"
_SEEDS = 4
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#999999")


@dataclass(frozen=True)
class Remembering:
    way: str
    kv: str

    def __str__(self) -> str:
        return f"{self.way}, --kv {self.kv}"


# The first is the reference.
_RUNS = tuple(
    Remembering(*each)
    for each in (("hot", "16"), ("hot", "auto"), ("hot", "4"), ("warm", "4"), ("cold", "4"), ("none", "4"))
)


def measure_memory(plan: QualityPlan, progress: Progress) -> list[ResultTable]:
    seeds = range(1, 1 + plan.scaled(_SEEDS))
    runs = {each: [_run(each, seed, plan) for seed in seeds] for each in _RUNS}
    rows = [_row(each, transcripts, runs[_RUNS[0]]) for each, transcripts in runs.items()]
    for row in rows:
        progress(f"{row['way']:<16} recall {row['recall']:.1%}, in the last phase {row['last']:.1%}")
    columns = {
        "way": "way",
        "recall": "recall",
        "last": "in the last phase",
        "same": f"turns with the words of {_RUNS[0]}",
        "turns": "turns",
        "computed": "prompt tokens computed",
    }
    notes = (
        f"{_SCRIPT}: {len(rows[0]['by_phase'])} phases, seeds "
        f"{seeds[0]} to {seeds[-1]}; recall is of the words that the script expects.",
        "hot: one process; warm: SIGKILL at every phase border; cold: all text sent again; none: phases are forgotten.",
    )
    formats = {"recall": ".1%", "last": ".1%", "computed": ","}
    return [ResultTable("memory", "Working memory across phases", columns, rows, formats, notes)]


def _run(each: Remembering, seed: int, plan: QualityPlan) -> WorkflowTranscript:
    with tempfile.TemporaryDirectory(prefix="agentcache-quality-") as folder:
        script, home = read_script(_SCRIPT, seed), Path(folder)
        command = (*SERVE, "--kv", each.kv)
        return Ways(script, home, home, lambda way, record: None, plan.model, command=command).run(each.way)


def _row(
    each: Remembering, transcripts: Sequence[WorkflowTranscript], reference: Sequence[WorkflowTranscript]
) -> dict[str, Any]:
    turns = [record for transcript in transcripts for record in transcript.turns]
    pairs = zip(turns, [record for transcript in reference for record in transcript.turns], strict=True)
    phases = sorted({record.phase for record in turns})
    by_phase = [summarise([record for record in turns if record.phase == phase])["recall"] for phase in phases]
    whole = summarise(turns)
    return {
        "way": str(each),
        "recall": whole["recall"],
        "last": by_phase[-1],
        "same": sum(same_words(*pair) for pair in pairs),
        "turns": len(turns),
        "computed": whole["computed_tokens"],
        "by_phase": by_phase,
        "phases": list(dict.fromkeys(record.phase_name for record in turns)),
    }


def plot_memory(report: Report, path: Path) -> None:
    table = next(ResultTable.of(data) for data in report["tables"] if data["name"] == "memory")
    phases = table.rows[0]["phases"]
    figure = new_figure(max(8.0, 2.2 * len(phases)), 3.6)
    axes = figure.subplots()
    series = {row["way"]: row["by_phase"] for row in table.rows}
    draw_bars(axes, series, dict(zip(series, _COLOURS, strict=False)), _label)
    axes.set_xticks(range(len(phases)), phases)
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("share of the expected words")
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.suptitle("What agents still know, by how they remember", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)


def _label(share: float) -> str:
    return "" if share == 1 else percent(share)


PART = Part(measure_memory, {"memory": plot_memory})

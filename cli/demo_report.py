"""Report of the demo: rows, verdict, quotes, table, files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentcache.bench.plots import Panel, count, milliseconds, plot_by_phase
from agentcache.bench.reporter import Report, draw, write_json
from agentcache.bench.ways import first_difference, from_disk, summarise
from agentcache.system.machine import describe_run
from agentcache.workflow.checks import pattern_of
from agentcache.workflow.score import score
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript
from agentcache.workflow.transcript_files import score_json, write_transcript

SHOWN = ("cold", "warm", "hot")
TELLING_LINES = 8
FOOTNOTE = (
    "computed: prompt tokens that went through the model. first ms: time to first token, median of the turns. "
    "cold: the text re-sent, nothing cached; warm: SIGKILL before each phase, then from disk; hot: never stopped. "
    "In phase 1 nobody has spoken yet, so it is cold in every run."
)


def build_demo_report(runs: Mapping[str, WorkflowTranscript]) -> dict[str, Any]:
    """Passes if text, token ids and scores are identical, agents were restored after every kill, and turns saved."""
    hot, warm, cold = runs["hot"], runs["warm"], runs["cold"]
    difference = first_difference(hot, warm) or first_difference(hot, cold)
    same_score = score(hot) == score(warm) == score(cold)
    restored = from_disk(warm)
    saved = all(record.saved is not False for record in warm.turns)
    return {
        "passed": difference is None and same_score and restored and saved,
        "same_words": difference is None,
        "difference": difference,
        "same_score": same_score,
        "from_disk": restored,
        "saved": saved,
        "turns": len(hot.turns),
        "tokens_said": sum(record.completion_tokens for record in hot.turns),
        "seed": hot.seed,
        "values": dict(hot.values),
        "rows": _rows(runs),
        "total": {run: summarise(runs[run].turns) for run in SHOWN},
        "recall": score_json(score(warm)),
        **describe_run("demo"),
    }


def _rows(runs: Mapping[str, WorkflowTranscript]) -> list[dict[str, Any]]:
    names = {record.phase: record.phase_name for record in runs["hot"].turns}
    return [{"phase": phase, "phase_name": name, **_row(runs, phase)} for phase, name in names.items()]


def _row(runs: Mapping[str, WorkflowTranscript], phase: int) -> dict[str, Any]:
    turns = {run: [record for record in runs[run].turns if record.phase == phase] for run in SHOWN}
    context = max(record.prompt_tokens for record in turns["hot"])
    return {"context_tokens": context, **{run: summarise(turns[run]) for run in SHOWN}}


def demo_table(report: dict[str, Any]) -> Table:
    """Recall and cost by phase and run."""
    table = Table(title="The same conversation in three runs", caption=FOOTNOTE, caption_justify="left")
    table.add_column("phase", no_wrap=True)
    costs = (f"{what}\n{run}" for what in ("computed", "first ms") for run in SHOWN)
    for heading in ("longest\ncontext", "recall", *costs, "first ms\ncold / warm"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(f"{row['phase']} {row['phase_name']}", str(row["context_tokens"]), *_cells(row))
    table.add_section()
    table.add_row("all", "", *_cells(report["total"]))
    return table


def _cells(parts: Mapping[str, Any]) -> list[str]:
    cold, warm = (parts[run]["ttft_ms_median"] for run in ("cold", "warm"))
    return [
        " ".join(dict.fromkeys(_recall(parts[run]) for run in SHOWN)),
        *(str(parts[run]["computed_tokens"]) for run in SHOWN),
        *(f"{parts[run]['ttft_ms_median']:.0f}" for run in SHOWN),
        f"{cold / warm:.1f}x",
    ]


def _recall(summary: Mapping[str, Any]) -> str:
    return f"{summary['found']}/{summary['expected']}" if summary["expected"] else ""


def telling_lines(transcript: WorkflowTranscript) -> list[Text]:
    """The last turns with expected words, which are marked; missing words follow."""
    checked = [record for record in transcript.turns if record.checks and record.phase > 1]
    return [_telling_line(record, transcript.names[record.speaker]) for record in checked[-TELLING_LINES:]]


def _telling_line(record: TurnRecord, name: str) -> Text:
    line = Text(f"{record.phase}.{record.turn} {name}: ", style="bold")
    answer = Text(" ".join(record.text.split()), style="not bold")
    for check in record.checks:
        if check.found:
            answer.highlight_regex(pattern_of(check.expected), "bold green")
    missing = [check.expected for check in record.checks if not check.found]
    return line + answer + Text(f"  (expected: {', '.join(missing)})" if missing else "", style="red")


def summary_lines(report: dict[str, Any]) -> list[str]:
    cold, warm, hot = (report["total"][run] for run in SHOWN)
    lines = [
        f"Recall: {_recall(cold)} cold, {_recall(warm)} warm, {_recall(hot)} hot (seed {report['seed']}).",
        f"First token, median: {cold['ttft_ms_median']:.0f} ms cold, {warm['ttft_ms_median']:.0f} ms warm, "
        f"{hot['ttft_ms_median']:.0f} ms hot. Tokens computed: {cold['computed_tokens']} cold, "
        f"{warm['computed_tokens']} warm, {hot['computed_tokens']} hot.",
        f"Restored from disk after every SIGKILL: {_yes(report['from_disk'] and report['saved'])}",
        f"Same words: {_yes(report['same_words'])} ({report['turns']} turns, {report['tokens_said']} tokens)",
    ]
    return [*lines, f"First difference: {report['difference']}"] if report["difference"] else lines


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def write_demo_report(report: dict[str, Any], runs: Mapping[str, WorkflowTranscript], folder: Path) -> list[Path]:
    """Write transcripts (warm in `folder`, the rest below it), `demo.json`, `.txt` and, with matplotlib, `.png`."""
    write_transcript(runs["warm"], folder)
    for run in ("hot", "cold"):
        write_transcript(runs[run], folder / run)
    data, text, plot = (folder / f"demo.{ending}" for ending in ("json", "txt", "png"))
    write_json(report, data)
    with text.open("w", encoding="utf-8") as file:
        _print_all(report, runs["warm"], Console(file=file, width=120))
    drawn = [plot] if draw(plot_demo, report, plot) else []
    return [folder / "transcript.md", data, text, *drawn]


def _print_all(report: dict[str, Any], transcript: WorkflowTranscript, console: Console) -> None:
    console.print(demo_table(report))
    for line in telling_lines(transcript):
        console.print(line)
    for summary in summary_lines(report):
        console.print(summary, highlight=False, markup=False, soft_wrap=True)


def plot_demo(report: Report, path: Path) -> None:
    rows = report["rows"]

    def series(key: str) -> dict[str, list[float | None]]:
        return {run: [row[run][key] for row in rows] for run in SHOWN}

    labels = [f"{row['phase_name']}\n{row['context_tokens']} tokens of context" for row in rows]
    panels = [
        Panel("prompt tokens computed", series("computed_tokens"), count),
        Panel("time to first token, median (ms)", series("ttft_ms_median"), milliseconds),
    ]
    plot_by_phase(labels, panels, "The same conversation in three runs", path)

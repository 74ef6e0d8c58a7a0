"""`agentcache demo`: one workflow hot, cold, and from disk after SIGKILL."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentcache.bench.plots import Panel, can_plot, count, milliseconds, plot_by_phase
from agentcache.bench.reporter import NO_PICTURE, Report, draw, write_json
from agentcache.bench.ways import Ways, first_difference, from_disk, summarise
from agentcache.cli.run import progress_line, say
from agentcache.server_process import SERVE, ending_on_signals
from agentcache.system.machine import describe_run
from agentcache.workflow.parse import read_script
from agentcache.workflow.script import Script, steps_of
from agentcache.workflow.transcript import (
    TurnRecord,
    WorkflowTranscript,
    pattern_of,
    score,
    score_json,
    write_transcript,
)

SCRIPT = "prisoners_dilemma"
RUNS = {
    "hot": "all phases without interruption, the reference",
    "warm": "SIGKILL between phases, a new server continues from disk",
    "cold": "the same text to a server that may use nothing it has seen before",
}

SHOWN = ("cold", "warm", "hot")
TELLING_LINES = 8
FOOTNOTE = (
    "computed: prompt tokens that went through the model. first ms: time to first token, median of the turns. "
    "cold: the text re-sent, nothing cached; warm: SIGKILL before each phase, then from disk; hot: never stopped. "
    "Phase 1 is cold in every run."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for transcript, table, plot and logs.")] = Path("agentcache-demo"),
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: the embedded model.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draws other facts. Default: the script's seed.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a turn; overrides the script's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Agents whose memory outlives SIGKILL: the same words and recall cold, warm and hot, and what each costs."""
    progress = Console(stderr=True)
    script = read_script(SCRIPT, seed)
    with ending_on_signals():
        runs = run_demo(script, out, progress, model, max_tokens)
    report = build_demo_report(runs)
    paths = write_demo_report(report, runs, out)
    text = progress if as_json else Console(width=max(Console().width, 120))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        text.print(demo_table(report))
    for line in telling_lines(runs["warm"]):
        text.print(line)
    for summary in [*summary_lines(report), f"Written: {', '.join(str(path) for path in paths)}"]:
        say(text, summary)
    if not can_plot():
        say(progress, NO_PICTURE)
    if not report["passed"]:
        raise typer.Exit(1)


def run_demo(
    script: Script,
    out: Path,
    console: Console,
    model: str | None = None,
    max_tokens: int | None = None,
    command: tuple[str, ...] = SERVE,
) -> dict[str, WorkflowTranscript]:
    out.mkdir(parents=True, exist_ok=True)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="agentcache-demo-") as caches:
        progress = _Progress(console, len(steps_of(script)))
        ways = Ways(script, Path(caches), out, progress.turn, model, max_tokens, command)
        for number, (way, what) in enumerate(RUNS.items(), 1):
            say(console, f"{number}/{len(RUNS)} {way}: {what}")
            with console.status(f"{way}: starting a server") as progress.status:
                runs[way] = ways.run(way)
    return runs


class _Progress:
    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._num_turns = num_turns
        self._count = 0
        self._phase = 1
        self.status = console.status("")

    def turn(self, way: str, record: TurnRecord) -> None:
        if way == "warm" and record.phase > self._phase:
            say(self._console, f"SIGKILL after phase {self._phase}")
        self._phase = record.phase
        self._count = self._count % self._num_turns + 1
        say(self._console, progress_line(record))
        self.status.update(f"{way}: {self._count} of {self._num_turns} turns")


def build_demo_report(runs: Mapping[str, WorkflowTranscript]) -> dict[str, Any]:
    """`passed`: equal words and scores, turns saved, agents restored after each kill."""
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
        "rows": list(_rows(runs)),
        "total": {run: summarise(runs[run].turns) for run in SHOWN},
        "recall": score_json(score(warm)),
        **describe_run("demo"),
    }


def _rows(runs: Mapping[str, WorkflowTranscript]) -> Iterator[dict[str, Any]]:
    for phase, name in {record.phase: record.phase_name for record in runs["hot"].turns}.items():
        turns = {run: [record for record in runs[run].turns if record.phase == phase] for run in SHOWN}
        context = max(record.prompt_tokens for record in turns["hot"])
        costs = {run: summarise(turns[run]) for run in SHOWN}
        yield {"phase": phase, "phase_name": name, "context_tokens": context, **costs}


def demo_table(report: dict[str, Any]) -> Table:
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
    """Write transcripts (hot and cold in subfolders), `demo.json`, `.txt` and, with matplotlib, `.png`."""
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

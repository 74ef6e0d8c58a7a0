"""`agentcache demo`: agents keep their memory after SIGKILL, with identical answers.

Three runs of one workflow on server processes (see `bench.ways`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentcache.bench.plots import can_plot
from agentcache.bench.reporter import NO_PICTURE
from agentcache.bench.ways import Ways
from agentcache.cli.demo_report import build_demo_report, demo_table, summary_lines, telling_lines, write_demo_report
from agentcache.cli.run_report import progress_line, say
from agentcache.server_process import SERVE, ending_on_signals
from agentcache.workflow.parse import read_script
from agentcache.workflow.script import Script, steps_of
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

SCRIPT = "prisoners_dilemma"
RUNS = {
    "hot": "all phases without interruption, the reference",
    "warm": "SIGKILL at every phase border, a new server goes on from disk",
    "cold": "the same text to a server that may use nothing it has seen before",
}


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
    """Run all `RUNS`; return transcripts by name. All servers have then ended."""
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

"""`agentcache run`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentcache.cli.connection import ApiKey, ApiKeyFile, AsJson, CacheDir, Model, Url, find_server, progress
from agentcache.client import Client, ServerError
from agentcache.errors import ConfigError, EngineStopped
from agentcache.settings.config import Config
from agentcache.workflow.chat import Chat, HttpChat, LLMChat
from agentcache.workflow.parse import read_script, shipped_scripts
from agentcache.workflow.run import Settings, WorkflowRun, parse_phases
from agentcache.workflow.schedule import ONE_BY_ONE, PARALLEL, Schedule, take_all
from agentcache.workflow.script import Script, Step, steps_of
from agentcache.workflow.transcript import (
    Miss,
    TurnRecord,
    WorkflowTranscript,
    read_transcript,
    score,
    write_transcript,
)
from agentcache.workflow.transcript import as_json as as_data

SHOWN_WORDS = 160  # characters of a wrong answer


def run(
    script: Annotated[str, typer.Argument(help=f"A TOML script, or one of these: {', '.join(shipped_scripts())}.")],
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="Prefix of the agents' ids (SESSION.alice). The same session finds the same agents again. "
            "Default: the script's name."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the script's facts and seeds sampled turns. Default: the script's seed.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Overrides the script's max_tokens.")] = None,
    only_phases: Annotated[str | None, typer.Option(help='Run only these phases: "3" or "1-3".')] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue after the last turn in this transcript.json.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for transcript.json and transcript.md, written after every turn. "
            "Default: agentcache-runs/SESSION."
        ),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Run one turn at a time, also independent ones.")
    ] = False,
    prefetch: Annotated[
        bool, typer.Option("--prefetch/--no-prefetch", help="Restore the next speakers from disk in advance.")
    ] = True,
    min_recall: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Exit with 1 if a smaller share of the expected words was said."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow script: several agents, each with its own durable memory, in phases."""
    before = read_transcript(resume) if resume else None
    parsed = _read(script, seed, before, min_recall)
    settings = Settings(session or (before.session if before else parsed.name), max_tokens)
    folder = out or (resume.parent if resume else Path("agentcache-runs") / settings.session)
    done = before.turns if before else ()
    phases = parse_phases(only_phases, parsed) if only_phases else None
    pace = Schedule(parallel=1 if sequential else PARALLEL, prefetch=prefetch)
    server = find_server(url, api_key, model, cache_dir, api_key_file)
    with _open_chat(*server) as chat, _resume_hint(folder / "transcript.json"):
        workflow = WorkflowRun(parsed, chat, settings, done)
        transcript = take_steps(workflow, workflow.pending(phases), done, folder, Console(stderr=True), pace)
    if as_json:
        typer.echo(json.dumps(as_data(transcript), ensure_ascii=False))
    else:
        _print_report(transcript)
    if min_recall is not None:
        _check_recall(transcript, min_recall)


def _read(script: str, seed: int | None, before: WorkflowTranscript | None, min_recall: float | None) -> Script:
    parsed = read_script(script, before.seed if before and seed is None else seed)
    if min_recall is not None and not any(step.turn.expect or step.turn.expect_calls for step in steps_of(parsed)):
        raise ConfigError("--min-recall needs a script with `expect`")
    return parsed


def _print_report(transcript: WorkflowTranscript) -> None:
    console = Console(width=max(Console().width, 120))
    console.print(turn_table(transcript))
    for line in recall_lines(transcript):
        say(console, line)


@contextmanager
def _open_chat(config: Config, server: str | None) -> Iterator[Chat]:
    if server is not None:
        with Client(server, config.api_key) as client:
            yield HttpChat(client)
        return
    from agentcache.llm import LLM

    with progress("loading the model"):
        llm = LLM.from_config(config)
    with llm:
        yield LLMChat(llm)


@contextmanager
def _resume_hint(path: Path) -> Iterator[None]:
    try:
        yield
    except (ServerError, EngineStopped, KeyboardInterrupt):
        if path.exists():
            say(Console(stderr=True), f"hint: go on with --resume {path}")
        raise


def take_steps(
    workflow: WorkflowRun,
    steps: Sequence[Step],
    done: Sequence[TurnRecord],
    folder: Path,
    console: Console,
    pace: Schedule = ONE_BY_ONE,
) -> WorkflowTranscript:
    transcript = workflow.transcript(done)
    write_transcript(transcript, folder)
    with console.status(f"{len(steps)} turns") as status:
        for number, record in enumerate(take_all(workflow, steps, pace), 1):
            transcript = transcript.with_turn(record)
            write_transcript(transcript, folder)
            say(console, progress_line(record))
            status.update(f"{number} of {len(steps)} turns")
    return transcript


def _check_recall(transcript: WorkflowTranscript, wanted: float) -> None:
    reached = score(transcript).recall
    if reached.share < wanted:
        say(Console(stderr=True), f"error: recall is {reached}, below --min-recall {wanted:g}")
        raise typer.Exit(1)


def say(console: Console, line: str) -> None:
    """Print without markup, highlighting or wrapping."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_line(record: TurnRecord) -> str:
    return (
        f"{record.phase}.{record.turn} {record.speaker:<10} {record.cache_state:<4} "
        f"{record.prompt_tokens:>6} tokens, {record.computed_tokens:>5} computed, "
        f"first token {record.ttft_ms:7.0f} ms, all {record.total_ms:7.0f} ms"
        + (", prefetched" if record.prefetched else "")
    )


def turn_table(transcript: WorkflowTranscript) -> Table:
    table = Table(title=transcript.title)
    for heading in ("phase", "speaker", "match", "cache"):
        table.add_column(heading, no_wrap=True)
    for heading in ("context", "cached", "computed", "first ms", "total ms", "written", "recall"):
        table.add_column(heading, justify="right")
    for record in transcript.turns:
        table.add_row(
            f"{record.phase} {record.phase_name}",
            transcript.names[record.speaker],
            record.match,
            record.cache_state,
            *(str(count) for count in (record.prompt_tokens, record.cached_tokens, record.computed_tokens)),
            f"{record.ttft_ms:.0f}",
            f"{record.total_ms:.0f}",
            kilobytes(record.written_bytes),
            _points(record),
        )
    return table


def recall_lines(transcript: WorkflowTranscript) -> list[str]:
    result = score(transcript)
    if not result.recall.total:
        return []
    return [
        f"Recall: {result.recall}",
        "  by phase: " + ", ".join(f"{phase}: {part}" for phase, part in result.by_phase.items()),
        "  by agent: " + ", ".join(f"{transcript.names[agent]} {part}" for agent, part in result.by_agent.items()),
        *(_miss_line(miss, transcript.names[miss.speaker]) for miss in result.misses),
    ]


def kilobytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1000:.0f} kB"


def _points(record: TurnRecord) -> str:
    return f"{sum(check.found for check in record.checks)}/{len(record.checks)}" if record.checks else ""


def _miss_line(miss: Miss, name: str) -> str:
    said = " ".join(miss.said.split())
    shown = said if len(said) <= SHOWN_WORDS else said[:SHOWN_WORDS] + "…"
    return f'  {miss.phase}.{miss.turn} {name}: expected "{miss.expected}", said: {shown or "nothing"}'

"""`agentcache run SCRIPT.toml`: a workflow of several agents, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentcache.cli.connection import ApiKey, AsJson, CacheDir, Model, Url, progress, running_server
from agentcache.client import Client, HttpChat, ServerError
from agentcache.config import load_config
from agentcache.errors import EngineStopped
from agentcache.workflow.run import Chat, LLMChat, Settings, WorkflowRun, parse_phases
from agentcache.workflow.script import Script, Step, read_script
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript, read_transcript, write_transcript


def run(
    script: Annotated[str, typer.Argument(help="A TOML script, or the name of a shipped one: prisoners_dilemma.")],
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="Prefix of the agents' ids (SESSION.alice). The same session finds the same agents again. "
            "Default: the script's name."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled turns repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Overrides the script's max_tokens.")] = None,
    only_phases: Annotated[str | None, typer.Option(help='Stop and go on in parts: "3" or "1-3".')] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on at the first turn that is not in this transcript.json.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for transcript.json and transcript.md, written after every turn. "
            "Default: agentcache-runs/SESSION."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow script: several agents, each with its own durable memory, in phases."""
    parsed = read_script(script)
    before = read_transcript(resume) if resume else None
    settings = _settings(parsed, before, session, seed, max_tokens)
    folder = out or (resume.parent if resume else Path("agentcache-runs") / settings.session)
    done = before.turns if before else ()
    phases = parse_phases(only_phases, parsed) if only_phases else None
    with _open_chat(url, api_key, model, cache_dir) as chat, _resume_hint(folder / "transcript.json"):
        workflow = WorkflowRun(parsed, chat, settings, done)
        transcript = take_steps(workflow, workflow.pending(phases), done, folder, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(transcript.to_json(), ensure_ascii=False))
    else:
        Console(width=max(Console().width, 120)).print(turn_table(transcript))


def _settings(
    script: Script, before: WorkflowTranscript | None, session: str | None, seed: int | None, max_tokens: int | None
) -> Settings:
    """A resumed run keeps its session and seed unless told otherwise."""
    if before is None:
        return Settings(session or script.name, seed, max_tokens)
    return Settings(session or before.session, before.seed if seed is None else seed, max_tokens)


@contextmanager
def _open_chat(url: str | None, api_key: str | None, model: str | None, cache_dir: Path | None) -> Iterator[Chat]:
    """A running server (`url`, or one on the configured port), or else an engine in this process."""
    config = load_config({"api_key": api_key, "model": model, "cache_dir": cache_dir})
    found = url or (running_server(config) if model is None and cache_dir is None else None)
    if found is not None:
        with Client(found, config.api_key) as client:
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
    workflow: WorkflowRun, steps: Sequence[Step], done: Sequence[TurnRecord], folder: Path, console: Console
) -> WorkflowTranscript:
    """Take the steps and save the transcript after each; one line of progress a turn."""
    transcript = workflow.transcript(done)
    write_transcript(transcript, folder)
    for number, step in enumerate(steps, 1):
        with console.status(f"{step}: {number} of {len(steps)}"):
            record = workflow.take(step)
        transcript = transcript.with_turn(record)
        write_transcript(transcript, folder)
        say(console, progress_line(record))
    return transcript


def say(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no colours by content, no breaks."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_line(record: TurnRecord) -> str:
    return (
        f"{record.phase}.{record.turn} {record.speaker:<10} {record.cache_state:<4} "
        f"{record.prompt_tokens:>6} tokens, {record.computed_tokens:>5} computed, "
        f"first token {record.ttft_ms:7.0f} ms, all {record.total_ms:7.0f} ms"
    )


def turn_table(transcript: WorkflowTranscript) -> Table:
    """One line a turn: what was in the cache, what had to be computed, what it took."""
    table = Table(title=transcript.title)
    for heading in ("phase", "speaker", "match", "cache"):
        table.add_column(heading, no_wrap=True)
    for heading in ("context", "cached", "computed", "first token ms", "total ms", "written"):
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
        )
    return table


def kilobytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1000:.0f} kB"

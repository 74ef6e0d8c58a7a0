"""`agentcache launch`."""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from agentcache.cli.client_settings import Change, UnreadableSettings, Value, put_in, take_out, write
from agentcache.cli.coding_agents import PROGRAMS, CodingAgent, Program, Served, folder_session
from agentcache.cli.connection import ApiKey, ApiKeyFile, Url, find_server
from agentcache.cli.doctor_server import root_of
from agentcache.client import Client
from agentcache.errors import AgentCacheError, ConfigError, StoreError
from agentcache.settings.sources import default_config_file


class NoServer(AgentCacheError):
    """No agentcache server was found."""


class NoProgram(AgentCacheError):
    """The agent cannot be started."""


def launch(
    agent: Annotated[CodingAgent, typer.Argument(help="The coding agent.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: arguments of the coding agent.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Then start it in this folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Revert the changes.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Put the running server into a coding agent's settings; other settings stay. `--undo` reverts it.

    `--start` starts the agent, with variables if it needs them.
    """
    if arguments and not start:
        raise ConfigError("arguments for the agent need --start")
    if start and (dry_run or undo):
        raise ConfigError("--start goes with neither --dry-run nor --undo")
    program, note_file = PROGRAMS[agent], _note_file(agent)
    note = _read_note(note_file)
    if undo:
        if note is None:
            typer.echo(f"nothing to undo for {agent}")
            return
        change = take_out(note)
        _do(change, note_file, dry_run=dry_run)
        for name in change.kept:
            typer.echo(f"{name} was changed since, and stays", err=True)
        return
    served, key = _served(agent, url, api_key, api_key_file)
    if program.file is not None:
        _do(_put_in(program.file(), program.values(served), note, dry_run=dry_run), note_file, dry_run=dry_run)
    if start:
        _start(program, served, key, arguments or [])
    command = shlex.join(_command(program, served))
    variables = [f"{name}={shlex.quote(value)}" for name, value in program.environment(served).items()]
    typer.echo(f"{'then' if dry_run else 'now'}: {' '.join([*variables, command])}", err=True)
    if served.has_key:
        typer.echo(f"with the server's key in {program.key}", err=True)


def _note_file(agent: CodingAgent) -> Path:
    is_per_folder = PROGRAMS[agent].is_per_folder
    name = f"{folder_session(agent, Path.cwd())}.note" if is_per_folder else str(agent)
    return default_config_file().parent / "launch" / f"{name}.json"


def _served(
    agent: CodingAgent, url: str | None, api_key: str | None, api_key_file: Path | None
) -> tuple[Served, str | None]:
    config, found = find_server(url, api_key, None, None, api_key_file)
    if found is None:
        raise NoServer("no server runs on the configured port: start one with agentcache serve, or name it with --url")
    root, session = root_of(found), folder_session(agent, Path.cwd())
    with Client(root, config.api_key) as client:
        try:
            [model] = [each for each in client.request("GET", "/v1/models")["data"] if "parent" not in each]
            name, context = str(model["id"]), int(model["max_model_len"])
        except (ValueError, LookupError, TypeError) as error:
            raise NoServer(f"{root} is no agentcache server: it does not list one model and its context") from error
    return Served(root, name, context, config.api_key is not None, session), config.api_key


def _command(program: Program, served: Served) -> list[str]:
    file = "" if program.file is None else str(program.file())
    return [part.format(model=served.model, file=file) for part in program.command]


def _start(program: Program, served: Served, key: str | None, arguments: Sequence[str]) -> NoReturn:
    command = [*_command(program, served), *arguments]
    variables = program.environment(served) | ({program.key: key} if key is not None else {})
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        raise NoProgram(f"{command[0]} cannot be started: {error.strerror}; is it installed?") from error


def _put_in(file: Path, values: list[Value], note: dict[str, Any] | None, *, dry_run: bool) -> Change:
    try:
        return put_in(file, values, note)
    except UnreadableSettings as error:
        typer.echo(f"error: {error}", err=True)
        typer.echo(f"add this to it: {json.dumps({'.'.join(v.path): v.value for v in values}, indent=1)}", err=True)
        if dry_run:
            raise typer.Exit(1) from error
        spare = file.with_name(f"{file.name}.bak")
        typer.confirm(f"Move it to {spare.name} and begin a new one?", abort=True, err=True)
        if spare.exists() or spare.is_symlink():
            raise StoreError(f"there is {spare} already") from error
        file.rename(spare)
        return put_in(file, values, None)


def _do(change: Change, note_file: Path, *, dry_run: bool) -> None:
    typer.echo(_difference(change), nl=False)
    if dry_run:
        return
    try:
        if change.note is not None:  # first, so that every change can be undone
            note_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # It may hold keys.
            write(Change(note_file, None, json.dumps(change.note, indent=1), None))
        if change.after != change.before:
            write(change)
        if change.note is None:
            note_file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{change.file} cannot be written: {error}") from error


def _difference(change: Change) -> str:
    before, after = ((text or "").splitlines(keepends=True) for text in (change.before, change.after))
    lines = difflib.unified_diff(before, after, str(change.file), str(change.file))
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines) or f"{change.file} stays as it is\n"


def _read_note(note_file: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(note_file.read_text(encoding="utf-8"))
        if not all(
            isinstance(entry["path"], list) and "value" in entry and isinstance(entry["tables"], int)
            for entry in note["set"]
        ):
            raise ValueError("it names no settings")
        return {"file": str(note["file"]), "existed": bool(note["existed"]), "set": note["set"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreError(f"{note_file} does not record a change: {error}") from error

"""`agentcache launch`: a coding agent's settings for the server that runs here."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache.cli.client_settings import Change, UnreadableSettings, Value, put_in, take_out, write
from agentcache.cli.connection import ApiKey, ApiKeyFile, Url, find_server
from agentcache.client import Client
from agentcache.config_sources import default_config_file
from agentcache.errors import AgentCacheError, StoreError

KEY_VARIABLE = "AGENTCACHE_API_KEY"
_OUTPUT_TOKENS = 4096


class CodingAgent(StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"
    OPENCODE = "opencode"
    PI = "pi"


class NoServer(AgentCacheError):
    """There is nothing to launch an agent with."""


@dataclass(frozen=True)
class Served:
    """The running server, as settings name it. The key itself is never written to a file.

    Args:
        has_key: whether clients must present one.
    """

    url: str
    model: str
    context: int
    has_key: bool

    @property
    def output(self) -> int:
        return min(_OUTPUT_TOKENS, self.context // 4)


@dataclass(frozen=True)
class Program:
    """A coding agent.

    Args:
        file: its settings, as its environment says.
        values: what they are for a server.
        start: how it is started then.
        key: how it is given the server's key, where it has one.
    """

    file: Callable[[], Path]
    values: Callable[[Served], list[Value]]
    start: str
    key: str = f"with the server's key in {KEY_VARIABLE}"


def _home(variable: str, *default: str) -> Path:
    named = os.environ.get(variable)
    return Path(named).expanduser() if named else Path.home().joinpath(*default)


def _claude(served: Served) -> list[Value]:
    values = {"ANTHROPIC_BASE_URL": served.url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    if not served.has_key:
        values["ANTHROPIC_AUTH_TOKEN"] = "none"
    return [Value(("env", name), value) for name, value in values.items()]


def _codex(served: Served) -> list[Value]:
    provider = {"name": "agentcache", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if served.has_key:
        provider["env_key"] = KEY_VARIABLE
    return [
        Value(("model",), served.model),
        Value(("model_provider",), "agentcache"),
        Value(("model_context_window",), served.context),
        *(Value(("model_providers", "agentcache", name), value) for name, value in provider.items()),
    ]


def _opencode(served: Served) -> list[Value]:
    key = {"apiKey": f"{{env:{KEY_VARIABLE}}}"} if served.has_key else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{served.url}/v1"} | key,
        "models": {served.model: {"limit": {"context": served.context, "output": served.output}}},
    }
    return [Value(("provider", "agentcache"), provider), Value(("model",), f"agentcache/{served.model}")]


def _pi(served: Served) -> list[Value]:
    provider = {
        "baseUrl": f"{served.url}/v1",
        "api": "openai-completions",
        "apiKey": KEY_VARIABLE if served.has_key else "none",
        "compat": {"sendSessionAffinityHeaders": True},
        "models": [{"id": served.model, "contextWindow": served.context, "maxTokens": served.output}],
    }
    return [Value(("providers", "agentcache"), provider)]


PROGRAMS = {
    CodingAgent.CLAUDE: Program(
        lambda: _home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
        _claude,
        "claude",
        key="with the server's key in ANTHROPIC_AUTH_TOKEN",
    ),
    CodingAgent.CODEX: Program(lambda: _home("CODEX_HOME", ".codex") / "config.toml", _codex, "codex"),
    CodingAgent.OPENCODE: Program(
        lambda: _home("XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json", _opencode, "opencode"
    ),
    CodingAgent.PI: Program(
        lambda: _home("PI_CODING_AGENT_DIR", ".pi", "agent") / "models.json", _pi, "pi --model agentcache/{model}"
    ),
}


def launch(
    agent: Annotated[CodingAgent, typer.Argument(help="The coding agent.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be changed.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take back what was changed.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Put the running server into a coding agent's settings, whose other settings stay. `--undo` takes it out again."""
    program, note_file = PROGRAMS[agent], default_config_file().parent / "launch" / f"{agent}.json"
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
    served = _served(url, api_key, api_key_file)
    _do(_put_in(program, served, note, dry_run=dry_run), note_file, dry_run=dry_run)
    typer.echo(f"{'then' if dry_run else 'now'}: {program.start.format(model=served.model)}", err=True)
    if served.has_key:
        typer.echo(program.key, err=True)


def _served(url: str | None, api_key: str | None, api_key_file: Path | None) -> Served:
    config, found = find_server(url, api_key, None, None, api_key_file)
    if found is None:
        raise NoServer("no server runs on the configured port: start one with agentcache serve, or name it with --url")
    with Client(found, config.api_key) as client:
        [model] = [each for each in client.request("GET", "/v1/models")["data"] if "parent" not in each]
    return Served(found.rstrip("/"), model["id"], model["max_model_len"], config.api_key is not None)


def _put_in(program: Program, served: Served, note: dict[str, Any] | None, *, dry_run: bool) -> Change:
    """The change; where the file cannot be parsed, and the user says so, a new file in its place."""
    file, values = program.file(), program.values(served)
    try:
        return put_in(file, values, note)
    except UnreadableSettings as error:
        typer.echo(f"error: {error}", err=True)
        typer.echo(f"put this into it: {json.dumps({'.'.join(v.path): v.value for v in values}, indent=1)}", err=True)
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
        if change.note is not None:  # first, so that whatever happens can be undone
            note_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note_file.write_text(json.dumps(change.note, indent=1), encoding="utf-8")
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
        raise StoreError(f"{note_file} does not say what was changed: {error}") from error

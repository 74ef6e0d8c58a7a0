"""`agentcache warm`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache.cli.connection import (
    ApiKey,
    ApiKeyFile,
    AsJson,
    CacheDir,
    Connection,
    Model,
    Url,
    agent_path,
    connect,
    progress,
)
from agentcache.client import ServerError
from agentcache.errors import ConfigError


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    RAW = "raw"


# By the server's error code.
INSTEAD = {
    (Role.SYSTEM, "refused_by_chat_template"): Role.USER,
    (Role.SYSTEM, "no_chat_template"): Role.RAW,
    (Role.USER, "no_chat_template"): Role.RAW,
}


def warm(
    agent: Annotated[str, typer.Argument(help="The agent; created if needed.")],
    prompt_file: Annotated[
        str | None, typer.Option(help="File of text that chats begin with; - for stdin. See --role.")
    ] = None,
    messages_file: Annotated[
        str | None,
        typer.Option(help='JSON file of chat messages, [{"role": …, "content": …}, …]; - for stdin.'),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(
            help="What the text of --prompt-file is: the system prompt (default), what the first user message begins "
            "with, or raw text for /v1/completions."
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter of a new agent.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Compute a prompt for an agent and keep its cache; generate nothing."""
    path, given = agent_path(agent, "warm"), read_given(prompt_file, messages_file, role)
    with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache:
        make_agent(cache, agent, adapter)
        with progress(f"warming {agent}"):
            if isinstance(given, str):
                report = warm_text(cache, path, given, role or Role.SYSTEM)
            else:
                report = cache.request("POST", path, {"messages": given})
    typer.echo(json.dumps(report) if as_json else describe(agent, report))
    if report["saved"] is False:
        raise ServerError(f"the cache of {agent} could not be saved: {report['save_error']}")


def read_given(prompt_file: str | None, messages_file: str | None, role: Role | None) -> str | list[Any]:
    if (prompt_file is None) == (messages_file is None):
        raise ConfigError("name either --prompt-file or --messages-file")
    if prompt_file is not None:
        return _read(prompt_file)
    assert messages_file is not None
    if role is not None:
        raise ConfigError("--role goes with --prompt-file: messages have roles of their own")
    try:
        messages = json.loads(_read(messages_file))
    except ValueError as error:
        raise ConfigError(f"{messages_file} is not JSON: {error}") from error
    found = messages["messages"] if isinstance(messages, dict) and "messages" in messages else messages
    if not isinstance(found, list):
        raise ConfigError(f"{messages_file} is not a list of messages")
    return found


def warm_text(cache: Connection, path: str, text: str, role: Role) -> Any:
    try:
        return cache.request("POST", path, body_of(text, role))
    except ServerError as error:
        instead = INSTEAD.get((role, error.code or ""))
        if instead is None:
            raise
        typer.echo(f"the model does not take it as {role}: warmed as {instead} instead ({error})", err=True)
    return warm_text(cache, path, text, instead)


def body_of(text: str, role: Role) -> dict[str, Any]:
    return {"prompt": text} if role is Role.RAW else {"messages": [{"role": role, "content": text}]}


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from error


def make_agent(cache: Connection, agent: str, adapter: str | None) -> None:
    try:
        cache.request("POST", "/v1/agents", {"id": agent} | ({"adapter": adapter} if adapter else {}))
    except ServerError as error:
        if error.status != 409:  # exists already
            raise


def describe(agent: str, report: dict[str, Any]) -> str:
    counts = f"{report['tokens']} tokens, {report['cached']} cached, {report['computed']} computed"
    return f"{agent}: {counts}, {report['ms']:.0f} ms, was {report['cache_state']}"

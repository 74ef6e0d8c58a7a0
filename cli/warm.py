"""`agentcache warm`: cache a prompt for an agent before anybody asks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache.cli.connection import ApiKey, AsJson, CacheDir, Connection, Model, Url, agent_path, connect, progress
from agentcache.client import ServerError
from agentcache.errors import ConfigError


def warm(
    agent: Annotated[str, typer.Argument(help="The agent; made if it is not there.")],
    prompt_file: Annotated[str | None, typer.Option(help="File of raw text; - for stdin.")] = None,
    messages_file: Annotated[str | None, typer.Option(help="JSON file of chat messages; - for stdin.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter of the agent, if it is made now.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Compute a prompt for an agent and keep its cache; generate nothing."""
    path, body = agent_path(agent, "warm"), read_body(prompt_file, messages_file)
    with connect(url, api_key, model, cache_dir) as cache:
        make_agent(cache, agent, adapter)
        with progress(f"warming {agent}"):
            report = cache.request("POST", path, body)
    typer.echo(json.dumps(report) if as_json else describe(agent, report))
    if report["saved"] is False:
        raise ServerError(f"the cache of {agent} could not be saved: {report['save_error']}")


def read_body(prompt_file: str | None, messages_file: str | None) -> dict[str, Any]:
    """What to warm the agent with.

    Raises:
        ConfigError: not exactly one file is named, or it cannot be read.
    """
    if (prompt_file is None) == (messages_file is None):
        raise ConfigError("name either --prompt-file or --messages-file")
    if prompt_file is not None:
        return {"prompt": _read(prompt_file)}
    assert messages_file is not None
    try:
        messages = json.loads(_read(messages_file))
    except ValueError as error:
        raise ConfigError(f"{messages_file} is not JSON: {error}") from error
    return {"messages": messages["messages"] if isinstance(messages, dict) and "messages" in messages else messages}


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
        if error.status != 409:  # it is there
            raise


def describe(agent: str, report: dict[str, Any]) -> str:
    counts = f"{report['tokens']} tokens, {report['cached']} cached, {report['computed']} computed"
    return f"{agent}: {counts}, {report['ms']:.0f} ms, was {report['cache_state']}"

"""`agentcache agents`: list, show, fork and delete agents."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from agentcache.cli.connection import ApiKey, AsJson, CacheDir, Model, Url, agent_path, connect

agents = typer.Typer(
    help="List, show, fork and delete agents.", invoke_without_command=True, add_completion=False, rich_markup_mode=None
)

Agent = Annotated[str, typer.Argument(help="The agent.")]
HEADINGS = ("agent", "state", "tokens", "blocks", "RAM MB", "disk MB", "last used")


@agents.callback()
def default(context: typer.Context) -> None:
    """List, show, fork and delete agents. Alone it lists."""
    if context.invoked_subcommand is None:
        list_agents()


@agents.command("list")
def list_agents(
    url: Url = None, api_key: ApiKey = None, model: Model = None, cache_dir: CacheDir = None, as_json: AsJson = False
) -> None:
    """List all agents."""
    with connect(url, api_key, model, cache_dir) as cache:
        found = cache.request("GET", "/v1/agents")["data"]
    typer.echo(json.dumps(found) if as_json else table(found))


@agents.command("show")
def show_agent(
    agent: Agent,
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Show one agent."""
    with connect(url, api_key, model, cache_dir) as cache:
        found = cache.request("GET", agent_path(agent))
    typer.echo(json.dumps(found) if as_json else table([found]))


@agents.command("fork")
def fork_agent(
    agent: Agent,
    new_id: Annotated[str, typer.Argument(help="The copy's name.")],
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy an agent under a new name; the copy shares its blocks."""
    with connect(url, api_key, model, cache_dir) as cache:
        made = cache.request("POST", agent_path(agent, "fork"), {"id": new_id})
    typer.echo(json.dumps(made) if as_json else table([made]))


@agents.command("delete")
def delete_agent(
    agent: Agent,
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete an agent and its memory."""
    with connect(url, api_key, model, cache_dir) as cache:
        answer = cache.request("DELETE", agent_path(agent))
    typer.echo(json.dumps(answer) if as_json else f"{agent}: deleted")


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Aligned columns, one line an agent."""
    if not found:
        return "no agents"
    lines = [HEADINGS, *(row(agent) for agent in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def row(agent: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        agent["id"],
        agent["cache_state"],
        str(agent["tokens"]),
        str(agent["blocks"]),
        f"{agent['ram_bytes'] / 1e6:.1f}",
        f"{agent['disk_bytes'] / 1e6:.1f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(agent["last_used"])),
    )

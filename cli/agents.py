"""`agentcache agents`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from agentcache.cli.connection import ApiKey, ApiKeyFile, AsJson, CacheDir, Connection, Model, Url, agent_path, connect
from agentcache.errors import ConfigError

HEADINGS = ("agent", "state", "tokens", "blocks", "RAM MB", "disk MB", "last used")


class Action(StrEnum):
    LIST = "list"
    SHOW = "show"
    FORK = "fork"
    DELETE = "delete"


# Arguments after each action.
OPERANDS = {Action.LIST: (), Action.SHOW: ("AGENT",), Action.FORK: ("AGENT", "NEW_ID"), Action.DELETE: ("AGENT",)}


def agents(
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.LIST,
    names: Annotated[list[str] | None, typer.Argument(help="AGENT; for fork also the copy's id.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    lineage: Annotated[str | None, typer.Option(help="Fork or delete only this conversation of the agent.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter of the fork; else that of the agent.")] = None,
    policy: Annotated[str | None, typer.Option(help="How the fork shares; else as the agent does.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all agents; show, fork or delete one. A fork shares its blocks with the agent it was made from."""
    check_operands(action, names or [])
    if lineage is not None and action not in (Action.FORK, Action.DELETE):
        raise ConfigError("--lineage goes with fork and delete")
    if (adapter is not None or policy is not None) and action is not Action.FORK:
        raise ConfigError("--adapter and --policy go with fork")
    settings = {name: value for name, value in (("adapter", adapter), ("policy", policy)) if value is not None}
    with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache:
        answer = ask(cache, action, *(names or []), lineage=lineage, settings=settings)
    typer.echo(json.dumps(answer) if as_json else describe(action, answer))


def check_operands(action: Action, names: Sequence[str]) -> None:
    operands = OPERANDS[action]
    if len(names) != len(operands):
        raise ConfigError(f"it is called like this: agentcache agents {' '.join([action, *operands])}")


def ask(
    cache: Connection,
    action: Action,
    agent: str = "",
    new_id: str = "",
    *,
    lineage: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> Any:
    """Send the request; `settings` override the agent's in a fork."""
    named = {} if lineage is None else {"lineage": lineage}
    if action is Action.LIST:
        return cache.request("GET", "/v1/agents")["data"]
    if action is Action.FORK:
        return cache.request("POST", agent_path(agent, "fork"), {"id": new_id, **named, **(settings or {})})
    if action is Action.DELETE:
        return cache.request("DELETE", agent_path(agent) + (f"?{urlencode(named)}" if named else ""))
    return cache.request("GET", agent_path(agent))


def describe(action: Action, answer: Any) -> str:
    if action is Action.DELETE:
        return f"{answer['id']}: deleted" + (f" (lineage {answer['lineage']})" if "lineage" in answer else "")
    if action is Action.LIST:
        return table(answer) + "".join(map(reason_of, answer))
    return table([answer]) + "".join(map(line_of, answer["lineages"]))


def line_of(lineage: Mapping[str, Any]) -> str:
    return f"\n  lineage {lineage['id']}: {lineage['tokens']} tokens, last used {when(lineage['last_used'])}"


def reason_of(agent: Mapping[str, Any]) -> str:
    return f"\n  {agent['id']}: {agent['unavailable']}" if agent.get("unavailable") else ""


def table(found: Sequence[Mapping[str, Any]]) -> str:
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
        when(agent["last_used"]),
    )


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

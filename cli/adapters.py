"""`agentcache adapters`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from agentcache.cli.connection import ApiKey, ApiKeyFile, AsJson, Connection, Url, as_table, check_operands, connect
from agentcache.settings.tables import parse_adapters

HEADINGS = ("adapter", "policy", "format", "rank", "MB", "running", "folder")


class Action(StrEnum):
    LIST = "list"
    LOAD = "load"
    UNLOAD = "unload"


WITHOUT_SERVER = "no server is running; name adapters to `agentcache serve --adapter`, or in the config file"

OPERANDS = {Action.LIST: (), Action.LOAD: ("NAME=PATH[:POLICY]",), Action.UNLOAD: ("NAME",)}


def adapters(
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.LIST,
    names: Annotated[list[str] | None, typer.Argument(help="NAME=PATH[:POLICY] for load, NAME for unload.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List the adapters of a server; load one from a folder on its machine, or unload one."""
    check_operands("adapters", action, OPERANDS[action], names or [])
    without_server = None if action is Action.LIST else WITHOUT_SERVER
    with connect(url, api_key, api_key_file=api_key_file, without_server=without_server) as server:
        answer = _ask(server, action, *(names or []))
    typer.echo(json.dumps(answer) if as_json else _describe(action, answer))


def _ask(server: Connection, action: Action, operand: str = "") -> Any:
    if action is Action.LIST:
        return server.request("GET", "/v1/adapters")["data"]
    if action is Action.UNLOAD:
        return server.request("DELETE", f"/v1/adapters/{quote(operand, safe='')}")
    [folder] = parse_adapters([operand])
    path = str(Path(folder.path).expanduser().absolute())
    return server.request("POST", "/v1/adapters", {"name": folder.name, "path": path, "policy": folder.policy})


def _describe(action: Action, answer: Any) -> str:
    if action is Action.UNLOAD:
        return f"{answer['name']}: unloaded"
    rows = [_row(adapter) for adapter in (answer if action is Action.LIST else [answer])]
    return as_table(HEADINGS, rows) if rows else "no adapters"


def _row(adapter: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        adapter["name"],
        adapter["policy"],
        adapter["format"],
        str(adapter["max_rank"] or ""),
        f"{adapter['ram_bytes'] / 1e6:.1f}",
        str(adapter["running"]),
        adapter["path"],
    )

"""`agentcache restore`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agentcache.cli.connection import (
    ApiKey,
    ApiKeyFile,
    AsJson,
    CacheDir,
    InProcess,
    Model,
    Url,
    agent_path,
    connect,
    progress,
)


def restore(
    agent: Annotated[str, typer.Argument(help="The agent.")],
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    lineage: Annotated[str | None, typer.Option(help="Only this conversation of the agent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read an agent's cache from disk into RAM, verifying every block. Without a server this checks the files."""
    with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache, progress(f"restoring {agent}"):
        report = cache.request("POST", agent_path(agent, "restore"), {} if lineage is None else {"lineage": lineage})
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(describe(agent, report))
    if isinstance(cache, InProcess):
        typer.echo(f"no server runs: it was verified in {cache.cache_dir}, and is gone from RAM with this command")


def describe(agent: str, report: dict[str, Any]) -> str:
    size = f"{report['restored_bytes']:,} bytes in {report['restore_ms']:.0f} ms"
    return f"{agent}: {report['tokens']} tokens, {size}, {report['cache_state']}"

"""`agentcache restore`: bring an agent's cache from disk into RAM."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentcache.cli.connection import ApiKey, AsJson, CacheDir, Model, Url, agent_path, connect, progress


def restore(
    agent: Annotated[str, typer.Argument(help="The agent.")],
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Read an agent's cache from disk into RAM, verifying every block. Without a server this checks the files."""
    with connect(url, api_key, model, cache_dir) as cache, progress(f"restoring {agent}"):
        report = cache.request("POST", agent_path(agent, "restore"))
    if as_json:
        typer.echo(json.dumps(report))
        return
    size = f"{report['restored_bytes'] / 1e6:.1f} MB in {report['restore_ms']:.0f} ms"
    typer.echo(f"{agent}: {report['tokens']} tokens, {size}, {report['cache_state']}")

"""`agentcache import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentcache.cli.connection import (
    ApiKey,
    ApiKeyFile,
    AsJson,
    CacheDir,
    Model,
    Url,
    agent_path,
    connect,
    progress,
)


def import_(
    file: Annotated[Path, typer.Argument(help="The file; a server that runs elsewhere looks for it there.")],
    name: Annotated[str | None, typer.Option("--as", help="What the agent is to be called here.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring an agent in from a file. All of it is verified first; what is damaged or of another model is refused."""
    from agentcache.store.archive import ArchiveFile

    path = file.expanduser().absolute()
    agent = name or ArchiveFile(path).agent
    with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache, progress(f"importing {agent}"):
        imported = cache.request("POST", agent_path(agent, "import"), {"path": str(path)})
    if as_json:
        typer.echo(json.dumps(imported))
        return
    size = f"{imported['tokens']} tokens, {imported['disk_bytes']:,} bytes of cache"
    typer.echo(f"{agent}: {size}, {imported['cache_state']}")

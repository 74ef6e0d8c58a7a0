"""`agentcache purge`."""

from __future__ import annotations

import json
import shutil
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
    running_server,
)
from agentcache.client import Client
from agentcache.errors import ConfigError, StoreError
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from agentcache.system.durable import sync_path

FOLDERS = ("agents", "blocks", "quarantine")


def purge(
    agent: Annotated[str | None, typer.Option(help="Forget this agent.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget all agents and all cached blocks.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete memory for good. Without a server, --all empties the folder for all models and loads none."""
    if (agent is None) != everything:
        raise ConfigError("name either --agent ID or --all")
    if not yes:
        typer.confirm(f"Delete {agent or 'all agents and all cached blocks'} for good?", abort=True, err=True)
    if agent is not None:
        with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache:
            answer = cache.request("DELETE", agent_path(agent))
    else:
        config = load_config({"api_key": api_key, "api_key_file": api_key_file, "cache_dir": cache_dir})
        answer = purge_all(url, config, own=cache_dir is not None)
    typer.echo(json.dumps(answer) if as_json else describe(answer))


def describe(answer: dict[str, Any]) -> str:
    kept = answer.get("unavailable_agents", {})
    return "\n".join(["deleted", *(f"not deleted: {agent}: {reason}" for agent, reason in kept.items())])


def purge_all(url: str | None, config: Config, *, own: bool) -> dict[str, Any]:
    """Purge a server, or the folder if no server runs or the user named one (`own`)."""
    found = url or (None if own else running_server(config))
    if found is None:
        return {"deleted_bytes": empty_folder(config.cache_dir)}
    with Client(found, config.api_key) as client:
        return purge_server(client)


def purge_server(server: Connection) -> dict[str, Any]:
    """Delete all agents but those with unreadable files, which the answer names."""
    found = server.request("GET", "/v1/agents")["data"]
    kept = {agent["id"]: agent["unavailable"] for agent in found if agent.get("unavailable")}
    agents = [agent["id"] for agent in found if agent["id"] not in kept]
    for agent in agents:
        server.request("DELETE", agent_path(agent))
    server.request("DELETE", "/v1/cache")
    return {"deleted_agents": agents, **({"unavailable_agents": kept} if kept else {})}


def empty_folder(cache_dir: Path) -> int:
    """Empty a cache folder, for all models; return the bytes freed. A folder without a lock file stays.

    Raises:
        CacheFolderInUse: a process uses it.
        StoreError: deletion failed.
    """
    from agentcache.store.cache_files import CacheFiles
    from agentcache.store.lock import FolderLock

    if not (cache_dir / "lock").is_file():
        return 0
    lock = FolderLock(CacheFiles(cache_dir.resolve()))
    try:
        freed = sum(_remove(cache_dir / name) for name in FOLDERS)
        sync_path(cache_dir)
        return freed
    except OSError as error:
        raise StoreError(f"cannot empty {cache_dir}: {error}") from error
    finally:
        lock.release()


def _remove(folder: Path) -> int:
    if not folder.exists():
        return 0
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return size

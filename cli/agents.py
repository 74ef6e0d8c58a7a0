"""`agentcache agents`, `restore`, `export`, `import` and `purge`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from agentcache.cli.connection import (
    ApiKey,
    ApiKeyFile,
    AsJson,
    CacheDir,
    Connection,
    InProcess,
    Model,
    Url,
    agent_path,
    as_table,
    check_operands,
    connect,
    progress,
    running_server,
)
from agentcache.client import Client
from agentcache.errors import ConfigError, StoreError
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config
from agentcache.system.durable import sync_path

HEADINGS = ("agent", "state", "tokens", "blocks", "RAM MB", "disk MB", "last used")
FOLDERS = ("agents", "blocks", "quarantine")  # emptied by `purge --all`


class Action(StrEnum):
    LIST = "list"
    SHOW = "show"
    FORK = "fork"
    DELETE = "delete"


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
    adapter: Annotated[str | None, typer.Option(help="Adapter of the fork; default: the agent's.")] = None,
    policy: Annotated[str | None, typer.Option(help="Sharing policy of the fork; default: the agent's.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all agents; show, fork or delete one. A fork shares its blocks with the agent it was made from."""
    check_operands("agents", action, OPERANDS[action], names or [])
    if lineage is not None and action not in (Action.FORK, Action.DELETE):
        raise ConfigError("--lineage goes with fork and delete")
    if (adapter is not None or policy is not None) and action is not Action.FORK:
        raise ConfigError("--adapter and --policy go with fork")
    settings = {name: value for name, value in (("adapter", adapter), ("policy", policy)) if value is not None}
    with connect(url, api_key, model, cache_dir, api_key_file=api_key_file) as cache:
        answer = _ask(cache, action, *(names or []), lineage=lineage, settings=settings)
    typer.echo(json.dumps(answer) if as_json else _describe(action, answer))


def _ask(
    cache: Connection,
    action: Action,
    agent: str = "",
    new_id: str = "",
    *,
    lineage: str | None,
    settings: Mapping[str, str],
) -> Any:
    named = {} if lineage is None else {"lineage": lineage}
    if action is Action.LIST:
        return cache.request("GET", "/v1/agents")["data"]
    if action is Action.FORK:
        return cache.request("POST", agent_path(agent, "fork"), {"id": new_id, **named, **settings})
    if action is Action.DELETE:
        return cache.request("DELETE", agent_path(agent) + (f"?{urlencode(named)}" if named else ""))
    return cache.request("GET", agent_path(agent))


def _describe(action: Action, answer: Any) -> str:
    if action is Action.DELETE:
        return f"{answer['id']}: deleted" + (f" (lineage {answer['lineage']})" if "lineage" in answer else "")
    if action is Action.LIST:
        unavailable = [agent for agent in answer if agent.get("unavailable")]
        return _table(answer) + "".join(f"\n  {agent['id']}: {agent['unavailable']}" for agent in unavailable)
    return _table([answer]) + "".join(
        f"\n  lineage {lineage['id']}: {lineage['tokens']} tokens, last used {_when(lineage['last_used'])}"
        for lineage in answer["lineages"]
    )


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    return as_table(HEADINGS, [_row(agent) for agent in found]) if found else "no agents"


def _row(agent: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        agent["id"],
        agent["cache_state"],
        str(agent["tokens"]),
        str(agent["blocks"]),
        f"{agent['ram_bytes'] / 1e6:.1f}",
        f"{agent['disk_bytes'] / 1e6:.1f}",
        _when(agent["last_used"]),
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


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
    size = f"{report['restored_bytes']:,} bytes in {report['restore_ms']:.0f} ms"
    typer.echo(f"{agent}: {report['tokens']} tokens, {size}, {report['cache_state']}")
    if isinstance(cache, InProcess):
        typer.echo(f"no server runs: it was verified in {cache.cache_dir}, and is gone from RAM with this command")


def export(
    agent: Annotated[str, typer.Argument(help="The agent.")],
    file: Annotated[Path, typer.Argument(help="The new file to write.")],
    cache_dir: CacheDir = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Fingerprint of the model, if agents of several have that name.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks of the agent, if several have that name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write all that an agent remembers to one file, for another machine with the same model.

    Reads the cache folder, also while a server uses it: all answered turns are there. If several ranks share the
    model, their folders must be side by side: rank-0-of-2, rank-1-of-2.
    """
    from agentcache.ranks.folders import folders_of_agent
    from agentcache.store.archive import export_agent

    own, *others = folders_of_agent(load_config({"cache_dir": cache_dir}).cache_dir, agent, ranks)
    exported = export_agent(own, agent, file, fingerprint=fingerprint, others=others)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(exported)))
        return
    what = f"{exported.lineages} conversation{'s' if exported.lineages > 1 else ''}, {exported.tokens} tokens"
    typer.echo(f"{agent}: {what}, {exported.num_bytes:,} bytes in {file}")
    if exported.missing_blocks:
        typer.echo(f"{exported.missing_blocks} of its blocks were not on disk any more; they will be computed again")


def import_(
    file: Annotated[Path, typer.Argument(help="The file, on the server's machine.")],
    name: Annotated[str | None, typer.Option("--as", help="The agent's name here.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    model: Model = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring an agent in from a file. All of it is verified first; damage and other models are refused."""
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
        answer = _purge_all(url, config, own=cache_dir is not None)
    typer.echo(json.dumps(answer) if as_json else describe_purge(answer))


def describe_purge(answer: dict[str, Any]) -> str:
    kept = answer.get("unavailable_agents", {})
    return "\n".join(["deleted", *(f"not deleted: {agent}: {reason}" for agent, reason in kept.items())])


def _purge_all(url: str | None, config: Config, *, own: bool) -> dict[str, Any]:
    found = url or (None if own else running_server(config))
    if found is None:
        return {"deleted_bytes": _empty_folder(config.cache_dir)}
    with Client(found, config.api_key) as client:
        return purge_server(client)


def purge_server(server: Connection) -> dict[str, Any]:
    """Delete all agents except those with unreadable files, which the answer names."""
    found = server.request("GET", "/v1/agents")["data"]
    kept = {agent["id"]: agent["unavailable"] for agent in found if agent.get("unavailable")}
    agents = [agent["id"] for agent in found if agent["id"] not in kept]
    for agent in agents:
        server.request("DELETE", agent_path(agent))
    server.request("DELETE", "/v1/cache")
    return {"deleted_agents": agents, **({"unavailable_agents": kept} if kept else {})}


def _empty_folder(cache_dir: Path) -> int:
    """Return the bytes freed. A folder without a lock file stays."""
    from agentcache.store.cache_files import CacheFiles
    from agentcache.store.writing import FolderLock

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

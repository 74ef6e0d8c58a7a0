"""`agentcache export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from agentcache.cli.connection import AsJson, CacheDir
from agentcache.settings.sources import load_config


def export(
    agent: Annotated[str, typer.Argument(help="The agent.")],
    file: Annotated[Path, typer.Argument(help="The file to write; there must be none.")],
    cache_dir: CacheDir = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Of the model, where agents of several have that name.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Of how many ranks the agent is, where there are several of that name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write all that an agent remembers to one file, for another machine with the same model.

    It is read from the cache folder, beside a running server too: every turn that was answered is there. Where several
    ranks share the model, their folders have to be side by side: rank-0-of-2, rank-1-of-2.
    """
    from agentcache.ranks.agent_folders import folders_of_agent
    from agentcache.store.export import export_agent

    own, *others = folders_of_agent(load_config({"cache_dir": cache_dir}).cache_dir, agent, ranks)
    exported = export_agent(own, agent, file, fingerprint=fingerprint, others=others)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(exported)))
        return
    what = f"{exported.lineages} conversation{'s' if exported.lineages > 1 else ''}, {exported.tokens} tokens"
    typer.echo(f"{agent}: {what}, {exported.num_bytes:,} bytes in {file}")
    if exported.missing_blocks:
        typer.echo(f"{exported.missing_blocks} of its blocks were not on disk any more; they will be computed again")

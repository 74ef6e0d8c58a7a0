"""Where an agent is in a cache folder: of one process, or of the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentcache.errors import Conflict, NotFound
from agentcache.ranks.rank import rank_folder, rank_folders
from agentcache.store.export import manifests_of


def folders_of_agent(cache_dir: Path, agent_id: str, size: int | None = None) -> list[Path]:
    """The folders with the agent's blocks: the cache folder itself, or each rank's, by rank.

    Args:
        size: how many ranks there were, 1 for a process that was alone; None for however many.

    Raises:
        NotFound: there is no such agent, or another rank's folder is not on this machine.
        Conflict: worlds of several sizes have an agent of that name.
    """
    worlds = [each for each in _worlds(cache_dir) if size in (None, len(each)) and manifests_of(each[0], agent_id)]
    if not worlds:
        raise NotFound(f"there is no agent {agent_id!r:.80} in {cache_dir}", param="agent", code="agent_not_found")
    if len(worlds) > 1:
        sizes = " and of ".join(str(len(folders)) for folders in worlds)
        raise Conflict(f"there are agents {agent_id} of {sizes} ranks: say of how many", param="ranks")
    absent = [str(folder) for folder in worlds[0] if not folder.is_dir()]
    if absent:
        raise NotFound(f"the keys and values of other ranks are not here: bring {', '.join(absent)}", param="cache_dir")
    return worlds[0]


def _worlds(cache_dir: Path) -> Iterator[list[Path]]:
    """The folders of each world, whether or not all are on this machine."""
    yield [cache_dir]
    for size in sorted({int(folder.name.rpartition("-")[2]) for folder in rank_folders(cache_dir)} - {0, 1}):
        yield [rank_folder(cache_dir, rank, size) for rank in range(size)]

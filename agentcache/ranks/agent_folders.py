from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentcache.errors import Conflict, NotFound
from agentcache.ranks.rank import rank_folder, rank_folders
from agentcache.store.export import manifests_of


def folders_of_agent(cache_dir: Path, agent_id: str, size: int | None = None) -> list[Path]:
    """Return the folders with the agent's blocks: the cache folder itself, or each rank's.

    Args:
        size: number of ranks, 1 for a single process; None for any.

    Raises:
        NotFound: the agent, or another rank's folder, is not here.
        Conflict: agents of this name exist for several numbers of ranks.
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
    yield [cache_dir]
    for size in sorted({int(folder.name.rpartition("-")[2]) for folder in rank_folders(cache_dir)} - {0, 1}):
        yield [rank_folder(cache_dir, rank, size) for rank in range(size)]

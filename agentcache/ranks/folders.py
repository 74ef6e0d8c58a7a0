"""The folders of ranks in a cache folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from agentcache.errors import Conflict, NotFound

RANK_FOLDER = re.compile(r"rank-\d+-of-\d+")


def own_rank() -> int | None:
    """The rank in `MLX_RANK`, set by `mlx.launch`; None for a single process."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdigit() else None


def rank_folder(cache_dir: Path, rank: int, size: int) -> Path:
    """The folder of a rank's blocks; rank 0's also has the agents."""
    return cache_dir / f"rank-{rank}-of-{size}"


def rank_folders(cache_dir: Path) -> list[Path]:
    if not cache_dir.is_dir():
        return []
    return sorted(path for path in cache_dir.iterdir() if path.is_dir() and RANK_FOLDER.fullmatch(path.name))


def folders_of_agent(cache_dir: Path, agent_id: str, size: int | None = None) -> list[Path]:
    """The folders with the agent's blocks, of `size` ranks: the cache folder itself, or each rank's.

    Raises NotFound, also for a rank's folder, or Conflict if several numbers of ranks have such an agent.
    """
    from agentcache.store.archive import manifests_of  # not for every command: it imports numpy

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

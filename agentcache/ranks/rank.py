"""Which of several ranks this process is, and where each keeps its blocks."""

from __future__ import annotations

import os
import re
from pathlib import Path

RANK_FOLDER = re.compile(r"rank-\d+-of-\d+")


def own_rank() -> int | None:
    """As `mlx.launch` has said by `MLX_RANK`; None for a process that is alone."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdigit() else None


def rank_folder(cache_dir: Path, rank: int, size: int) -> Path:
    """Where a rank keeps its blocks, and rank 0 the agents, in a world of `size`."""
    return cache_dir / f"rank-{rank}-of-{size}"


def rank_folders(cache_dir: Path) -> list[Path]:
    """Those that there are in a cache folder."""
    if not cache_dir.is_dir():
        return []
    return sorted(path for path in cache_dir.iterdir() if path.is_dir() and RANK_FOLDER.fullmatch(path.name))

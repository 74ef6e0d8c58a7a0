from __future__ import annotations

import os
import re
from pathlib import Path

RANK_FOLDER = re.compile(r"rank-\d+-of-\d+")


def own_rank() -> int | None:
    """The rank in `MLX_RANK`, set by `mlx.launch`; None for a single process."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdigit() else None


def rank_folder(cache_dir: Path, rank: int, size: int) -> Path:
    """The folder of a rank's blocks; rank 0's also has the agents."""
    return cache_dir / f"rank-{rank}-of-{size}"


def rank_folders(cache_dir: Path) -> list[Path]:
    """Existing rank folders in a cache folder."""
    if not cache_dir.is_dir():
        return []
    return sorted(path for path in cache_dir.iterdir() if path.is_dir() and RANK_FOLDER.fullmatch(path.name))

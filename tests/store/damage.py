"""Ways to damage a file of the cache folder, and where to find one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agentcache.store.store import BlockWrite
from tests.store.store_cases import MODEL


def block_file(cache_dir: Path, block: BlockWrite) -> Path:
    key = block.header.block_key
    return cache_dir / "blocks" / key[:2] / f"{key}.safetensors"


def agents_folder(cache_dir: Path) -> Path:
    return cache_dir / "agents" / MODEL[:16]


def quarantined(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "quarantine").iterdir())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def grow_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def replace_by_link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: list[Callable[[Path], None]] = [
    truncate,
    empty,
    flip,
    extend,
    grow_huge,
    replace_by_link,
    replace_by_fifo,
    replace_by_folder,
]

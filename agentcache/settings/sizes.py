"""Parse sizes such as `8GB`, `20%` and `auto` into bytes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentcache.errors import BrokenInvariant, ConfigError, StoreError
from agentcache.settings.memory_plan import NO_WIRED_LIMIT
from agentcache.system.memory import SystemMemory

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def total_ram() -> int:
    return SystemMemory().total()


@dataclass(frozen=True)
class DiskRoom:
    """A cache folder's disk, in bytes; `held` by the folder's own files."""

    size: int
    free: int
    held: int


def disk_room(cache_dir: Path) -> DiskRoom:
    """The disk of a cache folder, which need not exist yet. Raises StoreError."""
    nearest = cache_dir
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        usage = shutil.disk_usage(nearest)
        return DiskRoom(usage.total, usage.free, _held_bytes(cache_dir))
    except OSError as error:
        raise StoreError(f"cannot use the cache folder {cache_dir}: {error.strerror}") from error


def _held_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # evicted by a running server
                continue
    return total


def parse_size(text: str | int, *, key: str, whole: Callable[[], int], auto: Callable[[], int]) -> int:
    """Parse a size; `whole` and `auto` return the bytes of 100% and `auto`."""
    written = str(text).strip()
    if written.lower() == "auto":
        return auto()
    if percent := _PERCENT.fullmatch(written):
        share = float(percent[1])
        if share > 100:
            raise ConfigError(f"{key} = {text!r}: a percentage cannot be over 100")
        return int(whole() * share / 100)
    return parse_bytes(written, key=key)


def parse_bytes(text: str | int, *, key: str) -> int:
    """Parse a size without percentages and `auto`. GB is 10^9 bytes, GiB is 2^30."""
    size = _SIZE.fullmatch(str(text).strip())
    if size is None:
        raise ConfigError(f"{key} = {text!r} is not a size; write it like 8GB, 512MB, 20%, auto or in bytes")
    unit = (size[2] or "").lower()
    return int(float(size[1]) * (_UNITS | _BINARY_UNITS)[unit]) if unit or "." in size[1] else int(size[1])


def parse_share_of_ram(text: str | int, *, key: str) -> int | None:
    """Bytes, at most the RAM; None for `auto` (`memory_plan`)."""
    if _is(text, "auto"):
        return None
    size, whole = parse_size(text, key=key, whole=total_ram, auto=_never), total_ram()
    if size > whole:
        raise ConfigError(f"{key} = {text!r} is more than the {whole / 1e9:.1f} GB of RAM that there are")
    return size


def parse_wired_limit(text: str | int) -> int | None:
    """As `parse_share_of_ram`, or `off`."""
    return NO_WIRED_LIMIT if _is(text, "off") else parse_share_of_ram(text, key="wired_limit")


def parse_trunk_budget(text: str | int, ram_budget: int | None) -> int | None:
    """As `parse_share_of_ram`, but at most what `ram_budget` leaves."""
    budget, left = parse_share_of_ram(text, key="trunk_budget"), total_ram() - (ram_budget or 0)
    if budget is not None and budget > left:
        raise ConfigError(f"trunk_budget = {text!r} is more than the {left / 1e9:.1f} GB that ram_budget leaves")
    return budget


def parse_part_of_budget(text: str | int, ram_budget: int | None, *, key: str) -> int | None:
    """As `parse_share_of_ram`, but at most `ram_budget`, which includes it."""
    budget = parse_share_of_ram(text, key=key)
    if budget is not None and ram_budget is not None and budget > ram_budget:
        raise ConfigError(f"{key} = {text!r} is more than the ram_budget of {ram_budget} bytes")
    return budget


def _is(text: str | int, word: str) -> bool:
    return str(text).strip().lower() == word


def _never() -> int:
    raise BrokenInvariant("`auto` was looked for before")


def parse_disk_budget(text: str | int, cache_dir: Path) -> int | None:
    """Bytes, or percent of the disk's size; None for `auto` (`store.disk_budget`)."""
    if _is(text, "auto"):
        return None
    return parse_size(text, key="disk_budget", whole=lambda: disk_room(cache_dir).size, auto=_never)

"""Sizes as people write them, such as `8GB`, `20%` and `auto`, and the bytes that they mean on this machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from agentcache.errors import ConfigError, StoreError

AUTO_RAM_SHARE = 0.25
AUTO_TRUNK_SHARE = 0.125  # of the RAM budget, beside it
AUTO_DISK_SHARE = 0.20
AUTO_DISK_CEILING = 100 * 10**9

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def total_ram() -> int:
    """Bytes of RAM this process may use: the machine's, or the container's limit where that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def available_disk(cache_dir: Path) -> int:
    """Bytes that are free on the cache folder's disk, plus those that its block files hold already.

    A percentage is taken of both, so that a restart with a full cache does not shrink its own budget.

    Raises:
        StoreError: there can be no such folder, or it may not be looked at.
    """
    nearest = cache_dir
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        return shutil.disk_usage(nearest).free + _held_bytes(cache_dir / "blocks")
    except OSError as error:
        raise StoreError(f"cannot use the cache folder {cache_dir}: {error.strerror}") from error


def _held_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # a running server may evict it meanwhile
                continue
    return total


def parse_size(text: str | int, *, key: str, whole: Callable[[], int], auto: Callable[[], int]) -> int:
    """Bytes meant by `text`.

    Args:
        text: `8GB`, `512MB`, `1.5GiB`, `20%`, `auto`, or plain bytes.
        key: the setting's name, for the error.
        whole: what a percentage is taken of, in bytes; called only when needed.
        auto: what `auto` stands for, in bytes.
    """
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
    """Bytes meant by a size that is neither a percentage nor `auto`. GB is 10^9 of them, GiB is 2^30."""
    size = _SIZE.fullmatch(str(text).strip())
    if size is None:
        raise ConfigError(f"{key} = {text!r} is not a size; write it like 8GB, 512MB, 20%, auto or in bytes")
    unit = (size[2] or "").lower()
    return int(float(size[1]) * (_UNITS | _BINARY_UNITS)[unit]) if unit or "." in size[1] else int(size[1])


def parse_ram_budget(text: str | int) -> int:
    """Bytes; raises ConfigError for more than there are: the cache would grow until the system ends the process."""
    budget, whole = parse_size(text, key="ram_budget", whole=total_ram, auto=_auto_ram), total_ram()
    if budget > whole:
        raise ConfigError(f"ram_budget = {text!r} is more than the {whole / 1e9:.1f} GB of RAM that there are")
    return budget


def parse_trunk_budget(text: str | int, ram_budget: int) -> int:
    """Bytes; raises ConfigError for more than `ram_budget` leaves of the machine."""
    left = max(0, total_ram() - ram_budget)
    share = min(left, int(ram_budget * AUTO_TRUNK_SHARE))
    budget = parse_size(text, key="trunk_budget", whole=total_ram, auto=lambda: share)
    if budget > left:
        raise ConfigError(f"trunk_budget = {text!r} is more than the {left / 1e9:.1f} GB that ram_budget leaves")
    return budget


def parse_state_budget(text: str | int, ram_budget: int) -> int | None:
    """Bytes, None for `auto`; raises ConfigError for more than `ram_budget`, of which it is a part."""
    if str(text).strip().lower() == "auto":
        return None
    budget = parse_size(text, key="state_budget", whole=total_ram, auto=int)
    if budget > ram_budget:
        raise ConfigError(f"state_budget = {text!r} is more than the ram_budget of {ram_budget} bytes")
    return budget


def _auto_ram() -> int:
    return int(total_ram() * AUTO_RAM_SHARE)


def parse_disk_budget(text: str | int, cache_dir: Path) -> int:
    return parse_size(
        text,
        key="disk_budget",
        whole=lambda: available_disk(cache_dir),
        auto=lambda: min(int(available_disk(cache_dir) * AUTO_DISK_SHARE), AUTO_DISK_CEILING),
    )

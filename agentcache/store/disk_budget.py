"""The disk budget of a cache folder: size and origin."""

from __future__ import annotations

from dataclasses import dataclass

AUTO_SHARE = 0.20
AUTO_CEILING = 100 * 10**9

HINT = "set --disk-budget (AGENTCACHE_DISK_BUDGET, disk_budget in the config file) or delete agents"


@dataclass(frozen=True)
class DiskBudget:
    """A limit for all files of a cache folder. An automatic one limits growth and evicts nothing."""

    num_bytes: int
    is_automatic: bool
    reason: str

    @property
    def kind(self) -> str:
        return "automatic" if self.is_automatic else "explicit"

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e9:.1f} GB, {self.kind}: {self.reason}"


def explicit_budget(num_bytes: int) -> DiskBudget:
    """The user's budget. Agents are evicted to keep it."""
    return DiskBudget(num_bytes, False, "disk_budget is set; the stalest agents' blocks are evicted to keep it")


def automatic_budget(free: int, held: int) -> DiskBudget:
    """A share of the disk, at least `held`: files of other programs must not cause evictions.

    Args:
        free: free bytes of the disk.
        held: bytes of the cache's files.
    """
    share = min(int((free + held) * AUTO_SHARE), AUTO_CEILING)
    measured = f"{free / 1e9:.1f} GB are free and {held / 1e9:.1f} GB held"
    if share <= held:
        return DiskBudget(held, True, f"what is held already, for {measured}; nothing is evicted, nothing can be added")
    limit = f"{AUTO_CEILING / 1e9:.0f} GB at most" if share == AUTO_CEILING else f"{AUTO_SHARE:.0%} of both"
    return DiskBudget(share, True, f"{limit}, for {measured}; it limits growth and evicts nothing")

"""Divide the device's memory.

limit = weights + ram_budget (cache and adapters) + trunk_budget + temporaries + rest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.errors import ConfigError

if TYPE_CHECKING:
    from agentcache.settings.config import Config

GIB = 1 << 30
AUTO_RAM_SHARE = 0.25  # of the RAM
AUTO_TRUNK_SHARE = 0.125  # of the cache's RAM, for hidden states
AUTO_STATE_SHARE = 0.25  # likewise, for recurrent state
NO_WIRED_LIMIT = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that the process may use, in bytes. `recommended`: Metal's working set; None elsewhere."""

    total: int
    recommended: int | None = None

    @property
    def reserve(self) -> int:
        """For other programs: an eighth, between 1 and 4 GiB, but at most a quarter."""
        return min(max(self.total // 8, GIB), 4 * GIB, self.total // 4)

    @property
    def usable(self) -> int:
        free = self.total - self.reserve
        return free if self.recommended is None else min(free, self.recommended)


@dataclass(frozen=True)
class Wishes:
    """Memory settings, in bytes; None for automatic. `memory_limit` includes all."""

    memory_limit: int | None = None
    ram_budget: int | None = None
    trunk_budget: int | None = None
    wired_limit: int | None = None

    @classmethod
    def of(cls, config: Config) -> Wishes:
        return cls(config.memory_limit, config.ram_budget, config.trunk_budget, config.wired_limit)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory by use, in bytes; `limit` includes all.

    `temporaries`: reserve for a step. `wired`: None if the device has no such limit.
    """

    limit: int
    weights: int
    ram_budget: int
    trunk_budget: int
    temporaries: int
    wired: int | None


def state_budget(wished: int | None, ram_budget: int) -> int:
    return int(ram_budget * AUTO_STATE_SHARE) if wished is None else wished


def plan_memory(
    device: DeviceMemory, wishes: Wishes, *, weights: int, temporaries: int, least_cache: int
) -> MemoryPlan:
    """Divide the device's memory; `least_cache` is for one short sequence. Raises ConfigError."""
    limit = _limit(device, wishes.memory_limit)
    beside = temporaries + (wishes.trunk_budget or 0)
    left = limit - weights - beside
    if left < least_cache:
        raise ConfigError(_does_not_fit(device, wishes, limit, weights, temporaries, least_cache))
    budget = wishes.ram_budget
    if budget is None:
        budget = max(least_cache, min(left, int(device.total * AUTO_RAM_SHARE)))
    if budget < least_cache:
        raise ConfigError(f"ram_budget must be at least {least_cache} bytes for this model")
    if budget > left:
        raise ConfigError(
            f"ram_budget = {_gb(budget)} is more than the {_gb(left)} that are left of memory_limit = {_gb(limit)} "
            f"beside {_gb(weights)} of weights and {_gb(beside)} for steps and hidden states"
        )
    hidden_states = wishes.trunk_budget
    if hidden_states is None:
        hidden_states = min(left - budget, int(budget * AUTO_TRUNK_SHARE))
    taken = weights + budget + hidden_states + temporaries
    wired = _wired_limit(device, wishes.wired_limit, taken)
    return MemoryPlan(limit, weights, budget, hidden_states, temporaries, wired)


def _limit(device: DeviceMemory, wished: int | None) -> int:
    if wished is None:
        return device.usable
    if wished > device.total:
        raise ConfigError(f"memory_limit = {_gb(wished)} is more than the {_gb(device.total)} of memory that there are")
    if device.recommended is not None and wished > device.recommended:
        raise ConfigError(
            f"memory_limit = {_gb(wished)} is more than the {_gb(device.recommended)} that macOS lets the GPU have; "
            "`sudo sysctl iogpu.wired_limit_mb=MEGABYTES` changes that until the next start"
        )
    return wished


def _does_not_fit(
    device: DeviceMemory, wishes: Wishes, limit: int, weights: int, temporaries: int, least_cache: int
) -> str:
    parts = [f"{_gb(weights)} of weights", f"{_gb(least_cache)} of cache at least", f"{_gb(temporaries)} for a step"]
    if wishes.trunk_budget:
        parts.append(f"{_gb(wishes.trunk_budget)} of hidden states (trunk_budget)")
    needed = weights + least_cache + temporaries + (wishes.trunk_budget or 0)
    if needed <= (device.total if device.recommended is None else device.recommended):
        rest = ", with little left for other programs" if needed > device.usable else ""
        way_out = f"--memory-limit {_up(needed)} lets it have that{rest}"
    elif needed <= device.total - device.reserve:
        way_out = f"`sudo sysctl iogpu.wired_limit_mb={-(-needed >> 20)}` lets the GPU have that until the next start"
    else:
        way_out = "take a smaller model, or one in fewer bits"
    return (
        f"the model does not fit: it needs {_gb(needed)} ({', '.join(parts)}), and of the {_gb(device.total)} of "
        f"memory it may have {_gb(limit)} (memory_limit); {way_out}"
    )


def _wired_limit(device: DeviceMemory, wished: int | None, taken: int) -> int | None:
    if device.recommended is None:
        return None
    if wished is None:
        return min(taken, device.usable)
    if wished > device.recommended:
        raise ConfigError(
            f"wired_limit = {_gb(wished)} is more than the {_gb(device.recommended)} that macOS lets the GPU have"
        )
    return wished


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _up(num_bytes: int) -> str:
    return f"{-(-num_bytes // 10**8) / 10:.1f}GB"

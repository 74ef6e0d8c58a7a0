"""MLX's device memory, and its limits while an engine runs."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from agentcache.kv.backing import set_memory_limit
from agentcache.settings.memory_plan import DeviceMemory, MemoryPlan
from agentcache.system.memory import SystemMemory

log = logging.getLogger("agentcache.engine")

_LEAST_CACHE_LIMIT = 256 << 20


def device_memory() -> DeviceMemory:
    """Memory of the default device."""
    total = SystemMemory().total()
    if mx.default_device() != mx.gpu:
        return DeviceMemory(total)
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended is not None:
        return DeviceMemory(total, int(recommended))
    return DeviceMemory(int(info.get("total_memory") or total))


@dataclass(frozen=True)
class Setter:
    """One of MLX's limits; `set` returns the previous limit."""

    name: str
    set: Callable[[int], int]


WIRED = Setter("wired", mx.set_wired_limit)
MEMORY = Setter("memory", set_memory_limit)
CACHE = Setter("cache", mx.set_cache_limit)


def wanted_limits(plan: MemoryPlan, device_type: Any = None) -> list[tuple[Setter, int]]:
    """MLX's limits for the default device.

    - Memory: above it, evaluation waits for work in flight instead of running ahead.
    - Cache of freed buffers: a step's temporaries. MLX's default on a GPU, the memory limit, starves other programs.
      On CUDA, where allocation is slow, at least an eighth of the limit; none on a CPU, where malloc reuses recent
      memory better.
    - Wired memory: Metal only.
    """
    on_gpu = (device_type or mx.default_device()) == mx.gpu
    kept = max(plan.temporaries, _LEAST_CACHE_LIMIT, plan.limit // 8 if mx.cuda.is_available() else 0)
    limits = [(MEMORY, plan.limit), (CACHE, kept if on_gpu else 0)]
    if plan.wired is not None:
        limits.append((WIRED, plan.wired))
    return limits


class Limits:
    """Hold until `restore` or the end of the process (also by SystemExit or an exception)."""

    def __init__(self, limits: list[tuple[Setter, int]]) -> None:
        self._before: list[tuple[Setter, int]] = []
        atexit.register(self.restore)
        try:
            for setter, limit in limits:
                self._before.append((setter, setter.set(limit)))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        atexit.unregister(self.restore)
        while self._before:
            setter, limit = self._before.pop()
            setter.set(limit)
            log.debug("the %s limit is %d bytes again", setter.name, limit)

"""Small arrays in device memory: on CUDA, MLX keeps those made from Python in host memory, behind the bus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx

from agentcache.metal_kernels.kernel_text import device

Make = Callable[..., mx.array]
_BEHIND = 12288  # values (48 KB): too large to reuse a host buffer


def on_device(x: mx.array) -> mx.array:
    """Copy to device memory, lazily; `x` itself except on CUDA."""
    if device() != "cuda":
        return x
    return mx.pad(x.flatten(), (0, _BEHIND))[: x.size].reshape(x.shape)


class _Made(threading.local):
    def __init__(self, make: Make) -> None:
        self.get = lru_cache(maxsize=512)(make)


def one_a_thread(make: Make) -> Make:
    """Cache by thread and arguments: only its maker's thread can compute a lazy array."""
    made = _Made(make)

    @wraps(make)
    def get(*given: Hashable) -> mx.array:
        return made.get(*given)

    return get


@one_a_thread
def ints(values: tuple[Any, ...]) -> mx.array:
    """An int32 array on the device."""
    return on_device(mx.array(values, mx.int32))


@one_a_thread
def floats(*values: float) -> mx.array:
    """A float32 array on the device."""
    return on_device(mx.array(values, mx.float32))

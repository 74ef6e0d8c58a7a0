"""Plain numbers that kernels are told, where they read them quickly.

On CUDA MLX puts what Python makes an array of into memory that the host holds, and what takes eight bytes or fewer
there for good; each threadgroup of each layer would read it over the bus. So it is copied once, into an array that is
longer than any of those whose memory MLX takes again for small ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx

from agentcache.metal_kernels.kernel_text import device

Make = Callable[..., mx.array]
_BEHIND = 12288  # 48 KB: sizes of this order are not rounded up to one that was the host's


def on_device(x: mx.array) -> mx.array:
    """The same numbers in the device's own memory; `x` itself where all memory is one. Lazy."""
    if device() != "cuda":
        return x
    return mx.pad(x.flatten(), (0, _BEHIND))[: x.size].reshape(x.shape)


class _Made(threading.local):
    """What a thread has made."""

    def __init__(self, make: Make) -> None:
        self.get = lru_cache(maxsize=512)(make)


def one_a_thread(make: Make) -> Make:
    """Made once in each thread, for the same arguments: an array that nobody has evaluated yet can be computed by the
    thread that made it and by no other, not even when that one has ended."""
    made = _Made(make)

    @wraps(make)
    def get(*given: Hashable) -> mx.array:
        return made.get(*given)

    return get


@one_a_thread
def ints(values: tuple[Any, ...]) -> mx.array:
    """Plain numbers as an int32 array on the device: the same one as long as they are the same.

    From step to step few of them change, and they are alike for many groups of layers; what lies on a device already
    need not get there.
    """
    return on_device(mx.array(values, mx.int32))


@one_a_thread
def floats(*values: float) -> mx.array:
    """Plain numbers as a float32 array: what a model's layers are scaled by, so that there are few."""
    return on_device(mx.array(values, mx.float32))

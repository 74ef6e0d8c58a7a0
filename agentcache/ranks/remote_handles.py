from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count

import numpy as np

from agentcache.errors import BrokenInvariant
from agentcache.kv.block_layout import Array
from agentcache.ranks.commands import Command, Forget
from agentcache.ranks.worker_link import WorkerLink


class RemoteHandles:
    """Numbers of rank 0's arrays of block bytes. Workers drop their parts once the array is freed. Thread-safe."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._numbers = count(1)
        self._by_id: dict[int, int] = {}

    def new(self) -> int:
        return next(self._numbers)

    def bind(self, data: Array, handle: int) -> None:
        assert isinstance(data, np.ndarray)
        self._by_id[id(data)] = handle
        weakref.finalize(data, self._forget, id(data), handle).atexit = False

    def keep(self, data: Array, command: Callable[[int], Command]) -> None:
        """Have the workers keep their parts of `data`, by a command with its new handle."""
        handle = self.new()
        self._link.tell(command(handle))
        self.bind(data, handle)

    def _forget(self, array_id: int, handle: int) -> None:
        del self._by_id[array_id]
        self.give_back(handle)

    def give_back(self, handle: int) -> None:
        self._link.tell(Forget([handle]))

    def has(self, data: Array) -> bool:
        return id(data) in self._by_id

    def of(self, data: Array) -> int:
        """Raises BrokenInvariant if the workers keep no parts of `data`."""
        if not self.has(data):
            raise BrokenInvariant("the bytes of a block have no handle: other ranks do not have their parts")
        return self._by_id[id(data)]

from __future__ import annotations

import weakref
from itertools import count

import numpy as np

from agentcache.kv.block_layout import Array
from agentcache.ranks.arena_commands import Forget
from agentcache.ranks.worker_link import WorkerLink


class RemoteHandles:
    """Numbers of rank 0's arrays of block bytes. Workers drop their parts once the array is freed. Thread-safe."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._numbers = count(1)
        self._by_id: dict[int, int] = {}

    def new(self) -> int:
        return next(self._numbers)

    def bind(self, data: Array, ticket: int) -> None:
        assert isinstance(data, np.ndarray)
        self._by_id[id(data)] = ticket
        weakref.finalize(data, self._forget, id(data), ticket).atexit = False

    def _forget(self, array_id: int, ticket: int) -> None:
        del self._by_id[array_id]
        self.give_back(ticket)

    def give_back(self, ticket: int) -> None:
        self._link.tell(Forget([ticket]))

    def of(self, data: Array) -> int:
        return self._by_id.get(id(data), 0)

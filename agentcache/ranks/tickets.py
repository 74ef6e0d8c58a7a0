"""Numbers for bytes that every rank has its own part of: rank 0's array stands for what the others keep under it."""

from __future__ import annotations

import weakref
from itertools import count

import numpy as np

from agentcache.kv.block_layout import Array
from agentcache.ranks.arena_commands import Forget
from agentcache.ranks.leader import Leader


class Tickets:
    """Which ticket an array has. The others let go of their bytes when rank 0's array is gone. From any thread."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._numbers = count(1)
        self._by_id: dict[int, int] = {}

    def new(self) -> int:
        """A ticket that no array has yet."""
        return next(self._numbers)

    def bind(self, data: Array, ticket: int) -> None:
        """The others keep under `ticket` what goes with `data`."""
        assert isinstance(data, np.ndarray)
        self._by_id[id(data)] = ticket
        weakref.finalize(data, self._forget, id(data), ticket).atexit = False

    def _forget(self, array_id: int, ticket: int) -> None:
        del self._by_id[array_id]
        self.give_back(ticket)

    def give_back(self, ticket: int) -> None:
        """Nobody has any use for what the others keep under it."""
        self._leader.tell(Forget([ticket]))

    def of(self, data: Array) -> int:
        """The ticket of an array; 0 for one that has none."""
        return self._by_id.get(id(data), 0)

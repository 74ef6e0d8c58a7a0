"""A disk that stands still until it is told to go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from agentcache.engine.engine import Engine
from agentcache.errors import DiskBudgetExceeded
from agentcache.store.store import Store
from tests.serving import inside

T = TypeVar("T")
PATIENCE = 30.0


class Gate:
    """Nothing is written between the first write that arrives and `opened`; the first ones may then find no room.

    Args:
        full: writes of blocks that raise DiskBudgetExceeded.
    """

    def __init__(self, store: Store, full: int = 0) -> None:
        self._arrived, self.opened = threading.Event(), threading.Event()
        self._full = full
        store.write_blocks = self._behind(store.write_blocks, full=True)  # type: ignore[method-assign]
        store.save_agent = self._behind(store.save_agent)  # type: ignore[method-assign]

    @classmethod
    def of(cls, engine: Engine, full: int = 0) -> Gate:
        """In front of an engine's store."""
        return cls(inside.store(engine), full)

    async def reached(self) -> None:
        """Wait for the first write."""
        assert await asyncio.to_thread(self._arrived.wait, PATIENCE)

    def _behind(self, write: Callable[[T], int], *, full: bool = False) -> Callable[[T], int]:
        def wait_and_write(what: T) -> int:
            self._arrived.set()
            assert self.opened.wait(PATIENCE)
            if full and self._full:
                self._full -= 1
                raise DiskBudgetExceeded("it is full")
            return write(what)

        return wait_and_write

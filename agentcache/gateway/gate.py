"""A gate before the engine, closed while the engine is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts calls inside. It closes only when empty; later calls wait until it opens.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    @property
    def is_empty(self) -> bool:
        return not self._inside

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        while not self.is_open:  # closed only when empty, so nested calls never wait
            await self._is_open.wait()
        self._inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._is_empty.set()

    async def emptied(self) -> None:
        """Return once no call is inside; the caller must check again."""
        await self._is_empty.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        while not self.is_empty:
            await self.emptied()
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

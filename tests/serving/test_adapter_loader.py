"""Who gets room for an adapter's weights, and who waits: the loader over a device that has any weights at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from agentcache.adapters.table import ServedAdapter
from agentcache.api.policy import Policy
from agentcache.errors import EngineStopped
from agentcache.gateway.adapter_loader import AdapterLoader
from tests.serving.test_adapter_table import make_source

if TYPE_CHECKING:
    from agentcache.adapters.table import AdapterSource

SECONDS = 60.0  # that a request waits which is never told
BUDGET = 100


class Device:
    """In place of the engine's thread."""

    view = SimpleNamespace(model=SimpleNamespace(adapter_budget=BUDGET))

    async def ask(self, message: object) -> bool:
        await asyncio.sleep(0)
        return True

    def tell(self, message: object) -> None:
        """The loader takes no reply."""


class Loader(AdapterLoader):
    async def _content_again(self, source: AdapterSource) -> Any:
        await asyncio.sleep(0)
        return SimpleNamespace(adapter=source)


def serving(sizes: dict[str, int], work: Callable[[Loader], Awaitable[None]]) -> None:
    async def run() -> None:
        loader = Loader(Device(), Path("memo"))
        for name, size in sizes.items():
            source = make_source(name, nbytes=size)
            loader._table.put(ServedAdapter(name, source, Policy.EXACT, frozenset([0])))
        try:
            await asyncio.wait_for(work(loader), SECONDS)
        finally:
            await loader.close(EngineStopped("the test is over"))

    asyncio.run(run())


async def use(loader: Loader, name: str) -> int:
    """How many requests use the adapter while this one does."""
    async with loader.lease(name) as adapter:
        assert adapter is not None and loader._table.is_resident(adapter.digest)
        return loader._table.info(adapter).running


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_request_that_waits_for_room_gets_it_when_another_ends() -> None:
    async def work(loader: Loader) -> None:
        async with loader.lease("a"):
            waiting = asyncio.ensure_future(use(loader, "b"))
            await turns()
            assert not waiting.done()
        assert await waiting == 1
        assert not loader._table.is_resident("a")

    serving({"a": 60, "b": 60}, work)


def test_requests_that_are_done_keep_nobody_waiting() -> None:
    async def work(loader: Loader) -> None:
        for name in ("a", *["b"] * 40, "a"):
            assert await use(loader, name) == 1

    serving({"a": 30, "b": 30}, work)


def test_a_request_that_was_kept_back_uses_its_adapter_like_any_other() -> None:
    async def work(loader: Loader) -> None:
        async with loader.lease("b"):
            overdue = asyncio.ensure_future(use(loader, "a"))
            await turns()
            for _ in range(16):
                assert await use(loader, "b") == 2
            kept_back = asyncio.ensure_future(use(loader, "b"))
            await turns()
            assert not overdue.done() and not kept_back.done()
        assert await overdue == 1
        assert await kept_back == 1

    serving({"a": 60, "b": 60}, work)

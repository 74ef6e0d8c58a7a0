"""An engine that is closed in order: what is being saved is saved, what was cut short leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentcache.errors import DiskBudgetExceeded
from agentcache.kv.store import BlockWrite
from agentcache.kv.verify import FolderReport, verify_folder
from agentcache.serving.async_engine import AsyncEngine
from agentcache.serving.engine import Engine
from agentcache.serving.request import Request, TokenPrompt
from tests.serving.conversation import greedy, make_ids
from tests.serving.test_async_engine import complete, outcome_of, run

PATIENCE = 30.0


class Gate:
    """The disk does nothing between `arrived` and `opened`; the first writes may find it full.

    Args:
        full: writes that raise DiskBudgetExceeded.
    """

    def __init__(self, full: int = 0) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self._full = full

    def install(self, engine: Engine) -> None:
        store = engine.persistence.store
        write = store.write_blocks

        def write_blocks(blocks: Sequence[BlockWrite]) -> int:
            self.arrived.set()
            assert self.opened.wait(PATIENCE)
            if self._full:
                self._full -= 1
                raise DiskBudgetExceeded("it is full")
            return write(blocks)

        store.write_blocks = write_blocks  # type: ignore[method-assign]


async def close_at(gate: Gate, engine: AsyncEngine) -> None:
    """Close the engine while a write stands at the gate, which opens only then."""
    await asyncio.to_thread(gate.arrived.wait, PATIENCE)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.1)
    gate.opened.set()
    await closing


def checked(cache_dir: Path) -> FolderReport:
    report = verify_folder(cache_dir)
    assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())
    return report


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("stays", [True, False])
def test_a_turn_that_is_being_saved_is_saved(full: int, stays: bool, model: Path, tmp_path: Path) -> None:
    """Whoever waits for its answer gets it; who has left finds the turn later."""
    gate = Gate(full)

    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "idle")
        await engine._call(gate.install)
        answer = asyncio.ensure_future(complete(engine, "alice", max_tokens=1, seed=1))
        await asyncio.to_thread(gate.arrived.wait, PATIENCE)
        while not (await engine._call(lambda inner: bool(inner.turns.ending))):
            await asyncio.sleep(0.001)
        if not stays:
            answer.cancel()
            await asyncio.wait({answer})
        await close_at(gate, engine)
        if stays:
            report = (await answer)[-1].report
            assert report is not None and report.saved

    run(test, model, tmp_path)
    assert checked(tmp_path).agents == 2

    async def find(engine: AsyncEngine) -> None:
        assert (await engine.agent("alice")).tokens == 301

    run(find, model, tmp_path)


@pytest.mark.parametrize("full", [0, 1])
def test_a_prompt_that_is_cut_short_leaves_nothing(full: int, model: Path, tmp_path: Path) -> None:
    """Its first blocks are on their way to the disk, or wait there for room."""
    gate = Gate(full)

    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "idle")
        await engine._call(gate.install)
        request = Request("long", TokenPrompt(make_ids(20_000, seed=2)), greedy(1), "long")
        answer = asyncio.ensure_future(outcome_of(engine.generate(request, lambda update: None)))
        await close_at(gate, engine)
        assert await answer == "Overloaded"

    run(test, model, tmp_path)
    assert checked(tmp_path).agents == 1

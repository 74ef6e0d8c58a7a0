"""An engine that is closed in order: what is being saved is saved, what was cut short leaves nothing."""

from __future__ import annotations

import asyncio
import gc
from itertools import starmap
from pathlib import Path

import pytest

from agentcache.api.request import Request, TokenPrompt
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import ShowAgent
from agentcache.kv.backing import allocated_bytes
from agentcache.llm import LLM
from agentcache.store.verify import FolderReport, verify_folder
from tests.marks import slow
from tests.serving import inside
from tests.serving.conversation import greedy, make_ids
from tests.serving.gate import Gate
from tests.serving.test_async_engine import complete, outcome_of, run


async def close_at(gate: Gate, engine: AsyncEngine) -> None:
    """Close the engine while a write stands at the gate, which opens only then."""
    await gate.reached()
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.1)
    gate.opened.set()
    await closing


def checked(cache_dir: Path) -> FolderReport:
    report = verify_folder(cache_dir)
    assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())
    return report


@pytest.mark.parametrize(("stays", "full"), [(False, 1), *starmap(slow, [(True, 0), (True, 1), (False, 0)])])
def test_a_turn_that_is_being_saved_is_saved(full: int, stays: bool, model: Path, tmp_path: Path) -> None:
    """Whoever waits for its answer gets it; who has left finds the turn later."""

    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "idle")
        gate = await inside.on_thread(engine, lambda inner: Gate.of(inner, full))
        answer = asyncio.ensure_future(complete(engine, "alice", max_tokens=1, seed=1))
        await gate.reached()
        while not await inside.on_thread(engine, inside.is_saving):
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
        assert (await engine.call(ShowAgent("alice"))).tokens == 301

    run(find, model, tmp_path)


@pytest.mark.parametrize("full", [slow(0), 1])
def test_a_prompt_that_is_cut_short_leaves_nothing(full: int, model: Path, tmp_path: Path) -> None:
    """Its first blocks are on their way to the disk, or wait there for room."""

    async def test(engine: AsyncEngine) -> None:
        await complete(engine, "idle")
        gate = await inside.on_thread(engine, lambda inner: Gate.of(inner, full))
        request = Request("long", TokenPrompt(make_ids(20_000, seed=2)), greedy(1), "long")
        answer = asyncio.ensure_future(outcome_of(engine.generate(request, lambda update: None)))
        await close_at(gate, engine)
        assert await answer == "Overloaded"

    run(test, model, tmp_path)
    assert checked(tmp_path).agents == 1


def test_a_model_that_is_closed_gives_its_memory_back(model: Path, tmp_path: Path) -> None:
    """At once, though somebody still has the object: the next one may be as large."""
    gc.collect()
    before = allocated_bytes()
    with LLM(model, cache_dir=tmp_path) as llm:
        llm.generate(make_ids(300), greedy(2), agent="alice")
        taken = allocated_bytes() - before
    assert taken > 100_000
    assert allocated_bytes() - before < taken / 10

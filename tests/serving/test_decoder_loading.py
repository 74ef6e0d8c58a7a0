"""A decoder is loaded in pieces, between which those who run go on; and wherever it ends, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import EngineStopped, Overloaded, UnsupportedAdapter
from agentcache.gateway.operations import ReadStats
from agentcache.llm import LLM, Completion
from agentcache.models.proof import STEPS
from agentcache.settings.tables import parse_adapters
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.serving import inside
from tests.serving.adapter_cases import ask, check_equal, cold, make_folders, open_adapters
from tests.serving.conversation import check_idle, greedy, make_ids
from tests.serving.test_decoders import fine_tune

LAYERS = 8
RUNS = sum(len(step.rows) + 1 for step in STEPS)
# Each layer is read, and the rest; the proof is laid out, computed for each layer and for the whole, and ends; the end.
PIECES = LAYERS + 1 + RUNS + LAYERS + 1 + 2


@pytest.fixture(scope="module")
def base(model_folder: ModelFolder) -> Path:
    return model_folder("qwen3")


@pytest.fixture
def poet(base: Path, tmp_path: Path) -> Path:
    return fine_tune(base, tmp_path / "poet", 2)


@dataclass
class Pieces:
    """What each piece of a load finds.

    Args:
        steps: decode steps so far.
        promised: bytes of adapters that count.
    """

    steps: list[int] = field(default_factory=list)
    promised: list[int] = field(default_factory=list)


def watch(llm: LLM, at: int = -1, then: Callable[[], object] = lambda: None) -> Pieces:
    """`then` is called when piece number `at` has been loaded."""
    engine, seen = inside.engine_of(llm), Pieces()

    def look() -> None:
        seen.steps.append(engine.stats().decode_steps)
        seen.promised.append(inside.adapter_bytes(engine))
        if len(seen.steps) == at:
            then()

    inside.after_each_piece(engine, look)
    return seen


async def load_beside_requests(llm: LLM, poet: Path) -> list[Completion]:
    """Base writes, before and as long as it takes to load the decoder."""
    loaded, written = asyncio.Event(), list[Completion]()

    async def write() -> None:
        while not loaded.is_set():
            request = Request(f"base{len(written)}", TokenPrompt(make_ids(40)), greedy(100))
            written.append(await inside.collect(llm, request))

    writing, engine = asyncio.ensure_future(write()), inside.async_engine(llm)
    before = (await engine.call(ReadStats())).decode_steps
    while (await engine.call(ReadStats())).decode_steps < before + 10:
        await asyncio.sleep(0.001)
    await engine.load_adapter(parse_adapters({"poet": poet})[0])
    loaded.set()
    await writing
    return written


@pytest.mark.slow
def test_who_runs_goes_on_between_the_pieces(base: Path, poet: Path, tmp_path: Path) -> None:
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        expected = ask(llm, make_ids(40), tokens=100)
        seen = watch(llm)
        for written in inside.on_loop(llm, load_beside_requests(llm, poet)):
            check_equal(written, expected)
        assert len(seen.steps) == PIECES and len(set(seen.steps)) > LAYERS
        assert set(seen.promised) == {llm.adapters()[0].ram_bytes}, "its bytes count from the beginning"
        check_equal(said := ask(llm, make_ids(40), "poet", tokens=8), cold(llm, said))


@pytest.mark.parametrize("at", [1, slow(LAYERS + 3)])
def test_files_that_change_meanwhile(at: int, base: Path, poet: Path, tmp_path: Path) -> None:
    with open_adapters(base, tmp_path / "cache", {}) as llm:
        seen = watch(llm, at, lambda: os.utime(poet / "config.json", (1, 1)))
        with pytest.raises(UnsupportedAdapter, match="is being changed"):
            llm.load_adapter("poet", poet)
        assert len(seen.steps) > LAYERS
        check_nothing_left(llm)
        check_equal(said := ask(llm, make_ids(40), tokens=4), cold(llm, said))
        llm.load_adapter("poet", poet)
        assert llm.adapters()[0].resident


def check_nothing_left(llm: LLM) -> None:
    check_idle(llm)
    assert llm.adapters() == () and llm.stats().adapter_ram_bytes == 0
    assert inside.cache_budget(inside.engine_of(llm)) == llm.stats().ram_budget
    assert inside.resident_bytes(llm) == 0


@pytest.mark.slow
def test_who_wanted_it_leaves_meanwhile(base: Path, poet: Path, tmp_path: Path) -> None:
    with open_adapters(base, tmp_path / "cache", {}) as llm:

        async def leave() -> None:
            reached = asyncio.Event()
            loop = asyncio.get_running_loop()
            seen = watch(llm, 3, lambda: loop.call_soon_threadsafe(reached.set))
            loading = asyncio.ensure_future(inside.async_engine(llm).load_adapter(parse_adapters({"poet": poet})[0]))
            await reached.wait()
            loading.cancel()
            await asyncio.wait({loading})
            assert loading.cancelled() and len(seen.steps) == PIECES

        inside.on_loop(llm, leave())
        check_nothing_left(llm)


@pytest.mark.slow
def test_an_adapter_comes_and_goes_meanwhile(base: Path, poet: Path, tmp_path: Path) -> None:
    """The budget of the cache is right after every piece, and at the end."""
    with open_adapters(base, tmp_path / "cache", make_folders(tmp_path, base, ("plain",))) as llm:
        engine, budgets = inside.engine_of(llm), list[int]()
        [plain] = llm.adapters()
        watch(llm, 3, lambda: inside.drop_weights(engine, plain.digest))
        inside.after_each_piece(
            engine, lambda: budgets.append(inside.cache_budget(engine) + inside.adapter_bytes(engine))
        )
        llm.load_adapter("poet", poet)
        assert set(budgets) == {llm.stats().ram_budget} and len(budgets) == PIECES
        inside.note_dropped(llm, plain.digest)


def test_the_server_stops_meanwhile(base: Path, poet: Path, tmp_path: Path) -> None:
    llm = LLM(base, cache_dir=tmp_path / "cache", ram_budget="64MB")

    async def stop() -> None:
        reached, loop = asyncio.Event(), asyncio.get_running_loop()
        seen = watch(llm, 3, lambda: loop.call_soon_threadsafe(reached.set))
        loading = asyncio.ensure_future(inside.async_engine(llm).load_adapter(parse_adapters({"poet": poet})[0]))
        await reached.wait()
        await inside.async_engine(llm).close()
        with pytest.raises((EngineStopped, Overloaded)):
            await loading
        assert len(seen.steps) < PIECES

    try:
        inside.on_loop(llm, stop())
    finally:
        llm.close()

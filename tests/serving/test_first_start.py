"""The first start with a model: served in 8 bits while a precision is chosen, then by an engine with that precision."""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.policy import Policy
from agentcache.api.report import Report, Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.errors import OutOfBlocks, UnsupportedModel
from agentcache.gateway import async_engine
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import CheckIntegrity, ListAgents, ReadStats, UseResponses
from agentcache.models import precision as precision_module
from agentcache.models.precision import PrecisionSearch
from agentcache.settings.config import Config
from agentcache.settings.tables import AdapterFolder
from agentcache.store.model_files import read_precision
from tests.adapters_factory import make_adapter
from tests.conftest import ModelFolder
from tests.serving import inside

PROMPT = [1 + number % 200 for number in range(300)]


@pytest.fixture
def model(model_folder: ModelFolder) -> Path:
    return model_folder("qwen2", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def measured_behind_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MEASURE_SECONDS", 0.0)


def open_on(model: Path, cache_dir: Path) -> AsyncEngine:
    config = Config(model=str(model), cache_dir=cache_dir, kv="auto", ram_budget=64 << 20, memory_pressure=False)
    return AsyncEngine(config, warm_up=True)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))
    gc.unfreeze()  # a server ends with its process
    gc.collect()
    gc.freeze()  # as `pytest_collection_finish` does


async def ask(engine: AsyncEngine, agent: str | None = None, adapter: str | None = None) -> Report:
    updates: list[Update] = []
    sampling = SamplingParams(max_tokens=2, temperature=0)
    await engine.generate(
        Request(uuid.uuid4().hex, TokenPrompt(PROMPT), sampling, agent=agent, adapter=adapter), updates.append
    )
    report = updates[-1].report
    assert report is not None
    return report


async def until_chosen(engine: AsyncEngine) -> None:
    assert engine._replacing is not None
    await asyncio.wait({engine._replacing})
    assert engine.measuring is None


def test_requests_are_answered_at_once_and_agents_stay(model: Path, tmp_path: Path) -> None:
    async def first() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        assert engine.ready and engine.model.kv_precision == "8"
        assert (await ask(engine, "alice")).computed_tokens == len(PROMPT)
        await until_chosen(engine)
        chosen = engine.model.kv_precision
        assert engine.ready and chosen == str(read_precision(tmp_path, engine.model.fingerprint)) != "8"
        assert [agent.id for agent in await engine.call(ListAgents())] == ["alice"]
        assert (await ask(engine, "alice")).computed_tokens == len(PROMPT), (
            "keys and values of 8 bits were read as others"
        )
        assert (await ask(engine, "alice")).computed_tokens <= 4
        await engine.call(CheckIntegrity())
        await engine.close()

    async def second() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        assert engine.measuring is None and engine._replacing is None
        assert (await ask(engine, "alice")).computed_tokens <= 4
        await engine.close()

    run(first())
    run(second())


def test_calls_wait_while_the_engine_is_replaced(model: Path, tmp_path: Path) -> None:
    async def serve() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        while engine._gate.is_open:
            await asyncio.sleep(0)
        assert engine.ready
        stats, agents, report, response = await asyncio.gather(
            engine.call(ReadStats()),
            engine.call(ListAgents()),
            ask(engine, "bob"),
            engine.call(UseResponses(lambda files: files.find("resp"))),
        )
        assert response is None
        assert engine.model.kv_precision != "8" and agents == [] and report.computed_tokens == len(PROMPT)
        await until_chosen(engine)
        await engine.close()

    run(serve())


@pytest.mark.slow
def test_an_interrupted_search_loses_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[object] = []
    compute = PrecisionSearch._compute

    def counted(search: PrecisionSearch) -> None:
        passes.append(search)
        compute(search)

    monkeypatch.setattr(PrecisionSearch, "_compute", counted)
    monkeypatch.setattr(precision_module, "MAX_DIVERGENCE", 1e-9)  # many passes

    async def whole() -> None:
        engine = open_on(model, tmp_path / "whole")
        await engine.start()
        await until_chosen(engine)
        await engine.close()

    async def interrupted() -> None:
        engine = open_on(model, tmp_path / "interrupted")
        await engine.start()
        while engine.measuring is None or engine.measuring.done < 3:
            await asyncio.sleep(0)
        await engine.close()

    async def continued() -> None:
        engine = open_on(model, tmp_path / "interrupted")
        await engine.start()
        await until_chosen(engine)
        await engine.close()

    run(whole())
    needed = len(passes)
    assert needed > 4
    run(interrupted())
    run(continued())
    assert len(passes) - needed == needed + 1, "only the pass without quantisation is repeated"


@pytest.mark.slow
def test_adapters_are_served_on(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = {name: make_adapter(tmp_path / name, model) for name in ("kept", "gone")}

    async def serve() -> None:
        engine = open_on(model, tmp_path / "cache")
        await engine.start()
        for name, folder in folders.items():
            await engine.load_adapter(AdapterFolder(name, str(folder), Policy.AUTO))
        assert (await ask(engine, adapter="gone")).computed_tokens == len(PROMPT)  # the model's modules are wrapped
        (folders["gone"] / "adapters.safetensors").unlink()
        while engine._gate.is_open:
            await asyncio.sleep(0)
        while not engine._gate.is_open:  # a request that names one is read meanwhile
            assert {adapter.name for adapter in engine.model.adapters} == set(folders)
            await asyncio.sleep(0)
        await until_chosen(engine)
        assert [adapter.name for adapter in engine.model.adapters] == ["kept"]
        assert (await ask(engine, adapter="kept")).computed_tokens == len(PROMPT)
        await engine.close()

    with caplog.at_level(logging.WARNING):
        run(serve())
    assert "'gone'" in caplog.text


def test_the_old_engine_leaves_memory(model: Path, tmp_path: Path) -> None:
    """Though a server freezes what start-up has made. The model and its tokenizer go on; neither is read again."""

    async def serve() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        old, cache = await inside.on_thread(engine, lambda opened: (weakref.ref(opened), weakref.ref(opened.cache)))
        weights, tokenizer = await inside.on_thread(
            engine, lambda opened: (weakref.ref(opened.loaded.model), opened.loaded.tokenizer)
        )
        gc.collect()
        gc.freeze()
        await until_chosen(engine)
        assert old() is None and cache() is None
        now = await inside.on_thread(engine, lambda opened: (opened.loaded.model, opened.loaded.tokenizer))
        assert now[0] is weights() and now[1] is tokenizer
        await engine.close()

    run(serve())


@pytest.mark.parametrize("error", [OutOfBlocks("no room"), ValueError("of a library")], ids=["ours", "other"])
def test_a_search_that_fails_is_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(search: PrecisionSearch) -> None:
        raise error

    monkeypatch.setattr(PrecisionSearch, "_compute", fail)

    async def serve() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        await until_chosen(engine)
        assert engine.ready and engine.model.kv_precision == "8"
        await engine.close()

    with caplog.at_level(logging.WARNING):
        run(serve())
    assert "was not measured" in caplog.text


def test_a_replacement_that_fails_ends_the_engine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        engine = open_on(model, tmp_path)
        await engine.start()
        make = engine._make_thread

        def failing(*args: Any) -> Any:
            thread = make(*args)

            def fail(post: object) -> Any:
                raise UnsupportedModel("no")

            thread._open_engine = fail
            return thread

        monkeypatch.setattr(engine, "_make_thread", failing)
        await until_chosen(engine)
        assert isinstance(engine.failure, UnsupportedModel) and not engine.ready
        await engine.close()

    run(serve())

"""Whatever a library throws, at start or in a request, ends in an error that the caller gets."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentcache.api.answer_form import AnswerForm, Notation, TextForm
from agentcache.api.report import Update
from agentcache.api.request import Request, TokenPrompt
from agentcache.errors import EngineStopped, InvalidRequest
from agentcache.gateway import adapter_loader, async_engine, completions, operations
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.gateway.operations import CheckIntegrity, EvictAgent, ImportAgent, SaveAgent, ShowAgent
from agentcache.gateway.prompt_workers import Workers
from agentcache.settings.config import Config
from agentcache.settings.tables import AdapterFolder
from agentcache.store.block_folder import BlockReader
from agentcache.store.store import Store
from agentcache.text.grammars import compiler
from agentcache.text.tokenizer import Tokenizer
from tests.marks import slow
from tests.serving.conversation import DISK_BUDGET, RAM_BUDGET, greedy, make_ids
from tests.throwing import THROWN, PanicException

SECONDS = 30.0
SOME = [PanicException, slow(SystemExit), slow(StopIteration), slow(MemoryError)]
FORM = AnswerForm(TextForm(Notation.REGEX, "[a-f]{3}", "guided_regex"))


def throwing(kind: type[BaseException]) -> Callable[..., Any]:
    def throw(*args: object, **kwargs: object) -> Any:
        raise kind("the trie is full")

    return throw


def engine_on(model: Path, cache_dir: Path, **settings: Any) -> AsyncEngine:
    values = {"ram_budget": RAM_BUDGET, "disk_budget": DISK_BUDGET, "kv": "4t"} | settings
    return AsyncEngine(Config(model=str(model), cache_dir=cache_dir, **values), warm_up=True)


def run(test: Callable[[AsyncEngine], Awaitable[None]], engine: AsyncEngine) -> None:
    async def inside() -> None:
        await engine.start()
        try:
            await asyncio.wait_for(test(engine), SECONDS)
        finally:
            await engine.close()

    asyncio.run(inside())


async def complete(engine: AsyncEngine, agent: str | None = None, seed: int = 0, **options: Any) -> list[int]:
    request = Request("r", TokenPrompt(make_ids(600, seed=seed)), greedy(4), agent, **options)
    updates: list[Update] = []
    await engine.generate(request, updates.append)
    return [token for update in updates for token in update.token_ids]


def check_start_fails(engine: AsyncEngine) -> Exception:
    """It raises an ordinary exception soon, and no thread of the engine is left."""

    async def start() -> None:
        await asyncio.wait_for(engine.start(), SECONDS)

    with pytest.raises(Exception, match="the trie is full") as raised:
        asyncio.run(start())
    assert not [thread for thread in threading.enumerate() if thread.name == "agentcache-engine" and thread.is_alive()]
    return raised.value


@pytest.mark.parametrize("kind", THROWN)
def test_opening_the_engine(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "open_engine", throwing(kind))
    engine = engine_on(model, tmp_path / "cache")
    assert check_start_fails(engine) is engine.failure


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_starting_the_tokenizer(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "start", throwing(kind))
        check_start_fails(engine_on(model, tmp_path / "cache"))

    async def test(engine: AsyncEngine) -> None:
        assert await complete(engine)

    run(test, engine_on(model, tmp_path / "cache"))  # the folder was given back


def test_a_vocabulary_that_llguidance_panics_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "LLTokenizer", throwing(PanicException))

    async def test(engine: AsyncEngine) -> None:
        assert "PanicException" in engine.model.forms_refusal
        assert len(await complete(engine, "alice")) == 4
        for _ in range(2):
            with pytest.raises(InvalidRequest) as refused:
                await complete(engine, "alice", form=FORM)
            assert (refused.value.code, refused.value.param) == ("forms_unavailable", "guided_regex")

    with caplog.at_level(logging.WARNING):
        run(test, engine_on(model, tmp_path / "cache"))
    [line] = [record for record in caplog.records if record.name == "agentcache.models"]
    assert "constrained answers are off" in line.getMessage() and line.exc_info is None


@pytest.mark.parametrize("kind", SOME)
def test_a_mask(kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a form ends with an error; the one beside it does not notice."""

    async def test(engine: AsyncEngine) -> None:
        expected = await complete(engine, seed=1)
        with monkeypatch.context() as patch:
            patch.setattr(compiler.GrammarMatcher, "_find", throwing(kind))
            of_form, beside = await asyncio.gather(
                complete(engine, form=FORM), complete(engine, seed=1), return_exceptions=True
            )
        assert isinstance(of_form, InvalidRequest) and of_form.code == "grammar_failed"
        assert beside == expected
        assert await complete(engine, form=FORM)

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.parametrize("kind", SOME)
def test_preparing_a_prompt(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        for _ in range(6):  # more than there are threads
            with monkeypatch.context() as patch:
                patch.setattr(completions, "prepare_request", throwing(kind))
                with pytest.raises(Exception, match="the trie is full"):
                    await complete(engine, "alice")
        assert len(await complete(engine, "alice")) == 4

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_reading_an_adapter(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loader, "read_adapter", throwing(kind))
    (tmp_path / "adapter").mkdir()
    folder = AdapterFolder("poet", str(tmp_path / "adapter"))

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(Exception, match="the trie is full"):
            await engine.load_adapter(folder)
        assert len(await complete(engine)) == 4

    run(test, engine_on(model, tmp_path / "cache"))
    check_start_fails(engine_on(model, tmp_path / "cache", adapters=(folder,)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_reading_an_archive(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "read_archive", throwing(kind))

    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(Exception, match="the trie is full"):
            await engine.call(ImportAgent("alice", str(tmp_path / "file")))

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.parametrize("kind", SOME)
def test_writing_a_turn(
    kind: type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is answered and reported as not saved; the next one is saved whole."""

    async def test(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "write_blocks", throwing(kind))
            assert len(await complete(engine, "alice")) == 4
        await engine.call(SaveAgent("alice"))
        await engine.call(EvictAgent("alice"))
        assert (await engine.call(ShowAgent("alice"))).disk_bytes > 0
        await engine.call(CheckIntegrity())

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("place", ["read_apart", slow("read_blocks"), slow("reader")])
def test_reading_blocks(
    kind: type[BaseException], place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is computed."""

    async def test(engine: AsyncEngine) -> None:
        expected = await complete(engine, "alice")
        await engine.call(EvictAgent("alice"))
        with monkeypatch.context() as patch:
            patch.setattr(Store if place == "read_blocks" else BlockReader, place, throwing(kind))
            if place == "read_blocks":
                patch.setattr("agentcache.agents.restore.Restorer._read_in_place", lambda self: False)
            assert await complete(engine, "alice") == expected
        await engine.call(CheckIntegrity())

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_a_reply_that_is_not_taken_keeps_no_other_from_its_own(
    kind: type[BaseException], model: Path, tmp_path: Path
) -> None:
    async def test(engine: AsyncEngine) -> None:
        async def failing() -> None:
            await engine.generate(Request("f", TokenPrompt(make_ids(300)), greedy(4)), throwing(kind))

        failed, answered = await asyncio.gather(failing(), complete(engine, seed=1), return_exceptions=True)
        assert "the trie is full" in str(failed)
        assert isinstance(answered, list) and len(answered) == 4

    run(test, engine_on(model, tmp_path / "cache"))


@pytest.mark.parametrize("kind", SOME)
def test_the_engine_itself(kind: type[BaseException], model: Path, tmp_path: Path) -> None:
    """Those who wait are told, and closing returns."""

    async def test(engine: AsyncEngine) -> None:
        def fail() -> None:
            assert engine._thread.engine is not None
            engine._thread.engine.step = throwing(kind)  # type: ignore[method-assign]

        engine._thread.post(fail)
        with pytest.raises(EngineStopped):
            await complete(engine)
        assert isinstance(engine.failure, Exception) and not engine.ready

    run(test, engine_on(model, tmp_path / "cache"))


def test_a_worker_for_which_the_system_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails; the next one is read."""

    async def test() -> None:
        workers = Workers(1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", throwing(RuntimeError))
            with pytest.raises(Exception, match="no thread can be started"):
                await workers.run(1, lambda has_ended: 1)
        assert await asyncio.wait_for(workers.run(1, lambda has_ended: 2), SECONDS) == 2
        await workers.close(EngineStopped("over"))  # type: ignore[arg-type]

    asyncio.run(test())

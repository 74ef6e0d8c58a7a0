from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.report import Update
from agentcache.api.request import Request
from agentcache.api.start_progress import Measuring, Phase, StartProgress
from agentcache.engine.messages import LookAgain, MeasurePrecision, RelieveMemory
from agentcache.engine.open import describe_model, open_engine
from agentcache.errors import AgentCacheError, Conflict, EngineStopped, StoreError
from agentcache.gateway.adapter_loader import AdapterLoader
from agentcache.gateway.agent_turns import AgentTurns
from agentcache.gateway.completions import Completions
from agentcache.gateway.engine_thread import EngineThread
from agentcache.gateway.operations import Operation
from agentcache.gateway.prompt_workers import Workers, shutting_down
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.loader import LoadedModel
from agentcache.settings.config import Config
from agentcache.settings.tables import AdapterFolder
from agentcache.system.malloc import keep_freed_memory
from agentcache.system.memory import Level, PressureGauge, PressureReading, SystemMemory
from agentcache.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("agentcache.engine")

MOST_ARCHIVES = 8
PERIOD_SECONDS = 1.0
REPEAT_SECONDS = 5.0  # readings show freed memory by then
MEASURE_SECONDS = 4.0  # at start; a longer measurement goes on between requests


class AsyncEngine:
    """The engine for asyncio: `start` it, then `generate` and `call`. Belongs to one event loop.

    With `warm_up`, a long measurement of the KV precision is postponed; then the engine is replaced, while calls wait.
    """

    def __init__(self, config: Config, *, warm_up: bool = False, system: SystemMemory | None = None) -> None:
        keep_freed_memory()  # before any thread starts
        self.config = config
        self._system = system or SystemMemory()
        self._watch: asyncio.Task[None] | None = None
        self._warm_up = warm_up
        self._path = config.model or str(embedded_model_path(Path(config.cache_dir).parent))
        self._progress = StartProgress()
        self._gate = Gate()
        self._measuring: Measuring | None = None
        self._failure: Exception | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._folders: dict[str, AdapterFolder] = {}
        self._thread = self._make_thread()
        self._workers = Workers(most_waiting=config.max_waiting_requests)
        self._archives = Workers(1, name="agentcache-archives", most_waiting=MOST_ARCHIVES)
        self._turns = AgentTurns()
        self._is_open = False
        self._tokenizer: Tokenizer | None = None
        self._model: ModelInfo | None = None
        self._adapters: AdapterLoader | None = None
        self._completions: Completions | None = None

    async def generate(self, request: Request, take: Callable[[Update], None]) -> None:
        """Run a request and call `take` with each update. Cancelling this cancels the request.

        With `Request.n` > 1, each answer ends with a report. Raises RequestError (before any update), Overloaded,
        EngineStopped.
        """
        async with self._gate.inside():
            completions = self._required(self._completions)
            await self._look_again(request.agent)
            await completions.generate(request, take)

    async def count_tokens(self, request: Request) -> int:
        """Number of prompt tokens. Raises InvalidRequest, ContextLengthExceeded."""
        async with self._gate.inside():
            completions = self._required(self._completions)
            await self._look_again(request.agent)
            return await completions.count_tokens(request)

    async def call(self, operation: Operation[T]) -> T:
        """Run an operation; its agents stay locked until it is done, even if the caller is cancelled."""
        async with self._gate.inside(), AsyncExitStack() as stack:
            await self._look_again(operation.existing)
            message = await operation.prepare(self._thread.view, self.adapters, self._archives)
            # A global order prevents deadlocks between two forks.
            locks = [self._turns.turn(agent_id) for agent_id in sorted(operation.locked)]
            turns = [await stack.enter_async_context(lock) for lock in locks]
            reply = self._thread.ask(message)
            for turn in turns:
                turn.lasts_until(reply)
            await asyncio.wait({reply})
            try:
                return reply.result()
            except StoreError:
                if turns and isinstance(self.failure, EngineStopped):  # the write did not fail
                    raise self.failure from None
                raise

    async def _look_again(self, agent_id: str | None) -> None:
        if agent_id is not None and agent_id in self._thread.view.agents.unavailable:
            await self._thread.ask(LookAgain(agent_id))

    async def load_adapter(self, folder: AdapterFolder) -> AdapterInfo:
        """Serve an adapter. Raises InvalidRequest, UnsupportedAdapter, Conflict."""
        async with self._gate.inside():
            if self.model.is_called(folder.name):
                raise Conflict(f"{folder.name!r} is the model's own name", param="name")
            info = await self.adapters.load(folder)
            self._folders[folder.name] = folder
            return info

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones finish. Raises NotFound."""
        async with self._gate.inside():
            self.adapters.unload(name)
            self._folders.pop(name, None)

    @property
    def starting(self) -> Phase | None:
        return self._progress.phase

    @property
    def measuring(self) -> Measuring | None:
        return self._measuring

    @property
    def ready(self) -> bool:
        return self._is_open and self.failure is None

    @property
    def failure(self) -> Exception | None:
        return self._failure or self._thread.failure

    @property
    def memory_pressure(self) -> Level:
        """The engine's level; `NORMAL` during a replacement."""
        return self._thread.view.memory_pressure if self._gate.is_open else Level.NORMAL

    @property
    def model(self) -> ModelInfo:
        model = self._required(self._model)
        if self._adapters is None or not self._gate.is_open:
            return model
        return replace(model, adapters=self._adapters.list())

    @property
    def adapters(self) -> AdapterLoader:
        return self._required(self._adapters)

    def _required(self, part: T | None) -> T:
        if part is None:
            why = "the model is not loaded yet" if self.failure is None else f"the engine failed: {self.failure}"
            raise EngineStopped(why)
        return part

    async def start(self) -> None:
        try:
            await self._thread.start()
            await self._open()
            for folder in self.config.adapters:
                await self.load_adapter(folder)
        except BaseException:
            await self.close()
            raise
        finally:
            self._progress.end()
        if self.config.memory_pressure:
            self._watch = asyncio.create_task(watch_pressure(never_failing(self._system.pressure), self._relieve))
        self._is_open = True
        if self._thread.view.model.is_provisional:
            self._measuring = Measuring(0)
            self._replacing = asyncio.create_task(self._choose_precision())

    def _make_thread(self, served: LoadedModel | None = None) -> EngineThread:
        return EngineThread(
            lambda thread: open_engine(
                self.config,
                self._path,
                thread.post,
                is_awaited=thread.is_awaited,
                hand_over=thread.hand_over,
                warm=self._warm_up,
                give_up=thread.give_up,
                measure_seconds=MEASURE_SECONDS if self._warm_up else math.inf,
                progress=self._progress,
                served=served,
            )
        )

    async def _open(self) -> None:
        served = self._thread.view.model
        is_new, self._tokenizer = served.tokenizer is not self._tokenizer, served.tokenizer
        if self._warm_up and is_new:
            await self._workers.run(0, lambda has_ended: served.tokenizer.start())
        model = describe_model(served, self.config)
        self._model = model if self._model is None else replace(model, adapters=self._model.adapters)
        self._adapters = AdapterLoader(self._thread, self.config.cache_dir / "weights.json")
        self._completions = Completions(self.config, self._thread, self._workers, self._turns, self._adapters)

    def _relieve(self, level: Level) -> None:
        if self._gate.is_open:
            self._thread.tell(RelieveMemory(level))

    async def close(self) -> None:
        """Cancel requests, finish writes and release the cache folder."""
        self._is_open = False
        if self._watch is not None:
            self._watch.cancel()
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        end = shutting_down()
        await asyncio.gather(self._close_engine(end), self._workers.close(end), self._archives.close(end))

    async def _close_engine(self, end: AgentCacheError) -> None:
        await self._stop_engine(end)
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def _stop_engine(self, end: AgentCacheError) -> None:
        adapters = [] if self._adapters is None else [self._adapters.close(end)]
        await asyncio.gather(self._thread.close(), *adapters)

    async def _choose_precision(self) -> None:
        """Measure between requests, then replace the engine or end the server."""
        try:
            measuring = Measuring(0)
            while measuring.chosen is None:
                await self._gate.emptied()
                measuring = await self._thread.ask(MeasurePrecision())
                self._measuring = measuring
        except Exception as error:  # a library's, too: /health must not report an ended search
            log.warning("the precision of keys and values was not measured: %s", error)
            self._measuring = None
            return
        async with self._gate.closed():
            log.info("keys and values are kept in %s from now on; the engine is opened again", measuring.chosen)
            try:
                await self._replace_engine()
            except Exception as error:
                log.exception("the engine could not be replaced")
                self._failure = error
        self._measuring = None

    async def _replace_engine(self) -> None:
        replaced = self._thread.engine
        assert replaced is not None
        served = replaced.loaded
        del replaced
        # For bodies that name adapters; their requests wait at the gate.
        self._model = replace(self.model, adapters=self.adapters.list())
        await self._stop_engine(shutting_down())
        self._thread = self._make_thread(served)
        # The server froze start-up objects, which include the old engine with its cache.
        gc.unfreeze()
        self._adapters = self._completions = None
        gc.collect()
        mx.clear_cache()
        await self._thread.start()
        await self._open()
        self._progress.end()
        for folder in self._folders.values():
            try:
                await self.adapters.load(folder)
            except AgentCacheError as error:
                log.warning("adapter %r is not served any more: %s", folder.name, error)
        if self._warm_up:
            gc.collect()
            gc.freeze()


class Gate:
    """Counts calls inside. Closes only when empty; later calls wait."""

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
        """Wait until it was empty; the caller must check again."""
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


async def watch_pressure(
    read: Callable[[], PressureReading],
    tell: Callable[[Level], None],
    *,
    gauge: PressureGauge | None = None,
    period: float = PERIOD_SECONDS,
    repeat: float = REPEAT_SECONDS,
) -> None:
    """Call `tell` on every change of level, and repeatedly under pressure."""
    gauge = gauge or PressureGauge()
    told, told_at = Level.NORMAL, 0.0
    while True:
        now = time.monotonic()
        level = gauge.update(read(), now)
        if level is not told or (level is not Level.NORMAL and now - told_at >= repeat):
            told, told_at = level, now
            tell(level)
        await asyncio.sleep(period)


def never_failing(read: Callable[[], PressureReading]) -> Callable[[], PressureReading]:
    """Make errors empty readings: a dead watch would go unnoticed."""

    def reading() -> PressureReading:
        try:
            return read()
        except Exception:
            log.exception("the memory pressure cannot be read")
            return PressureReading()

    return reading

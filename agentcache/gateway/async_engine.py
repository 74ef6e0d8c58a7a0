"""The asyncio interface of the engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx

from agentcache.agents.disk import Saved
from agentcache.api.model import AdapterInfo, ModelInfo
from agentcache.api.policy import Policy
from agentcache.api.report import AgentInfo, RestoreReport, Update
from agentcache.api.request import Request
from agentcache.api.start_progress import Measuring, Phase, StartProgress
from agentcache.api.stats import CacheStats
from agentcache.engine.messages import (
    CheckIntegrity,
    ClearCache,
    CreateAgent,
    DeleteAgent,
    EvictAgent,
    ForkAgent,
    ImportAgent,
    ListAgents,
    LookAgain,
    MeasurePrecision,
    Message,
    ReadStats,
    RelieveMemory,
    RestoreAgent,
    SaveAgent,
    ShowAgent,
    UseResponses,
)
from agentcache.engine.open import open_engine
from agentcache.errors import AgentCacheError, Conflict, EngineStopped, StoreError
from agentcache.gateway.adapter_loader import AdapterLoader
from agentcache.gateway.agent_turns import AgentTurns, Turn
from agentcache.gateway.completions import Completions
from agentcache.gateway.describe_model import describe_model
from agentcache.gateway.engine_thread import EngineThread
from agentcache.gateway.gate import Gate
from agentcache.gateway.prepare import (
    agent_policy,
)
from agentcache.gateway.pressure_watch import never_failing, watch_pressure
from agentcache.gateway.prompt_workers import Workers, shutting_down
from agentcache.models.builtin.embedded import embedded_model_path
from agentcache.models.loader import LoadedModel
from agentcache.settings.adapters import AdapterFolder
from agentcache.settings.config import Config
from agentcache.store.archived_agent import read_archive
from agentcache.store.response_files import ResponseFiles
from agentcache.system.malloc import keep_freed_memory
from agentcache.system.memory import Level, SystemMemory
from agentcache.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("agentcache.engine")

MOST_ARCHIVES = 8  # that may wait to be read
MEASURE_SECONDS = 4.0  # limit at start; beyond it, serve in safe bits and measure between requests


def _through_gate(
    method: Callable[Concatenate[AsyncEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AsyncEngine, P], Coroutine[Any, Any, T]]:
    """Make a method wait while the engine is replaced, and block replacement while it runs."""

    @wraps(method)
    async def call(engine: AsyncEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with engine._gate.inside():
            return await method(engine, *args, **kwargs)

    return call


class AsyncEngine:
    """The engine for asyncio: `start` it, then `generate`. Belongs to one event loop.

    With `kv` "auto", the first start with a model measures the bits for keys and values. With `warm_up`, a measurement
    of more than a few seconds is postponed: the engine serves in 8 bits, measures while no request runs, and is then
    replaced by one on the same model. Calls wait during that. Agents stay; their KV in 8 bits is computed again.

    Args:
        warm_up: whether to start more slowly for a fast first request.
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

    # -- life -------------------------------------------------------------------------------------------------------

    def _make_thread(self, served: LoadedModel | None = None) -> EngineThread:
        """Make an engine's thread. `served` is the model of an engine that it replaces."""
        thread = EngineThread(
            lambda post: open_engine(
                self.config,
                self._path,
                post,
                is_awaited=thread.is_awaited,
                warm=self._warm_up,
                give_up=thread.give_up,
                measure_seconds=MEASURE_SECONDS if self._warm_up else math.inf,
                progress=self._progress,
                served=served,
            )
        )
        return thread

    async def start(self) -> None:
        """Load the model and adapters, and open the cache folder."""
        try:
            await self._start()
        finally:
            self._progress.end()
        if self.config.memory_pressure:
            self._watch = asyncio.create_task(watch_pressure(never_failing(self._system.pressure), self._relieve))
        self._is_open = True
        if self._thread.view.model.is_provisional:
            self._measuring = Measuring(0)
            self._replacing = asyncio.create_task(self._choose_precision())

    async def _start(self) -> None:
        await self._thread.start()
        try:
            await self._open()
            for folder in self.config.adapters:
                await self.load_adapter(folder)
        except BaseException:
            await self.close()
            raise

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
        """Cancel running requests, finish writes and release the cache folder."""
        self._is_open = False
        if self._watch is not None:
            self._watch.cancel()
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        end = shutting_down()
        await asyncio.gather(self._close_engine(end), self._workers.close(end), self._archives.close(end))

    async def _stop_engine(self, end: AgentCacheError) -> None:
        adapters = [] if self._adapters is None else [self._adapters.close(end)]
        await asyncio.gather(self._thread.close(), *adapters)

    async def _close_engine(self, end: AgentCacheError) -> None:
        await self._stop_engine(end)
        if self._tokenizer is not None:
            self._tokenizer.close()

    # -- the first start with a model ---------------------------------------------------------------------------------

    async def _choose_precision(self) -> None:
        try:
            measuring = Measuring(0)
            while measuring.chosen is None:
                await self._gate.emptied()
                measuring = await self._thread.ask(MeasurePrecision())
                self._measuring = measuring
        except Exception as error:  # also a library's: /health must not report a search that has ended
            log.warning("the precision of keys and values was not measured: %s", error)
            self._measuring = None
            return
        async with self._gate.closed():
            log.info("keys and values are kept in %s bits from now on; the engine is opened again", measuring.chosen)
            try:
                await self._replace_engine()
            except Exception as error:
                log.exception("the engine could not be replaced")
                self._failure = error
        self._measuring = None

    async def _replace_engine(self) -> None:
        """Open another engine on the same model and files. A failure ends the server (`failure`)."""
        replaced = self._thread.engine
        assert replaced is not None  # it has measured
        served = replaced.loaded
        del replaced
        # Bodies that name adapters can be parsed during this; their requests wait at the gate.
        self._model = replace(self.model, adapters=self.adapters.list())
        await self._stop_engine(shutting_down())
        self._thread = self._make_thread(served)
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

    @property
    def starting(self) -> Phase | None:
        """Current phase of a start, or None."""
        return self._progress.phase

    @property
    def measuring(self) -> Measuring | None:
        """Progress of the measurement while the engine serves in safe bits, or None."""
        return self._measuring

    @property
    def ready(self) -> bool:
        return self._is_open and self.failure is None

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine or prevented its start."""
        return self._failure or self._thread.failure

    @property
    def memory_pressure(self) -> Level:
        """The engine's level; `NORMAL` during a replacement."""
        return self._thread.view.memory_pressure if self._gate.is_open else Level.NORMAL

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineStopped("the model is not loaded yet")
        if self._adapters is None or not self._gate.is_open:
            return self._model
        return replace(self._model, adapters=self._adapters.list())

    @property
    def adapters(self) -> AdapterLoader:
        if self._adapters is None:
            raise EngineStopped("the model is not loaded yet")
        return self._adapters

    @property
    def _running(self) -> Completions:
        if self._completions is None:
            why = "the model is not loaded yet" if self.failure is None else f"the engine failed: {self.failure}"
            raise EngineStopped(why)
        return self._completions

    # -- completions ------------------------------------------------------------------------------------------------

    @_through_gate
    async def generate(self, request: Request, take: Callable[[Update], None]) -> None:
        """Run a request and call `take` with each of its updates. Cancelling this cancels the request.

        With `Request.n` > 1, each answer ends with a report. All but the first begin once the prompt is computed.

        Raises:
            RequestError: the request cannot run; before any update.
            Overloaded: too many requests wait, or the engine closed.
            EngineStopped: the engine failed.
        """
        running = self._running
        await self._look_again(request.agent)
        await running.generate(request, take)

    @_through_gate
    async def count_tokens(self, request: Request) -> int:
        """Number of prompt tokens. Raises InvalidRequest, ContextLengthExceeded."""
        running = self._running
        await self._look_again(request.agent)
        return await running.count_tokens(request)

    # -- agents -----------------------------------------------------------------------------------------------------

    @_through_gate
    async def agents(self) -> list[AgentInfo]:
        """All agents, sorted by id."""
        return await self._thread.ask(ListAgents())

    @_through_gate
    async def agent(self, agent_id: str) -> AgentInfo:
        """One agent. Raises NotFound."""
        await self._look_again(agent_id)
        return await self._thread.ask(ShowAgent(agent_id))

    @_through_gate
    async def create_agent(
        self, agent_id: str, *, adapter: str | None = None, policy: Policy | None = None, system: str | None = None
    ) -> AgentInfo:
        """Create an empty agent, durably. Its requests use the adapter unless they name another.

        Raises NotFound, InvalidRequest (adapter does not support the policy), Conflict.
        """
        chosen = agent_policy(self.adapters.get(adapter) if adapter is not None else None, policy)
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], CreateAgent(agent_id, adapter, chosen, system))
            return await self.agent(agent_id)

    @_through_gate
    async def import_agent(self, agent_id: str, path: str) -> AgentInfo:
        """Create an agent from a file of `agentcache export`. Errors leave everything unchanged.

        Raises:
            ArchiveRejected: damaged, no archive, or of another model or number of ranks.
            Conflict: the agent exists.
            StoreError: writing failed, or the disk budget cannot hold it.
        """
        served = self._thread.view.model
        archive = await self._archives.run(
            0,
            lambda has_ended: read_archive(Path(path), served.spec, served.names, agent_id, served.num_token_ids),
        )
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], ImportAgent(archive))
            return await self.agent(agent_id)

    @_through_gate
    async def fork_agent(
        self,
        agent_id: str,
        new_id: str,
        lineage: str | None = None,
        *,
        adapter: str | None = None,
        policy: Policy | None = None,
    ) -> AgentInfo:
        """Copy an agent (or one lineage), sharing every block. None keeps a setting.

        Raises NotFound, InvalidRequest (adapter does not support the policy), Conflict.
        """
        await self._look_again(agent_id)
        if new_id == agent_id:
            raise Conflict(f"agent {new_id!r} exists already", param="id")
        chosen = None
        if adapter is not None or policy is not None:
            named = (await self.agent(agent_id)).adapter if adapter is None else adapter
            chosen = agent_policy(self.adapters.get(named) if named is not None else None, policy)
        # A global order prevents deadlocks between two forks.
        first, second = sorted((agent_id, new_id))
        async with self._turns.turn(first) as one, self._turns.turn(second) as two:
            await self._save([one, two], ForkAgent(agent_id, new_id, lineage, adapter, chosen))
            return await self.agent(new_id)

    @_through_gate
    async def delete_agent(self, agent_id: str, lineage: str | None = None) -> None:
        """Delete an agent (or one lineage) in RAM and on disk. Raises NotFound."""
        await self._look_again(agent_id)
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], DeleteAgent(agent_id, lineage))

    @_through_gate
    async def save_agent(self, agent_id: str, lineage: str | None = None) -> AgentInfo:
        """Return once all data of an agent (or one lineage) is on disk. Raises NotFound, StoreError."""
        await self._look_again(agent_id)
        async with self._turns.turn(agent_id) as turn:
            await self._save([turn], SaveAgent(agent_id, lineage))
            return await self.agent(agent_id)

    @_through_gate
    async def restore_agent(self, agent_id: str, lineage: str | None = None) -> RestoreReport:
        """Load the blocks of an agent (or one lineage) from disk into RAM. Raises NotFound."""
        await self._look_again(agent_id)
        async with self._turns.turn(agent_id) as turn:
            return await _result([turn], self._thread.ask(RestoreAgent(agent_id, lineage)))

    @_through_gate
    async def evict_agent(self, agent_id: str, lineage: str | None = None, kind: str | None = None) -> AgentInfo:
        """Free an agent's RAM, of blocks of one `kind` (`base`, `residual`) or all. Files stay. Raises NotFound."""
        await self._look_again(agent_id)
        async with self._turns.turn(agent_id):
            await self._thread.ask(EvictAgent(agent_id, lineage, kind))
            return await self.agent(agent_id)

    async def _look_again(self, agent_id: str | None) -> None:
        if agent_id is not None and agent_id in self._thread.view.agents.unavailable:
            await self._thread.ask(LookAgain(agent_id))

    async def _save(self, turns: Sequence[Turn], message: Message[Saved]) -> None:
        saved = await _result(turns, self._thread.ask(message))
        if saved.error is not None:
            if isinstance(self.failure, EngineStopped):  # the write did not fail
                raise self.failure
            raise StoreError(saved.error)

    # -- stored responses -------------------------------------------------------------------------------------------

    @_through_gate
    async def use_responses(self, work: Callable[[ResponseFiles], T]) -> T:
        """Run `work` on the writer thread. Raises StoreError."""
        return await self._thread.ask(UseResponses(work))

    # -- adapters ---------------------------------------------------------------------------------------------------

    @_through_gate
    async def load_adapter(self, folder: AdapterFolder) -> AdapterInfo:
        """Serve an adapter. Raises InvalidRequest, UnsupportedAdapter, Conflict."""
        if self.model.is_called(folder.name):
            raise Conflict(f"{folder.name!r} is the model's own name", param="name")
        info = await self.adapters.load(folder)
        self._folders[folder.name] = folder
        return info

    @_through_gate
    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones finish. Raises NotFound."""
        self.adapters.unload(name)
        self._folders.pop(name, None)

    # -- numbers ----------------------------------------------------------------------------------------------------

    @_through_gate
    async def stats(self) -> CacheStats:
        return await self._thread.ask(ReadStats())

    @_through_gate
    async def check_integrity(self) -> None:
        """Raise BrokenInvariant unless every block is accounted for."""
        await self._thread.ask(CheckIntegrity())

    @_through_gate
    async def clear_cache(self) -> None:
        """Free all unread blocks in RAM; agents stay on disk."""
        await self._thread.ask(ClearCache())


async def _result(turns: Iterable[Turn], work: asyncio.Future[T]) -> T:
    """Await `work`. The turns last until it is done, even if the caller is cancelled."""
    for turn in turns:
        turn.lasts_until(work)
    await asyncio.wait({work})
    return work.result()

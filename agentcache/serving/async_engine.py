"""The engine as asyncio sees it. The only module that knows threads and event loops.

One thread owns the engine and MLX; the event loop's thread talks to it by posting functions, and gets updates back by
`call_soon_threadsafe`. Prompts are rendered, matched and tokenised on a worker thread, so that neither waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from agentcache.blocks.prefix_match import PromptMatch, Transcript
from agentcache.config import Config
from agentcache.errors import AgentCacheError, EngineStopped, NotFound, Overloaded, StoreError
from agentcache.models.embedded import embedded_model_path
from agentcache.serving.engine import Engine
from agentcache.serving.generation import Generation, Saved
from agentcache.serving.output import Output
from agentcache.serving.prepare import prepare
from agentcache.serving.request import AgentInfo, CacheStats, ModelInfo, Request, RestoreReport, Update

log = logging.getLogger("agentcache.engine")

T = TypeVar("T")

_QUEUE_FACTOR = 16  # waiting requests per running one before new ones are refused
_EMBEDDED_NAME = "agentcache-embedded"


class AsyncEngine:
    """Start it, then iterate over `generate`. All methods belong to one event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ready = False
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentcache-prepare")
        self._turns: dict[str, _Turns] = {}
        self._active = 0
        self._stopping = False
        self._engine: Engine | None = None
        self._model: ModelInfo | None = None
        self._thread: threading.Thread | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and open the cache folder; raises whatever stands in the way."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="agentcache-engine", daemon=True)
        self._thread.start()
        await started
        self.ready = True

    async def close(self) -> None:
        """Cancel what runs, write what is due, give the cache folder back."""
        if self._thread is None:
            return
        self.ready = False
        self._stopping = True
        self._post(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._worker.shutdown()
        self._thread = None

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineStopped("the model is not loaded yet")
        return self._model

    def _run(self, started: asyncio.Future[None]) -> None:
        """The engine thread."""
        try:
            engine = self._engine = Engine(self.config, self._model_path(), self._post)
            self._model = self._describe(engine)
            self._deliver(started)
            self._run_until_stopped(engine)
        except BaseException as error:
            self.failure = error
            self._deliver(started, error=error)
        finally:
            # MLX aborts the process at exit if a thread that used it has ended with its streams alive.
            mx.clear_streams()

    def _run_until_stopped(self, engine: Engine) -> None:
        try:
            self._serve(engine)
            engine.fail_all(_shutting_down())
        except BaseException as error:
            log.exception("the engine has failed")
            self.failure = error
            engine.fail_all(error)
        finally:
            engine.close()
            self._drain()

    def _serve(self, engine: Engine) -> None:
        while not self._stopping:
            self._drain() if engine.has_work else self._inbox.get()()
            if engine.has_work:
                engine.step()

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _model_path(self) -> str:
        return self.config.model or str(embedded_model_path(Path(self.config.cache_dir).parent))

    def _describe(self, engine: Engine) -> ModelInfo:
        loaded = engine.loaded
        name = loaded.path.name if self.config.model else _EMBEDDED_NAME
        return ModelInfo(
            id=self.config.model if self.config.model and not Path(self.config.model).is_dir() else name,
            name=name,
            path=str(loaded.path),
            fingerprint=loaded.fingerprint,
            model_type=loaded.spec.model_type,
            max_context=loaded.max_context,
            vocab_size=loaded.tokenizer.vocab_size,
            created=int(time.time()),
            has_chat_template=loaded.tokenizer.has_chat_template,
        )

    # -- between the threads ----------------------------------------------------------------------------------------

    def _post(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine thread between steps."""
        self._inbox.put(function)

    async def _call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine thread and return what it returns."""
        return await self._callback(lambda engine, done: done(function(engine)))

    async def _callback(self, function: Callable[[Engine, Callable[[T | BaseException], None]], None]) -> T:
        """Run `function` on the engine thread; the result is what it hands to its second argument, some time."""
        engine, future = self._alive(), self._loop.create_future()

        def done(result: T | BaseException) -> None:
            error = result if isinstance(result, BaseException) else None
            self._deliver(future, None if error else result, error)

        def run() -> None:
            try:
                function(engine, done)
            except AgentCacheError as error:
                done(error)

        self._post(run)
        return await future

    def _deliver(self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        def settle() -> None:
            if future.done():
                return
            future.set_exception(error) if error else future.set_result(result)

        self._loop.call_soon_threadsafe(settle)

    def _alive(self) -> Engine:
        if self.failure is not None:
            raise EngineStopped(f"the engine has failed: {self.failure}")
        if self._stopping:
            raise _shutting_down()
        if self._engine is None:
            raise EngineStopped("the engine is not running")
        return self._engine

    @asynccontextmanager
    async def _turn(self, agent_id: str | None) -> AsyncIterator[None]:
        """One at a time per agent, in order of arrival."""
        if agent_id is None:
            yield
            return
        turns = self._turns.setdefault(agent_id, _Turns())
        turns.users += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.users -= 1
            if not turns.users:
                self._turns.pop(agent_id, None)

    # -- completions ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[Update]:
        """Run a request. Ending the iteration early cancels it.

        Raises:
            RequestError: before the first update, if the request cannot run.
            Overloaded: too many requests wait, or the engine was closed before the request was done.
            EngineStopped: the engine failed before the request was done.
        """
        submitted_at = time.perf_counter()
        if self._active >= self.config.max_concurrent_requests * _QUEUE_FACTOR:
            raise Overloaded("too many requests are waiting; try again later")
        self._active += 1
        try:
            async with self._turn(request.agent):
                engine = self._alive()
                generation, updates = await self._submit(engine, request, submitted_at)
                try:
                    while True:
                        update = await updates.get()
                        if isinstance(update, BaseException):
                            raise update
                        yield update
                        if update.report is not None:
                            return
                finally:
                    self._post(lambda: engine.cancel(generation))
        finally:
            self._active -= 1

    async def _submit(
        self, engine: Engine, request: Request, submitted_at: float
    ) -> tuple[Generation, asyncio.Queue[Update | BaseException]]:
        match = await self._loop.run_in_executor(self._worker, self._prepare, engine, request)
        engine.check(len(match.transcript.ids), request.prompt_param)
        updates: asyncio.Queue[Update | BaseException] = asyncio.Queue()

        def emit(update: Update | BaseException) -> None:
            self._loop.call_soon_threadsafe(updates.put_nowait, update)

        generation = Generation(
            request=request,
            match=match,
            max_tokens=self._max_tokens(engine, request, len(match.transcript.ids)),
            output=Output(engine.loaded.tokenizer.detokenizer(after=match.transcript.ids[-1]), request.sampling.stop),
            emit=emit,
            submitted_at=submitted_at,
        )

        def add() -> None:
            try:
                engine.add(generation)
            except AgentCacheError as error:
                generation.emit(error)

        self._post(add)
        return generation, updates

    @staticmethod
    def _prepare(engine: Engine, request: Request) -> PromptMatch:
        agent = request.agent
        record = engine.agents.get(agent) if agent is not None and agent in engine.agents else None
        known = record.transcript if record else Transcript.empty()
        transcript = None if agent is None else known
        return prepare(request.prompt, transcript, record.system if record else None, engine.loaded.tokenizer)

    @staticmethod
    def _max_tokens(engine: Engine, request: Request, num_prompt_tokens: int) -> int:
        room = min(engine.loaded.max_context, engine.cache.slots.max_tokens()) - num_prompt_tokens
        return room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)

    # -- agents -----------------------------------------------------------------------------------------------------

    async def agents(self) -> list[AgentInfo]:
        """All agents, by id."""
        return await self._call(lambda engine: engine.memory.list())

    async def agent(self, agent_id: str) -> AgentInfo:
        """One agent; raises NotFound."""
        return await self._call(lambda engine: engine.memory.info(agent_id))

    async def create_agent(
        self, agent_id: str, *, adapter: str | None = None, policy: str = "exact", system: str | None = None
    ) -> AgentInfo:
        """Make an agent without memory, durably; raises Conflict."""
        if adapter is not None:
            raise NotFound(f"there is no adapter {adapter!r}", param="adapter")
        async with self._turn(agent_id):
            await self._save(lambda engine, done: engine.memory.create(agent_id, policy, system, done))
            return await self.agent(agent_id)

    async def fork_agent(self, agent_id: str, new_id: str) -> AgentInfo:
        """A new agent with the same memory, sharing every block; raises NotFound, Conflict."""
        async with self._turn(agent_id), self._turn(new_id if new_id != agent_id else None):
            await self._save(lambda engine, done: engine.memory.fork(agent_id, new_id, done))
            return await self.agent(new_id)

    async def delete_agent(self, agent_id: str) -> None:
        """Forget an agent in RAM and on disk; raises NotFound."""
        async with self._turn(agent_id):
            await self._save(lambda engine, done: engine.memory.delete(agent_id, done))

    async def save_agent(self, agent_id: str) -> AgentInfo:
        """Return when everything the agent has is on disk; raises NotFound, StoreError."""
        async with self._turn(agent_id):
            await self._save(lambda engine, done: engine.memory.save(agent_id, done))
            return await self.agent(agent_id)

    async def restore_agent(self, agent_id: str) -> RestoreReport:
        """Bring an agent's blocks from disk into RAM; raises NotFound."""
        async with self._turn(agent_id):
            return await self._callback(lambda engine, done: engine.memory.restore(agent_id, done))

    async def evict_agent(self, agent_id: str) -> AgentInfo:
        """Free the agent's RAM; it stays on disk; raises NotFound."""
        async with self._turn(agent_id):
            await self._call(lambda engine: engine.memory.evict(agent_id))
            return await self.agent(agent_id)

    async def _save(self, function: Callable[[Engine, Callable[[Saved], None]], None]) -> None:
        saved: Saved = await self._callback(function)
        if saved.error is not None:
            raise StoreError(saved.error)

    # -- numbers ----------------------------------------------------------------------------------------------------

    async def stats(self) -> CacheStats:
        return await self._call(lambda engine: engine.stats())

    async def check_integrity(self) -> None:
        """Raises BrokenInvariant unless every block is accounted for."""
        await self._call(lambda engine: engine.cache.check_integrity())

    async def clear_cache(self) -> None:
        """Free all RAM that nobody is reading; agents stay on disk."""
        await self._call(lambda engine: engine.clear())


def _shutting_down() -> Overloaded:
    return Overloaded("the server is shutting down", code="shutting_down")


class _Turns:
    """The lock of one agent and how many wait for it or hold it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0

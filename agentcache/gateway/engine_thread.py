"""The thread that owns the engine and MLX, and the way to it and back for the thread of an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

from agentcache.engine.engine import Engine
from agentcache.errors import AgentCacheError, EngineStopped, Overloaded
from agentcache.report import Update

log = logging.getLogger("agentcache.engine")

T = TypeVar("T")
Post = Callable[[Callable[[], None]], None]
Receive = Callable[[Update | BaseException], None]


class EngineThread:
    """Runs an engine's steps. Its methods belong to one event loop, but for those that say otherwise.

    Args:
        open_engine: makes the engine; called on the thread with a function that posts to it.

    Attributes:
        failure: what ended the engine, or kept it from starting.
    """

    def __init__(self, open_engine: Callable[[Post], Engine]) -> None:
        self.failure: BaseException | None = None
        self.engine: Engine | None = None
        self._open_engine = open_engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[tuple[Receive, Update | BaseException]] = []
        self._waiters: set[Callable[[BaseException], None]] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the engine; raises whatever stands in the way."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="agentcache-engine", daemon=True)
        self._thread.start()
        await started

    async def close(self) -> None:
        """Cancel what runs, write what is due, give the cache folder back."""
        if self._thread is None:
            return
        self._stopping = True
        self.post(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    def alive(self) -> Engine:
        """The engine; raises EngineStopped if there is none or it has failed, Overloaded if it is about to stop."""
        if self.failure is not None:
            raise EngineStopped(f"the engine has failed: {self.failure}")
        if self._stopping:
            raise shutting_down()
        if self.engine is None:
            raise EngineStopped("the engine is not running")
        return self.engine

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            engine = self.engine = self._open_engine(self.post)
            self._deliver(started)
            self._run_until_stopped(engine)
        except BaseException as error:
            self.failure = error
            self._deliver(started, error=error)
        finally:
            # MLX aborts the process at exit if a thread that used it has ended with its streams alive.
            mx.clear_streams()

    def _run_until_stopped(self, engine: Engine) -> None:
        end: AgentCacheError = shutting_down()
        try:
            self._serve(engine)
            engine.drop_all(end)
        except BaseException as error:
            log.exception("the engine has failed")
            self.failure = error
            end = EngineStopped(f"the engine has failed: {error}")
            engine.fail_all(end)
        try:
            self._close(engine)
        finally:
            self.hand_over()
            self._loop.call_soon_threadsafe(self._tell_waiters, end)

    def _serve(self, engine: Engine) -> None:
        while not self._stopping:
            # Not what comes meanwhile: it could keep those who run waiting for long.
            for _ in range(self._inbox.qsize() if engine.has_work else 1):
                self._inbox.get()()
            if engine.has_work:
                engine.step()
            self.hand_over()

    def _close(self, engine: Engine) -> None:
        """Have turns that are being saved become safe, and what nobody names deleted; then give the folder back."""
        try:
            self.hand_over()
            while engine.is_writing:
                self._inbox.get()()
                self.hand_over()
        finally:
            engine.close()
            self._drain()

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    # -- to the thread ------------------------------------------------------------------------------------------------

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine's thread between steps. From any thread."""
        self._inbox.put(function)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine's thread and return what it returns."""
        return await self.begin(lambda engine, done: done(function(engine)))

    def begin(self, function: Callable[[Engine, Callable[[T | BaseException], None]], None]) -> asyncio.Future[T]:
        """Run `function` on the engine's thread; the result is what it hands to its second argument, some time."""
        engine = self.alive()
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: T | BaseException) -> None:
            error = result if isinstance(result, BaseException) else None
            self._deliver(future, None if error else result, error)

        def run() -> None:
            try:
                function(engine, done)
            except AgentCacheError as error:
                done(error)

        def tell(end: BaseException) -> None:
            if not future.done():
                future.set_exception(end)

        self.tell_of_the_end(tell, until=future)
        self.post(run)
        return future

    # -- and back -----------------------------------------------------------------------------------------------------

    def send(self, receive: Receive, update: Update | BaseException) -> None:
        """Have the event loop call `receive` with an update when the step is done. On the engine's thread only.

        All of a step at once: waking the event loop costs more than the updates themselves.
        """
        self._outbox.append((receive, update))

    def hand_over(self) -> None:
        """Let go of what was sent by now, not only at the step's end. On the engine's thread only."""
        if self._outbox:
            updates, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_hand_out, updates)

    def tell_of_the_end(self, tell: Callable[[BaseException], None], *, until: asyncio.Future[Any]) -> None:
        """Call `tell` if the engine ends before `until` is done: there may be waiters that it does not know of."""

        def forget(done: asyncio.Future[Any]) -> None:
            self._waiters.discard(tell)
            if not done.cancelled():
                done.exception()  # who would be told of it may have left

        self._waiters.add(tell)
        until.add_done_callback(forget)

    def _tell_waiters(self, end: BaseException) -> None:
        for tell in list(self._waiters):
            tell(end)

    def _deliver(self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        def settle() -> None:
            if future.done():
                return
            future.set_exception(error) if error else future.set_result(result)

        self._loop.call_soon_threadsafe(settle)


def _hand_out(updates: list[tuple[Receive, Update | BaseException]]) -> None:
    for receive, update in updates:
        receive(update)


def shutting_down() -> Overloaded:
    """What those are told who come too late, or wait for too long."""
    return Overloaded("the server is shutting down", code="shutting_down")

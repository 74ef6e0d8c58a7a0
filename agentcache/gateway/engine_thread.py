from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from agentcache.engine.engine import Engine
from agentcache.engine.messages import Message, dispatch
from agentcache.engine.view import EngineView
from agentcache.errors import AgentCacheError, EngineStopped
from agentcache.gateway.prompt_workers import shutting_down
from agentcache.ranks.lost import lost_rank
from agentcache.system.threads import as_exception, start_thread

log = logging.getLogger("agentcache.engine")
T = TypeVar("T")

Receive = Callable[[Any], None]

_LOOK_SECONDS = 0.005


class EngineThread:
    """The thread that owns the engine and MLX. Belongs to one event loop, unless noted.

    `open_engine` runs on the thread; `engine` is for it only.
    """

    def __init__(self, open_engine: Callable[[EngineThread], Engine]) -> None:
        self.failure: Exception | None = None  # ended the engine or prevented its start
        self.engine: Engine | None = None
        self._open_engine = open_engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[tuple[Receive, Any]] = []
        self._view: EngineView | None = None
        self._waiters: set[Callable[[BaseException], None]] = set()
        self._stopping = False
        self._is_stuck = False
        self._thread: threading.Thread | None = None
        self._started: asyncio.Future[None] | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started = self._started = self._loop.create_future()
        self._thread = start_thread("agentcache-engine", partial(self._run, started), partial(self._died, started))
        await started

    async def close(self) -> None:
        if self._thread is None or self._is_stuck:
            return
        self._stopping = True
        self.post(lambda: None)
        thread = self._thread  # another task may close, too
        while thread.is_alive():  # join would block the loop or need a thread
            await asyncio.sleep(_LOOK_SECONDS)
        self._thread = self.engine = None

    @property
    def view(self) -> EngineView:
        """The latest view. Raises EngineStopped, or Overloaded while shutting down."""
        if isinstance(self.failure, EngineStopped):
            raise self.failure
        if self.failure is not None:
            raise EngineStopped(f"the engine has failed: {self.failure}")
        if self._stopping:
            raise shutting_down()
        if self._view is None:
            raise EngineStopped("the engine is not running")
        return self._view

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            engine = self.engine = self._open_engine(self)
            self._view = engine.view()
            self._deliver(started)
            self._run_until_stopped(engine)
        except BaseException as error:
            if self.failure is not None:
                log.exception("the engine has not closed in order")
            self._died(started, as_exception(error))
        finally:
            # MLX aborts the process at exit if a thread that used it ends with live streams.
            mx.clear_streams()

    def _died(self, started: asyncio.Future[None], error: Exception) -> None:
        self._deliver(started, self._fail(error))

    def _fail(self, error: BaseException) -> Exception:
        if self.failure is None:
            self.failure = lost_rank(error) or as_exception(error)
        return self.failure

    def _run_until_stopped(self, engine: Engine) -> None:
        end: AgentCacheError = shutting_down()
        try:
            self._serve(engine)
            engine.drop_all(end)
            engine.rest(for_good=True)
        except BaseException as error:
            log.exception("the engine has failed")
            failure = self._fail(error)
            end = failure if isinstance(failure, EngineStopped) else EngineStopped(f"the engine has failed: {failure}")
            engine.fail_all(end)
        try:
            self._close(engine)
        finally:
            self.hand_over()
            self._loop.call_soon_threadsafe(self._tell_waiters, end)

    def _serve(self, engine: Engine) -> None:
        while not self._stopping:
            # Handle only messages that are already queued, so that new ones cannot delay running requests.
            for _ in range(self._inbox.qsize() if engine.has_work else 1):
                try:
                    self._next(engine)()
                except BaseException as error:  # not attributable to one request
                    engine.fail(list(engine.requests), error)
            self.hand_over()
            if engine.has_work:
                engine.step()
                self.hand_over()
            engine.rest()

    def _next(self, engine: Engine) -> Callable[[], None]:
        try:
            return self._inbox.get(timeout=engine.seconds_to_rest())
        except queue.Empty:
            return engine.rest

    def _close(self, engine: Engine) -> None:
        try:
            self.hand_over()
            engine.restorer.cease()
            while engine.is_writing or engine.restorer.is_reading:
                self._inbox.get()()
                self.hand_over()
        finally:
            engine.close()
            while not self._inbox.empty():
                self._inbox.get()()

    def give_up(self, failure: EngineStopped) -> None:
        """Declare the engine lost: its thread waits for ever. For any thread."""
        self.failure, self._is_stuck = failure, True
        assert self._started is not None
        self._deliver(self._started, failure)
        self._loop.call_soon_threadsafe(self._tell_waiters, failure)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine thread between steps. For any thread."""
        self._inbox.put(function)

    def is_awaited(self) -> bool:
        """Whether functions are pending. For any thread."""
        return not self._inbox.empty()

    def tell(self, message: Message[Any], receive: Receive = lambda reply: None) -> None:
        """Send a message; `receive` gets the replies on the event loop."""
        engine = self.engine
        assert engine is not None
        self.post(lambda: dispatch(engine, message, partial(self._send, receive)))

    def ask(self, message: Message[T]) -> asyncio.Future[T]:
        self.view  # noqa: B018 (raises if no engine would answer)
        future: asyncio.Future[T] = self._loop.create_future()

        def finish(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(as_exception(result))
            else:
                future.set_result(result)

        self.tell_of_the_end(finish, until=future)
        self.tell(message, finish)
        return future

    def _send(self, receive: Receive, reply: Any) -> None:
        # Replies of a step go together, after the view: waking the event loop is slow.
        self._outbox.append((receive, reply))

    def hand_over(self) -> None:
        """Deliver replies, and a new view before them. Engine thread only."""
        assert self.engine is not None
        self._view = self.engine.view()
        if self._outbox:
            replies, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_hand_out, replies)

    def tell_of_the_end(self, tell: Callable[[BaseException], None], *, until: asyncio.Future[Any]) -> None:
        """Call `tell` if the engine ends before `until` is done."""

        def forget(done: asyncio.Future[Any]) -> None:
            self._waiters.discard(tell)
            if not done.cancelled():
                done.exception()  # mark as retrieved: the waiter may have left

        self._waiters.add(tell)
        until.add_done_callback(forget)

    def _tell_waiters(self, end: BaseException) -> None:
        _hand_out([(tell, end) for tell in self._waiters])

    def _deliver(self, future: asyncio.Future[None], error: Exception | None = None) -> None:
        def finish() -> None:
            if future.done():
                return
            future.set_exception(error) if error else future.set_result(None)

        self._loop.call_soon_threadsafe(finish)


def _hand_out(replies: list[tuple[Receive, Any]]) -> None:
    for receive, reply in replies:
        try:
            receive(reply)
        except BaseException as error:  # later replies must still be delivered
            log.error("a reply of the engine was not taken", exc_info=error)

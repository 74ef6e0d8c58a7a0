"""Server-sent events, and their early end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from agentcache.api.report import Update
from agentcache.errors import BrokenInvariant, RequestTimedOut
from agentcache.system.threads import as_exception

T = TypeVar("T")
Generate = Callable[[Callable[[Update], None]], Coroutine[Any, Any, None]]

KEEP_ALIVE_SECONDS = 10.0

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # json.dumps makes an encoder per call
_ANY_TEXT = "\x00"
_BEHIND = 32  # queued updates; beyond, updates are merged
_TOGETHER = 256  # tokens in a merged update
# Tokens and candidates at which the stream ends. A token without logprobs counts once.
_MOST_PENDING = 50_000


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encode one event. ASCII only: some clients also split lines at U+2028 and U+0085."""
    line = f"data: {encode(data)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


class TextEvents:
    """Events that differ only in one text; the rest is encoded once.

    Args:
        event_of: from a text to its event, with no `_ANY_TEXT` behind the text.
    """

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        self._before, _, self._after = event_of(_ANY_TEXT).rpartition(encode(_ANY_TEXT).encode())

    def event(self, text: str) -> bytes:
        return self._before + encode(text).encode() + self._after


def timed_out() -> RequestTimedOut:
    return RequestTimedOut("The request was not done within its time limit.")


def too_slow() -> RequestTimedOut:
    return RequestTimedOut("The answer was not read in time.", code="client_too_slow")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client leaves. The body must have been read.

    Raises:
        ClientDisconnect: `work` has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect()
        return working.result()
    finally:
        await _end(leaving)
        await _end(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # avoids asyncio's report of an unretrieved exception


class Backlog:
    """A queue of updates that merges them when it is long."""

    def __init__(self) -> None:
        self._pending: deque[Update | Exception | None] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        return self._size > _MOST_PENDING

    def put(self, update: Update | Exception | None) -> None:
        """Add an update, an error, or None for a keep-alive."""
        if isinstance(update, Update):
            self._size += _size(update)
        if len(self._pending) >= _BEHIND:
            last = self._pending[-1]
            if update is None:
                return
            if isinstance(last, Update) and isinstance(update, Update) and _can_merge(last, update):
                self._pending[-1] = _merged(last, update)
                return
        self._pending.append(update)

    def pop(self) -> Update | Exception | None:
        """Pop the next item; must not be empty."""
        update = self._pending.popleft()
        if isinstance(update, Update):
            self._size -= _size(update)
        return update


def _size(update: Update) -> int:
    return len(update.token_ids) + sum(1 + len(token.top) for token in update.logprobs)


def _can_merge(first: Update, second: Update) -> bool:
    return (
        first.choice == second.choice
        and len(first.token_ids) + len(second.token_ids) <= _TOGETHER
        and _is_plain(first)
        and _is_plain(second)
    )


def _is_plain(update: Update) -> bool:
    """Whether the update has only text and tokens."""
    others = (update.prompt_token_ids, update.prompt_logprobs, update.finish_reason, update.stop_string, update.report)
    return all(each is None for each in (*others, update.prompt_end))


def _merged(first: Update, second: Update) -> Update:
    offset = len(first.text)
    return replace(
        first,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        markers=first.markers + tuple((offset + at, name) for at, name in second.markers),
    )


class UpdateStream:
    """Updates of one completion, errors and keep-alives. One timer for silence and deadline: updates need none.

    Args:
        generate: runs the completion; cancelled by `close`.
        interval: seconds of silence before a keep-alive.
        deadline: on the loop's clock.
        ended: called when the engine has finished, even with unread updates.
    """

    def __init__(
        self,
        generate: Generate,
        interval: float,
        deadline: float | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog()
        self._arrived = asyncio.Event()
        self._interval = interval
        self._deadline = deadline
        self._last = self._loop.time()
        self._timer = self._set_timer()
        self._running = asyncio.ensure_future(self._run(generate))
        self._running.add_done_callback(lambda running: ended())

    async def next(self) -> Update | None:
        """Return the next update; None after `interval` without one.

        Raises RequestTimedOut after the deadline, and the engine's error.
        """
        while not self._backlog:
            self._arrived.clear()
            await self._arrived.wait()
        update = self._backlog.pop()
        if isinstance(update, Exception):
            raise update
        return update

    def _put(self, update: Update | Exception | None) -> None:
        self._backlog.put(update)
        self._arrived.set()

    async def close(self) -> None:
        self._timer.cancel()
        await _end(self._running)

    async def _run(self, generate: Generate) -> None:
        try:
            await generate(self._take)
            self._put(BrokenInvariant("a completion ended without its last update"))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._put(as_exception(error))

    def _take(self, update: Update) -> None:
        self._last = self._loop.time()
        self._put(update)
        if self._backlog.is_full:
            self._end_with(too_slow())

    def _set_timer(self) -> asyncio.TimerHandle:
        silent_at = self._last + self._interval
        return self._loop.call_at(silent_at if self._deadline is None else min(silent_at, self._deadline), self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._deadline is not None and now >= self._deadline:
            self._end_with(timed_out())
            return
        if now >= self._last + self._interval:
            self._put(None)
            self._last = now
        self._timer = self._set_timer()

    def _end_with(self, error: Exception) -> None:
        """End the completion at once: a client that reads nothing would not ask for it."""
        self._running.cancel()
        self._put(error)

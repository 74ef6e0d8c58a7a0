"""Runs completions; answers whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.report import Update
from agentcache.api.request import Request
from agentcache.errors import BrokenInvariant, RequestTimedOut
from agentcache.server.compat import EventStream
from agentcache.server.context import Context, context_of, end, name_agent, until_disconnect
from agentcache.server.engine import Engine
from agentcache.server.errors import WireError, wire_error
from agentcache.server.metrics import note_model, note_usage
from agentcache.server.reply import Choices, Completion
from agentcache.system.threads import as_exception

Events = Iterable[bytes]

Generate = Callable[[Callable[[Update], None]], Coroutine[Any, Any, None]]

KEEP_ALIVE_SECONDS = 10.0

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # quicker than json.dumps
_ANY_TEXT = "\x00"
_BEHIND = 32  # queued updates; later ones are merged
_TOGETHER = 256  # tokens in a merged update
# Queued tokens and candidates that end the stream.
_MOST_PENDING = 50_000


class CompletionWriter(Protocol):
    def begin(self, first: Update | None) -> Events:
        """`first` is None if the first update is late."""

    def write(self, update: Update) -> Events: ...

    def keep_alive(self) -> bytes: ...

    def end(self, completions: Sequence[Completion]) -> Events:
        """The last events."""

    def fail(self, error: WireError) -> Events: ...


class Reply(Protocol):
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...

    def writer(self) -> CompletionWriter: ...


# Called before an answer ends; the writer is None without a stream.
Finish = Callable[[Engine, Sequence[Completion], CompletionWriter | None], Awaitable[None]]


@dataclass(frozen=True)
class Job:
    """One call: a request per prompt (one for streams). `timeout` in seconds; None for the server's limit."""

    requests: Sequence[Request]
    reply: Reply
    stream: bool
    timeout: float | None = None
    finish: Finish | None = None


async def answer(request: HttpRequest, job: Job) -> Response:
    context = context_of(request)
    name_agent(request, job.requests[0].agent)
    note_model(request, job.requests[0].adapter or context.engine.model.id)
    if job.requests[0].agent is None:
        context.clients.note_unkept(request.headers.get("user-agent", ""))
    deadline = _deadline(context, job.timeout)
    if job.stream:
        return await _stream(request, context, job, deadline)
    completions = await until_disconnect(request.receive, _collect_all(context, job.requests, deadline))
    flat = [choice for choices in completions for choice in choices]
    note_usage(request, flat, job.requests[0].n)
    context.last_turns.note(flat[0].final_report)
    if job.finish is not None:
        await job.finish(context.engine, flat, None)
    return JSONResponse(job.reply.whole(flat))


async def collect(context: Context, request: Request, timeout: float | None = None) -> Completion:
    """Run one completion; cancelled with this task."""
    [completion] = await _collect(context, request, _deadline(context, timeout))
    return completion


def _deadline(context: Context, timeout: float | None) -> float | None:
    limits = [limit for limit in (context.config.request_timeout, timeout) if limit is not None]
    return asyncio.get_running_loop().time() + min(limits) if limits else None


async def _collect_all(context: Context, requests: Sequence[Request], deadline: float | None) -> list[list[Completion]]:
    permits = asyncio.Semaphore(context.config.max_concurrent_requests)

    async def run(request: Request) -> list[Completion]:
        async with permits:
            return await _collect(context, request, deadline)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


async def _collect(context: Context, request: Request, deadline: float | None) -> list[Completion]:
    choices = Choices(request.n)
    try:
        async with asyncio.timeout_at(deadline) as limit:
            await context.engine.generate(request, context.metrics.measured(choices.add))
    except TimeoutError:
        if limit.expired():
            raise timed_out() from None
        raise
    return choices.completions


async def _stream(request: HttpRequest, context: Context, job: Job, deadline: float | None) -> Response:
    # The answer begins after the first update or the keep-alive interval: a refusal gets its own status.
    source = UpdateStream(
        lambda take: context.engine.generate(job.requests[0], context.metrics.measured(take)),
        context.keep_alive_seconds,
        deadline,
        ended=request.state.free_place,
    )
    try:
        first = await until_disconnect(request.receive, source.next())
    except BaseException:
        await source.close()
        raise
    return EventStream(_events(request, job, source, first), source.close)


async def _events(
    request: HttpRequest, job: Job, source: UpdateStream, first: Update | None
) -> AsyncGenerator[bytes, None]:
    writer, choices = job.reply.writer(), Choices(job.requests[0].n)
    try:
        for event in writer.begin(first):
            yield event
        update = first
        while not choices.are_finished:
            if update is None:
                yield writer.keep_alive()
            else:
                choices.add(update)
                for event in writer.write(update):
                    yield event
            if not choices.are_finished:
                update = await source.next()
        note_usage(request, choices.completions, len(choices.completions))
        context_of(request).last_turns.note(choices.completions[0].final_report)
        if job.finish is not None:
            await job.finish(context_of(request).engine, choices.completions, writer)
        for event in writer.end(choices.completions):
            yield event
    except Exception as error:
        for event in writer.fail(wire_error(error)):
            yield event


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encode one event in ASCII: some clients split lines at U+2028 and U+0085."""
    line = f"data: {encode(data)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


class TextEvents:
    """Events that differ in one text; the rest is encoded once."""

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        self._before, _, self._after = event_of(_ANY_TEXT).rpartition(encode(_ANY_TEXT).encode())

    def event(self, text: str) -> bytes:
        return self._before + encode(text).encode() + self._after


def timed_out() -> RequestTimedOut:
    return RequestTimedOut("The request was not done within its time limit.")


class Backlog:
    """A queue; merges updates when it is long."""

    def __init__(self) -> None:
        self._pending: deque[Update | Exception | None] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        return self._size > _MOST_PENDING

    def put(self, update: Update | Exception | None) -> None:
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
    """Updates, errors and keep-alives of one completion.

    `interval`: seconds of silence before a keep-alive. `deadline`: on the loop's clock. `ended`: called when the engine
    is done, even with unread updates.
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
        """Return the next update, or None for a keep-alive.

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
        await end(self._running)

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
            self._end_with(RequestTimedOut("The answer was not read in time.", code="client_too_slow"))

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
        self._running.cancel()
        self._put(error)

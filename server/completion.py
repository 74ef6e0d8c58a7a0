"""Runs completions and answers them, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.api.report import Update
from agentcache.api.request import Request
from agentcache.server.compat import EventStream
from agentcache.server.context import Context, context_of, name_agent
from agentcache.server.engine import Engine
from agentcache.server.errors import WireError, wire_error
from agentcache.server.reply import Choices, Completion
from agentcache.server.request_log import note_model, note_usage
from agentcache.server.stream import UpdateStream, timed_out, until_disconnect

Events = Iterable[bytes]


class CompletionWriter(Protocol):
    """Writes one stream in a dialect."""

    def begin(self, first: Update | None) -> Events:
        """First events. `first`: the next update for `write`; None if it is late."""

    def write(self, update: Update) -> Events: ...

    def keep_alive(self) -> bytes: ...

    def end(self, completions: Sequence[Completion]) -> Events:
        """Last events."""

    def fail(self, error: WireError) -> Events: ...


class Reply(Protocol):
    """Writes a whole answer in a dialect."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...

    def writer(self) -> CompletionWriter: ...


class Finish(Protocol):
    """Hook before the end of an answer is sent."""

    async def __call__(
        self, engine: Engine, completions: Sequence[Completion], writer: CompletionWriter | None, /
    ) -> None: ...


@dataclass(frozen=True)
class Job:
    """One call: a request per prompt (one for streams) and its reply.

    Args:
        timeout: seconds; None for the server's limit.
    """

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
    """Run one completion; cancelling this cancels the request."""
    [completion] = await _collect(context, request, _deadline(context, timeout))
    return completion


def _deadline(context: Context, timeout: float | None) -> float | None:
    limits = [limit for limit in (context.config.request_timeout, timeout) if limit is not None]
    return asyncio.get_running_loop().time() + min(limits) if limits else None


async def _collect_all(context: Context, requests: Sequence[Request], deadline: float | None) -> list[list[Completion]]:
    """Run requests, `max_concurrent_requests` at a time; the first failure cancels the rest."""
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
    """Wait for the first update or the keep-alive interval, so that a refusal gets its own status."""
    generate = partial(context.engine.generate, job.requests[0])
    source = UpdateStream(
        lambda take: generate(context.metrics.measured(take)),
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

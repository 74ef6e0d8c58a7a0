"""Runs parsed completions and answers them, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from agentcache.server.context import context_of, engine_of
from agentcache.server.engine import Engine
from agentcache.server.errors import wire_error
from agentcache.server.reply import Completion, accounting
from agentcache.server.shapes import Shape
from agentcache.server.stream import DONE, EventStream, UpdateStream, close, event, until_disconnect
from agentcache.serving.request import Request, TokenLogprob


@dataclass(frozen=True)
class Job:
    """One call: a request per prompt, and how to answer.

    Args:
        id: the answer's id; on every chunk of a stream.
        model: the served model's id.
        usage: whether a stream ends with a chunk of `usage` and `agentcache`.
    """

    id: str
    model: str
    requests: Sequence[Request]
    shape: Shape
    stream: bool
    usage: bool
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


async def answer(request: HttpRequest, job: Job) -> Response:
    engine = engine_of(request)
    if job.stream:
        return await _stream(request, engine, job)
    completions = await until_disconnect(request.receive, _collect_all(engine, job))
    return JSONResponse(_whole(job, completions))


async def collect(engine: Engine, request: Request) -> Completion:
    """The whole completion; cancelling this cancels the generation."""
    completion = Completion()
    updates = engine.generate(request)
    try:
        async for update in updates:
            completion.add(update)
    finally:
        await close(updates)
    return completion


async def _collect_all(engine: Engine, job: Job) -> list[Completion]:
    return [await collect(engine, request) for request in job.requests]


def _whole(job: Job, completions: Sequence[Completion]) -> dict[str, Any]:
    choices = [
        job.shape.choice(index, completion) | (completion.token_id_fields() if job.return_token_ids else {})
        for index, completion in enumerate(completions)
    ]
    return job.envelope(job.shape.object, choices) | accounting([c.final_report for c in completions])


async def _stream(request: HttpRequest, engine: Engine, job: Job) -> Response:
    """Waits for the first update before the response begins, so that a refusal still gets its own status.

    When the first update takes longer than the keep-alive interval, the stream begins without it.
    """
    source = UpdateStream(engine.generate(job.requests[0]))
    interval = context_of(request).keep_alive_seconds
    try:
        await until_disconnect(request.receive, source.begin(interval))
    except BaseException:
        await source.close()
        raise
    return EventStream(_events(job, source, interval), source)


async def _events(job: Job, source: UpdateStream, interval: float) -> AsyncGenerator[ServerSentEvent, None]:
    completion = Completion()
    try:
        yield _chunk(job, job.shape.first())
        async for piece in _pieces(job.shape, source, interval, completion):
            yield _chunk(job, piece)
        yield _chunk(job, _last_piece(job, completion))
        if job.usage:
            reports = [completion.final_report]
            yield event(job.envelope(job.shape.chunk_object, []) | accounting(reports))
    except Exception as error:
        yield event(wire_error(error).body)
    yield DONE


async def _pieces(
    shape: Shape, source: UpdateStream, interval: float, completion: Completion
) -> AsyncGenerator[dict[str, Any], None]:
    """Choices with text or logprobs in them, and an empty one whenever the engine is silent for `interval`."""
    offset = 0
    waiting: list[TokenLogprob] = []  # logprobs of tokens whose text is not out yet
    while completion.finish_reason is None:
        if not await source.wait(interval):
            yield shape.piece("", (), offset)
            continue
        update = source.take()
        completion.add(update)
        waiting += update.logprobs
        if update.text or (waiting and update.finish_reason):
            yield shape.piece(update.text, waiting, offset)
            offset += sum(len(token.text) for token in waiting)
            waiting = []


def _last_piece(job: Job, completion: Completion) -> dict[str, Any]:
    last = job.shape.piece("", (), 0) | {"finish_reason": completion.finish_reason}
    return last | (completion.token_id_fields() if job.return_token_ids else {})


def _chunk(job: Job, choice: dict[str, Any]) -> ServerSentEvent:
    chunk = job.envelope(job.shape.chunk_object, [choice])
    return event(chunk | {"usage": None} if job.usage else chunk)

"""Logs requests without their content."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.server.reply import Completion
from agentcache.text.json_values import json_string

log = logging.getLogger("agentcache.requests")
_CLIENT_LEFT = "499"  # as nginx


@dataclass(frozen=True)
class Usage:
    prompt: int
    generated: int
    cached: int


def note_model(request: Request, model: str) -> None:
    request.state.model = model


def note_usage(request: Request, completions: Sequence[Completion], n: int = 1) -> None:
    """Set the log line's token counts; `n` answers per prompt."""
    reports = [completion.final_report for completion in completions]
    request.state.usage = Usage(
        prompt=sum(report.prompt_tokens for report in reports[::n]),
        generated=sum(report.completion_tokens for report in reports),
        cached=sum(report.reused_tokens for report in reports[::n]),
    )


@dataclass(frozen=True)
class Answered:
    """A request's outcome.

    Args:
        route: pattern, not path: clients may invent paths.
        status: 499 if the client left.
        seconds: from the request's head to the answer's end.
    """

    method: str
    route: str
    status: str
    seconds: float


async def answer_then(
    note: Callable[[Answered], None], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app`, then `note`, even after an error or a disconnect."""
    status, begun = _CLIENT_LEFT, time.perf_counter()

    async def watched_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = str(message["status"])
        await send(message)

    try:
        await app(scope, receive, watched_send)
    finally:
        route = getattr(scope.get("route"), "path", "unknown")
        note(Answered(scope["method"], route, status, time.perf_counter() - begun))


class LogRequests:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        await answer_then(lambda answered: _log(answered, scope.get("state", {})), self.app, scope, receive, send)


def _log(answered: Answered, state: Mapping[str, Any]) -> None:
    usage = state.get("usage")
    tokens = ("-", "-", "-") if usage is None else (usage.prompt, usage.generated, usage.cached)
    what = f"{_word(answered.method)} {answered.route} {answered.status}"
    who = f"agent={_word(state.get('agent'))} model={_word(state.get('model'))}"
    cost = f"in={tokens[0]} out={tokens[1]} cached={tokens[2]} ms={answered.seconds * 1e3:.0f}"
    log.info("%s", f"{what} {who} {cost}")


def _word(value: str | None) -> str:
    if not value:
        return "-"
    return value if value.isprintable() and " " not in value else json_string(value)

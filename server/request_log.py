"""One line in the log for each request: what it cost, and nothing of what it said."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.server.reply import Completion

log = logging.getLogger("agentcache.requests")

_CLIENT_LEFT = 499  # as nginx writes it


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its prompts and answers."""

    prompt: int
    generated: int
    cached: int


def note_model(request: Request, model: str) -> None:
    """Has the log say which model or adapter was to answer."""
    request.state.model = model


def note_usage(request: Request, completions: Sequence[Completion], n: int = 1) -> None:
    """Has the log say what the answers cost, of which each prompt has `n`."""
    reports = [completion.final_report for completion in completions]
    request.state.usage = Usage(
        prompt=sum(report.prompt_tokens for report in reports[::n]),
        generated=sum(report.completion_tokens for report in reports),
        cached=sum(report.reused_tokens for report in reports[::n]),
    )


class LogRequests:
    """Middleware around what answers. Routes are logged as patterns, never as raw paths, which clients make up."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, begun = _CLIENT_LEFT, time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            log.info("%s", _line(scope, status, (time.perf_counter() - begun) * 1e3))


def _line(scope: Scope, status: int, milliseconds: float) -> str:
    state = scope.get("state", {})
    usage = state.get("usage")
    tokens = ("-", "-", "-") if usage is None else (usage.prompt, usage.generated, usage.cached)
    route = getattr(scope.get("route"), "path", "unknown")
    who = f"agent={_word(state.get('agent'))} model={_word(state.get('model'))}"
    cost = f"in={tokens[0]} out={tokens[1]} cached={tokens[2]} ms={milliseconds:.0f}"
    return f"{_word(scope['method'])} {route} {status} {who} {cost}"


def _word(value: str | None) -> str:
    """One word of the line, whatever is in it."""
    if not value:
        return "-"
    return value if value.isprintable() and " " not in value else json.dumps(value)

"""One line in the log for each request: what it cost, and nothing of what it said."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from agentcache.models.text.json_values import json_string
from agentcache.server.answered import Answered, answer_then
from agentcache.server.reply import Completion

log = logging.getLogger("agentcache.requests")


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
    """Middleware around what answers."""

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
    """One word of the line, whatever is in it."""
    if not value:
        return "-"
    return value if value.isprintable() and " " not in value else json_string(value)

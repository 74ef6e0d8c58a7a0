"""What middleware learns of an answer when it has been given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLIENT_LEFT = "499"  # as nginx counts them


@dataclass(frozen=True)
class Answered:
    """How a request was answered.

    Args:
        route: its pattern, never the raw path, which clients make up and of which there is no end.
        status: 499 where the client left before there was one.
        seconds: from the request's head to its answer's end.
    """

    method: str
    route: str
    status: str
    seconds: float


async def answer_then(
    note: Callable[[Answered], None], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Have `app` answer an HTTP request, and then call `note`; also where an error or the client cuts it short."""
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

"""Errors in OpenAI's or Anthropic's shape."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import (
    AgentCacheError,
    BrokenInvariant,
    ContextLengthExceeded,
    EngineStopped,
    InternalError,
    OutOfBlocks,
    Overloaded,
    RankLost,
    RequestError,
    RequestTooSlow,
    StoreError,
    Unauthorized,
)
from agentcache.server.paths import missing_path_hint, nearest_route
from agentcache.system.threads import as_exception

log = logging.getLogger("agentcache.server")

RETRY_AFTER_SECONDS = 1
MAX_MESSAGE = 4000
MAX_PARAM = 200
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_ANTHROPIC_ROUTES = "/v1/messages"
_ANTHROPIC_TYPES = {"server_error": "api_error"}
_ANTHROPIC_TYPES_BY_STATUS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


@dataclass(frozen=True)
class WireError:
    status: int
    message: str
    type: str
    code: str
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES_BY_STATUS.get(self.status) or _ANTHROPIC_TYPES.get(self.type, self.type)
        # At these words clients shorten the conversation.
        too_long = "prompt is too long: " if self.code == ContextLengthExceeded.code else ""
        return {"type": "error", "error": {"type": kind, "message": too_long + self.message}}

    def body_for(self, path: str) -> dict[str, Any]:
        return self.anthropic_body if path.startswith(_ANTHROPIC_ROUTES) else self.body

    def response(self, path: str) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else {}
        if self.status == RequestTooSlow.status:
            headers["Connection"] = "close"
        if self.status == Unauthorized.status:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body_for(path), self.status, headers)


def wire_error(error: Exception) -> WireError:
    """The client's view of an error; paths and tracebacks go to the log only."""
    if isinstance(error, RequestError):
        param = None if error.param is None else _cut(error.param, MAX_PARAM)
        return WireError(error.status, _cut(error.message, MAX_MESSAGE), error.type, error.code, param)
    expected = isinstance(error, AgentCacheError) and not isinstance(error, (BrokenInvariant, InternalError))
    log.error("request failed: %s", error, exc_info=None if expected else error)
    if isinstance(error, RankLost):
        return WireError(503, f"The model is not served any more: {error}.", "server_error", "rank_lost")
    if isinstance(error, EngineStopped):
        return WireError(503, "The engine has stopped; see the server's log.", "server_error", "engine_stopped")
    if isinstance(error, OutOfBlocks):
        return WireError(503, "The RAM budget is taken by other requests.", Overloaded.type, "out_of_memory")
    if isinstance(error, StoreError):
        return WireError(507, "The cache could not be written; see the server's log.", "server_error", "store_error")
    return WireError(500, "Internal error; see the server's log.", "server_error", "internal_error")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class ErrorResponses:
    """Middleware: answers exceptions before a response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except ClientDisconnect:
            log.info("client left: %s %s", scope["method"], scope["path"])
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if started:
                raise
            await wire_error(as_exception(error)).response(scope["path"])(scope, receive, send)


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's errors in our shape, with a hint."""
    assert isinstance(error, HTTPException)
    path, routes = request.url.path, request.app.routes
    message, spoken_at = f"{f'{request.method} {path}':.300}: {error.detail:.300}.", path
    if error.status_code == 404:
        message = f"{message} {missing_path_hint(path, routes)}"
        nearest = nearest_route(path, routes)
        spoken_at = path if nearest is None else nearest.path
    elif error.status_code == 405 and error.headers is not None:
        message = f"{message} Allowed: {', '.join(sorted(error.headers['Allow'].split(', ')))}."
    code = _HTTP_CODES.get(error.status_code, "http_error")
    wire = WireError(error.status_code, message, "invalid_request_error", code)
    return JSONResponse(wire.body_for(spoken_at), wire.status, error.headers)

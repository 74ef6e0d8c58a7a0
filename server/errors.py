"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import EngineStopped, OutOfBlocks, Overloaded, RequestError, StoreError, Unauthorized

log = logging.getLogger("agentcache.server")

RETRY_AFTER_SECONDS = 1
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True)
class WireError:
    """One error, ready for the wire."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else {}
        if self.status == Unauthorized.status:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def wire_error(error: Exception) -> WireError:
    """What the client is told; what it must not know (paths, tracebacks) goes to the log."""
    if isinstance(error, RequestError):
        return WireError(error.status, error.message, error.type, error.code, error.param)
    log.error("request failed", exc_info=error)
    if isinstance(error, EngineStopped):
        return WireError(503, "The engine has stopped; see the server's log.", "server_error", "engine_stopped")
    if isinstance(error, OutOfBlocks):
        return WireError(503, "The RAM budget is taken by other requests.", Overloaded.type, "out_of_memory")
    if isinstance(error, StoreError):
        return WireError(507, "The cache could not be written; see the server's log.", "server_error", "store_error")
    return WireError(500, "Internal error; see the server's log.", "server_error", "internal_error")


class ErrorResponses:
    """Outermost middleware: turns what the app raises into JSON answers, as long as no answer has begun."""

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
        except Exception as error:
            if started:
                raise
            await wire_error(error).response(scope, receive, send)


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = f"{what}: {error.detail}."
    code = _HTTP_CODES.get(error.status_code, "http_error")
    body = WireError(error.status_code, message, "invalid_request_error", code).body
    return JSONResponse(body, error.status_code, error.headers)

"""Who may ask, and how much: pure ASGI middleware that raises, inside `ErrorResponses`."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestError, Unauthorized

OPEN_PATHS = ("/health", "/metrics")  # for supervisors and Prometheus, which have no key


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) can only mean this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_of(authority: str) -> str:
    """The host in `host:port`, without brackets; empty where there is none."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


class AgentHeader:
    """Says in every response whose request it was, once a route has found out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start" and (agent := scope.get("state", {}).get("agent")) is not None:
                headers = [*message["headers"], (b"x-agentcache-agent", agent.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, named_send if scope["type"] == "http" else send)


class LoopbackGuard:
    """Keeps web pages out of a server that has no API key.

    A page in the user's browser can reach 127.0.0.1: by a name of its own that resolves there (then Host is that
    name), or by a plain cross-site request (then Origin is the page's).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(Headers(scope=scope))
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if not is_loopback(host_of(host)):
            raise Forbidden(f"Host {host!r} is not this machine; set an API key to serve other names.")
        origin = headers.get("origin")
        if origin is not None and not is_loopback(host_of(origin.partition("://")[2])):
            raise Forbidden(f"Requests from the web page {origin!r} are refused; set an API key to allow them.")


class RequestLimit:
    """Refuses requests while `limit` of them are being answered; those that only look at something get through."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self.app(scope, receive, send)
        if self._under_way >= self._limit:
            raise Overloaded("Too many requests are waiting; try again later.")
        self._under_way += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._under_way -= 1


class ApiKey:
    """Lets in who presents the key as a bearer token or in `x-api-key`. /health and /metrics are open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            self._check(Headers(scope=scope))
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            raise Unauthorized("An API key is needed: Authorization: Bearer KEY, or x-api-key.", code="missing_api_key")
        if not hmac.compare_digest(presented.encode("latin-1", "replace"), self._key):
            raise Unauthorized("The API key is wrong.")


class BodyLimit:
    """Refuses bodies over `limit` bytes: by their announced length, and by counting what comes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self._check_announced(Headers(scope=scope).get("content-length"))
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check(received)
            return message

        await self.app(scope, counted_receive, send)

    def _check_announced(self, length: str | None) -> None:
        if length is None:
            return
        if not (length.isascii() and length.isdigit()):
            raise InvalidRequest("Content-Length must be a number of bytes.", param="Content-Length")
        # More than 18 digits are too many whatever the limit, and int() refuses thousands of them.
        self._check(int(length) if len(length) <= 18 else 10**18)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise PayloadTooLarge(f"The body is over {self._limit} bytes.")

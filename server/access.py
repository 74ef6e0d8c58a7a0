"""Middleware for access and admission; runs inside `ErrorResponses`."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache.errors import Overloaded, RequestError, Unauthorized
from agentcache.settings.tables import ANY_ORIGIN, is_same_origin

OPEN_PATHS = ("/health", "/metrics")  # supervisors and Prometheus have no key

# Of hosts files and containers; `.internal` is no public domain.
_USUAL_NAMES = (
    *("localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"),
    *("host.docker.internal", "gateway.docker.internal", "host.containers.internal", "host.orb.internal"),
    *("host.lima.internal", "host.minikube.internal"),
)
# Short, octal and hexadecimal addresses, such as 127.1; never looked up.
_NUMERIC = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]+|[0-9]+)){0,3}", re.ASCII)
_LONGEST_NUMERIC = 64

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


class AgentHeader:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start" and (agent := scope.get("state", {}).get("agent")) is not None:
                headers = [*message["headers"], (b"x-agentcache-agent", agent.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, named_send if scope["type"] == "http" else send)


class OriginGuard:
    """Refuses web pages except from `allowed` origins (or `*`) and, if `local`, local ones."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str], local: bool) -> None:
        self.app = app
        self._allowed = allowed
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            for origin in headers.getlist("origin"):
                if not self._is_allowed(origin, headers.get("host", "")):
                    raise Forbidden(
                        f"Requests from the web page {origin!r:.200} are refused; cors_origins allows them."
                    )
        await self.app(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        if ANY_ORIGIN in self._allowed or origin.lower() in self._allowed:
            return True
        from_here = self._local and is_local(host_of(origin.partition("://")[2]))
        return from_here or is_same_origin(origin, host)


class HostGuard:
    """Refuses foreign `Host` names, which DNS may rebind; `addresses` allows IP addresses."""

    def __init__(self, app: ASGIApp, names: frozenset[str], addresses: bool) -> None:
        self.app = app
        self._names = names
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            authority = Headers(scope=scope).get("host", "")
            host = host_of(authority)
            if not (is_local(host) or host in self._names or (self._addresses and is_address(host))):
                raise Forbidden(f"Host {authority!r:.200} is not this machine; set an API key to serve other names.")
        await self.app(scope, receive, send)


class RequestLimit:
    """Refuses requests, except GET and HEAD, while `limit` are computed.

    An answer frees its place when it begins; a stream calls `free_place`.
    """

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
        is_free = False

        def free() -> None:
            nonlocal is_free
            self._under_way -= not is_free
            is_free = True

        async def freeing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_event_stream(message):
                free()
            await send(message)

        scope.setdefault("state", {})["free_place"] = free
        try:
            await self.app(scope, receive, freeing_send)
        finally:
            free()


def is_event_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


class ApiKey:
    """Requires the API key, except for `OPEN_PATHS` and the page."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            if scope["path"] != "/" or not wants_page(headers):
                self._check(headers)
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            raise Unauthorized("An API key is needed: Authorization: Bearer KEY, or x-api-key.", code="missing_api_key")
        if not hmac.compare_digest(presented.encode("latin-1", "replace"), self._key):
            raise Unauthorized("The API key is wrong.")


def wants_page(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "")


def is_loopback(host: str) -> bool:
    """Whether listening on `host` serves this machine only."""
    name = _normal(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def is_local(host: str) -> bool:
    """Whether a URL with `host` leads to this machine, as unspecified addresses (0.0.0.0) do."""
    address = _address(_normal(host))
    return is_loopback(host) or (address is not None and address.is_unspecified)


def is_address(host: str) -> bool:
    return _address(_normal(host)) is not None


def own_names(listens_on: str) -> frozenset[str]:
    name = _normal(socket.gethostname())
    short = name.partition(".")[0]
    return frozenset(filter(None, (name, short, short and f"{short}.local", _normal(listens_on), *_USUAL_NAMES)))


def host_of(authority: str) -> str:
    """Host in `host:port`, normalised; empty if invalid."""
    try:
        return _normal(urlsplit(f"//{authority}").hostname or "")
    except ValueError:
        return ""


def _normal(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _address(name: str) -> Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return _numeric_address(name)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _numeric_address(name: str) -> Address | None:
    if len(name) > _LONGEST_NUMERIC or _NUMERIC.fullmatch(name) is None:
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(name))
    except OSError:
        return None

"""Web origins (RFC 6454): `scheme://host[:port]`, without the scheme's default port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from agentcache.errors import ConfigError

ANY_ORIGIN = "*"

_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_origins(value: Any) -> tuple[str, ...]:
    """Parse a list of origins, or one text separated by commas.

    Raises:
        ConfigError: an entry is neither an origin nor `*`.
    """
    if isinstance(value, str):
        value = [entry for entry in value.split(",") if entry.strip()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"cors_origins = {value!r:.80} must be a list of origins")
    return tuple(_parse(entry) for entry in value)


def _parse(entry: Any) -> str:
    origin = str(entry).strip().lower()
    if origin == ANY_ORIGIN:
        return origin
    try:
        parts = urlsplit(origin)
        is_origin = origin == f"{parts.scheme}://{parts.netloc}" and parts.hostname and "@" not in parts.netloc
        port = parts.port
    except ValueError:
        is_origin, port = False, None
    if not is_origin or "*" in origin:
        raise ConfigError(f"cors_origins: {entry!r:.80} is not an origin such as https://example.com:8080, or *")
    is_default = port is not None and port == _DEFAULT_PORTS.get(parts.scheme)
    return origin.removesuffix(f":{port}") if is_default else origin


def hosts_of(origins: Sequence[str]) -> frozenset[str]:
    return frozenset(host for origin in origins if origin != ANY_ORIGIN and (host := urlsplit(origin).hostname))


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of `origin` comes from the host of the `Host` header."""
    scheme, _, authority = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return bool(authority) and authority.removesuffix(f":{port}") == host.lower().removesuffix(f":{port}")

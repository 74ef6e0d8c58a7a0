"""Settings that are tables: adapters, default agents, web origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentcache.api.names import RULE, is_name
from agentcache.api.policy import REFUSED_POLICIES, Policy
from agentcache.errors import ConfigError


def _entries(value: Any) -> Any:
    return [entry for entry in value.split(",") if entry.strip()] if isinstance(value, str) else value


@dataclass(frozen=True)
class AdapterFolder:
    """A folder to serve as an adapter."""

    name: str
    path: str
    policy: Policy = Policy.AUTO


def parse_adapters(value: Any) -> tuple[AdapterFolder, ...]:
    """Parse a mapping of names to `PATH[:POLICY]`, or a list or text of `NAME=PATH[:POLICY]`. Raises ConfigError."""
    value = _entries(value)
    if not isinstance(value, Mapping | list | tuple):
        raise ConfigError(f"adapters = {value!r:.80} must be a table of names and folders")
    pairs = value.items() if isinstance(value, Mapping) else [_name_and_path(entry) for entry in value]
    adapters = tuple(_adapter(name, path) for name, path in pairs)
    names = [adapter.name for adapter in adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"adapters: {twice!r} is there twice")
    return adapters


def _name_and_path(entry: Any) -> tuple[str, str]:
    name, separator, path = str(entry).partition("=")
    if not (separator and name.strip() and path.strip()):
        raise ConfigError(f"adapters: {entry!r} is not NAME=PATH or NAME=PATH:POLICY")
    return name.strip(), path


def _adapter(name: str, value: Any) -> AdapterFolder:
    if not isinstance(value, str | Path):
        raise ConfigError(f"adapters: {name}: {value!r:.80} is not a folder")
    path = str(value).strip()
    folder, _, last = path.rpartition(":")
    if folder and last in REFUSED_POLICIES:
        raise ConfigError(f"adapters: {name}: the policy {last!r} is not supported")
    if folder and last in list(Policy):
        return AdapterFolder(name, folder, Policy(last))
    return AdapterFolder(name, path)


ANY_CLIENT = "*"
RESPONSES_AGENT = "responses"
SHARED_LINEAGES = 32  # fewest of an agent that clients share


def parse_default_agents(value: Any) -> dict[str, str]:
    """Agents by lower-case client, from a mapping, list or text of `NAME` and `CLIENT=NAME`. Raises ConfigError."""
    value = _entries(value)
    if not isinstance(value, Mapping | list | tuple):
        raise ConfigError(f"default_agent = {value!r:.80} must be an agent's name, or a table of clients and names")
    agents: dict[str, str] = {}
    for client, agent in value.items() if isinstance(value, Mapping) else map(_client_and_agent, value):
        client = str(client).strip().lower()
        if not (client and isinstance(agent, str) and is_name(agent)):
            raise ConfigError(f"default_agent: {agent!r:.80} is no agent id: use {RULE}")
        if client in agents:
            raise ConfigError(f"default_agent: {client!r:.80} is there twice")
        agents[client] = agent
    return agents


def _client_and_agent(entry: Any) -> tuple[str, str]:
    client, separator, agent = str(entry).partition("=")
    return (client, agent.strip()) if separator else (ANY_CLIENT, client.strip())


def default_agent(user_agent: str, agents: Mapping[str, str]) -> str | None:
    """The agent of a client that names none, by the longest name in its `User-Agent`; None for no memory."""
    said = user_agent.lower()
    named: Iterable[str] = (client for client in agents if client != ANY_CLIENT and client in said)
    return agents.get(max(named, key=len, default=ANY_CLIENT))


# Origins (RFC 6454): `scheme://host[:port]`, without the scheme's default port.

ANY_ORIGIN = "*"

_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_origins(value: Any) -> tuple[str, ...]:
    """Parse a list or text of origins and `*`. Raises ConfigError."""
    value = _entries(value)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"cors_origins = {value!r:.80} must be a list of origins")
    return tuple(_origin(entry) for entry in value)


def _origin(entry: Any) -> str:
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

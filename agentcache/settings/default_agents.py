"""The setting `default_agent`: agents of clients that name none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentcache.api.names import RULE, is_name
from agentcache.errors import ConfigError

ANY_CLIENT = "*"
# For stored responses.
RESPONSES_AGENT = "responses"
# Fewest lineages of an agent that clients share, so that they do not evict each other's.
SHARED_LINEAGES = 32


def parse_default_agents(value: Any) -> dict[str, str]:
    """Parse the setting into agents by lower-case client. Raises ConfigError.

    Args:
        value: mapping of clients to agents, or list (or comma-separated text) of `NAME` (any client) and `CLIENT=NAME`.
    """
    if isinstance(value, str):
        value = [entry for entry in value.split(",") if entry.strip()]
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
    """The agent of a client that names none; None if its requests leave no memory.

    The longest client name in the `User-Agent` header decides, ignoring case.
    """
    said = user_agent.lower()
    named: Iterable[str] = (client for client in agents if client != ANY_CLIENT and client in said)
    return agents.get(max(named, key=len, default=ANY_CLIENT))

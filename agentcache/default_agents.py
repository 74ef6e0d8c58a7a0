"""The setting `default_agent`: agents for clients that name no session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentcache.errors import ConfigError
from agentcache.names import RULE, is_name

ANY_CLIENT = "*"
# Of responses that are to be stored and whose requests name no agent.
RESPONSES_AGENT = "responses"
# Conversations that an agent of several clients or conversations at once keeps at least: each would push out another.
SHARED_LINEAGES = 32


def parse_default_agents(value: Any) -> dict[str, str]:
    """Agents by client, in lower case; `ANY_CLIENT` is every other client.

    Args:
        value: a TOML table or dict of clients and agents; or a list of `NAME` (for any client) and `CLIENT=NAME`;
            or such a list in one text, separated by commas.

    Raises:
        ConfigError: an entry is none of these, a name is no agent's id, or a client is there twice.
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
    """The agent of a client that names none; None if its requests are not kept.

    The client whose name stands in the `User-Agent` header counts, in any case; of several the longest name.
    """
    said = user_agent.lower()
    named: Iterable[str] = (client for client in agents if client != ANY_CLIENT and client in said)
    return agents.get(max(named, key=len, default=ANY_CLIENT))

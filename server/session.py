"""Whose request it is: what a client says of itself, in the order in which it is trusted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.models.text.json_values import parse_json
from agentcache.server.context import Call
from agentcache.server.validate import Reader, check_agent_id

_LONGEST_USER_ID = 16 << 10  # characters in which a session is looked for
# Claude Code's user ids before they were JSON.
_USER_SESSION = re.compile(r"user_.*_session_([^_]+)")


def read_agent(call: Call, user_id: Any = None) -> str | None:
    """The agent that a request is for; None for none.

    The body's `agent` or `session_id`; then, unless the setting `session_headers` is off, the header X-Session-ID, or
    what clients send without being asked. The latter may be anything: it is never refused, and always a valid id.

    Args:
        user_id: Anthropic's `metadata.user_id`, the last resort.

    Raises:
        InvalidRequest: what was named on purpose cannot name an agent.
    """
    named = _read_named(call.body)
    if named is not None or not call.config.session_headers:
        return named
    if header := call.headers.get("x-session-id"):
        return check_agent_id(header, "X-Session-ID")
    return next((agent for agent in _sent_unasked(call, user_id) if agent is not None), None)


def _read_named(body: Reader) -> str | None:
    agent, session = body.string("agent"), body.string("session_id")
    if agent is not None and session is not None and agent != session:
        raise InvalidRequest("agent and session_id name different agents.", param="session_id")
    if agent is not None:
        return check_agent_id(agent, "agent")
    return None if session is None else check_agent_id(session, "session_id")


def _sent_unasked(call: Call, user_id: Any) -> Iterator[str | None]:
    headers = call.headers
    yield agent_of_session(headers.get("x-claude-code-session-id"))
    yield agent_of_session(headers.get("session-id"))  # Codex
    yield agent_of_cache_key(call.body.get("prompt_cache_key"))
    yield agent_of_session(headers.get("session_id"))  # pi
    yield agent_of_session(headers.get("x-session-affinity"))  # OpenCode, as the next one
    yield agent_of_session(headers.get("x-opencode-session"))
    yield agent_of_session(session_of_user(user_id))


def agent_of_session(session: Any) -> str | None:
    """A valid id for whatever a client calls its session."""
    return _agent_of(session, "session-")


def agent_of_cache_key(key: Any) -> str | None:
    """A valid id for any of OpenAI's cache keys."""
    return _agent_of(key, "pck-")


def session_of_user(user_id: Any) -> Any:
    """The session in Claude Code's user id: `{"session_id": …}` as text, or `user_…_session_…`; else the whole id."""
    if not isinstance(user_id, str):
        return None
    if len(user_id) <= _LONGEST_USER_ID and (found := _USER_SESSION.fullmatch(user_id)):
        return found[1]
    try:
        value = parse_json(user_id, max_chars=_LONGEST_USER_ID)
    except ValueError:
        return user_id
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else user_id


def _agent_of(said: Any, prefix: str) -> str | None:
    """What was said, if it may name an agent; else a digest of it. None for nothing, and for what is no text."""
    if not isinstance(said, str) or not said:
        return None
    try:
        return check_agent_id(said, "agent")
    except InvalidRequest:
        return prefix + hashlib.sha256(said.encode()).hexdigest()[:32]

"""Which agent a request is for: what a client says of its session, in the order in which it is trusted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from agentcache.default_agents import default_agent
from agentcache.errors import InvalidRequest
from agentcache.models.text.json_values import parse_json
from agentcache.server.context import Call
from agentcache.server.validate import Reader, check_agent_id

_LONGEST_JSON = 16 << 10  # characters in which a session is looked for
# Claude Code's user ids before they were JSON.
_USER_SESSION = re.compile(r"user_.*_session_([^_]+)")
# Kilo's requests for the title of a session, and their like.
_SIDE_REQUEST = re.compile(r"[a-z]+-(ses_.+)")
_HEADERS = (
    "session_id",  # pi
    "x-session-affinity",  # OpenCode, Kilo
    "x-opencode-session",
    "x-affinity",  # mistral-vibe
    "x-kilo-session",
    "x-kilocode-taskid",
    "x-roo-task-id",
    "agent-session-id",  # Goose
    "x-openwebui-chat-id",
    "x-conversation-id",
    "helicone-session-id",
)
# Copilot's x-client-session-id, LiteLLM's, Hermes', …: a session's own id, not that of its parent.
_VENDORS_HEADER = re.compile(r"x-(?!.*parent)[a-z-]+-session-id")
_METADATA = ("session_id", "sessionId", "conversation_id", "chat_id")
_CODEX_TURN = "x-codex-turn-metadata"
_CODEX_TITLE = "thread_title"


def read_agent(call: Call, user_id: Any = None) -> str | None:
    """The agent that a request is for; None for none.

    The body's `agent` or `session_id`; then, unless the setting `session_headers` is off, the header X-Session-ID, or
    what clients send without being asked; then the agent of the stored response that it continues; then the setting
    `default_agent`. What clients send unasked may be anything: it is never refused, and always a valid id.

    Args:
        user_id: Anthropic's `metadata.user_id`, the last resort.

    Raises:
        InvalidRequest: what was named on purpose cannot name an agent.
    """
    agent = named_agent(call)
    if agent is None and call.config.session_headers:
        agent = _read_session(call, user_id)
    client = call.headers.get("user-agent", "")
    return agent or call.continued.agent or default_agent(client, call.config.default_agent) or call.fallback_agent


def named_agent(call: Call) -> str | None:
    """The agent that the body or the header X-Session-ID names. Raises InvalidRequest as `read_agent`."""
    agent = _read_named(call.body)
    header = call.headers.get("x-session-id") if agent is None and call.config.session_headers else None
    return check_agent_id(_main_session(header), "X-Session-ID") if header else agent


def _read_named(body: Reader) -> str | None:
    agent, session = body.string("agent"), body.string("session_id")
    if agent is not None and session is not None and agent != session:
        raise InvalidRequest("agent and session_id name different agents.", param="session_id")
    if agent is not None:
        return check_agent_id(agent, "agent")
    return None if session is None else check_agent_id(session, "session_id")


def _read_session(call: Call, user_id: Any) -> str | None:
    """The agent of what clients send unasked."""
    agent = next((agent for agent in _sent_unasked(call, user_id) if agent is not None), None)
    return agent if (turn := _codex_turn(call)) is None else _agent_of_thread(call, turn, agent)


def _sent_unasked(call: Call, user_id: Any) -> Iterator[str | None]:
    headers, body = call.headers, call.body
    yield agent_of_session(headers.get("x-claude-code-session-id"))
    yield agent_of_session(headers.get("session-id"))  # Codex
    yield agent_of_cache_key(body.get("prompt_cache_key"))
    for name in _HEADERS:
        yield agent_of_session(headers.get(name))
    for name, value in headers.items():
        if _VENDORS_HEADER.fullmatch(name):
            yield agent_of_session(value)
    for field in ("metadata", "client_metadata"):
        if isinstance(said := body.get(field), dict):
            yield from (agent_of_session(said.get(key)) for key in _METADATA)
    yield agent_of_session(session_of_user(user_id))


def _codex_turn(call: Call) -> dict[str, Any] | None:
    """What Codex says of a turn, in a header or in the body; None for other clients."""
    said = call.headers.get(_CODEX_TURN)
    if said is None:
        fields = call.body.get("client_metadata")
        said = fields.get(_CODEX_TURN) if isinstance(fields, dict) else None
    try:
        turn = parse_json(said, max_chars=_LONGEST_JSON) if isinstance(said, str) else None
    except ValueError:
        return None
    return turn if isinstance(turn, dict) else None


def _agent_of_thread(call: Call, turn: dict[str, Any], agent: str | None) -> str | None:
    """The agent of one of Codex's threads: that of its session.

    A thread that asks for a title has a session id of its own, and comes just after the request that it is about. All
    that they have in common is the installation. Without a session before it, it is not kept.

    Args:
        turn: what Codex says of it.
        agent: the agent that it names.
    """
    installation, is_title = turn.get("installation_id"), turn.get("thread_source") == _CODEX_TITLE
    if not isinstance(installation, str) or not installation:
        return None if is_title else agent
    if is_title:
        return call.clients.latest_session(installation)
    if agent is not None:
        call.clients.note_session(installation, agent)
    return agent


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
    if len(user_id) <= _LONGEST_JSON and (found := _USER_SESSION.fullmatch(user_id)):
        return found[1]
    try:
        value = parse_json(user_id, max_chars=_LONGEST_JSON)
    except ValueError:
        return user_id
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else user_id


def _agent_of(said: Any, prefix: str) -> str | None:
    """What was said, if it may name an agent; else a digest of it. None for nothing, and for what is no text."""
    if not isinstance(said, str) or not said:
        return None
    said = _main_session(said)
    try:
        return check_agent_id(said, "agent")
    except InvalidRequest:
        return prefix + hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:32]


def _main_session(session: str) -> str:
    """The session that a side request such as `title-ses_…` belongs to; else the session itself."""
    side = _SIDE_REQUEST.fullmatch(session)
    return session if side is None else side[1]

"""Finds the agent of a request in fields, headers and metadata."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.server.context import Call
from agentcache.server.validate import check_agent_id
from agentcache.settings.tables import default_agent
from agentcache.text.json_values import parse_json

_LONGEST_JSON = 16 << 10
# Claude Code's older user ids.
_USER_SESSION = re.compile(r"user_.*_session_([^_]+)")
# Kilo's requests for titles: `title-ses_…`.
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
# Such as Copilot's x-client-session-id; not a parent's.
_VENDORS_HEADER = re.compile(r"x-(?!.*parent)[a-z-]+-session-id")
_METADATA = ("session_id", "sessionId", "conversation_id", "chat_id")
_CODEX_TURN = "x-codex-turn-metadata"
_CODEX_TITLE = "thread_title"


def read_agent(call: Call, user_id: Any = None) -> str | None:
    """The agent of a request, in the order of `docs/server.md`; `user_id` is Anthropic's `metadata.user_id`.

    Raises InvalidRequest for an invalid explicit name.
    """
    agent = named_agent(call)
    if agent is None and call.config.session_headers:
        agent = next((each for each in _sent_unasked(call, user_id) if each is not None), None)
        if (turn := _codex_turn(call)) is not None:
            agent = _agent_of_thread(call, turn, agent)
    client = call.headers.get("user-agent", "")
    return agent or call.continued.agent or default_agent(client, call.config.default_agent) or call.fallback_agent


def named_agent(call: Call) -> str | None:
    agent, session = call.body.string("agent"), call.body.string("session_id")
    if agent is not None and session is not None and agent != session:
        raise InvalidRequest("agent and session_id name different agents.", param="session_id")
    if agent is not None:
        return check_agent_id(agent, "agent")
    if session is not None:
        return check_agent_id(session, "session_id")
    header = call.headers.get("x-session-id") if call.config.session_headers else None
    return check_agent_id(_main_session(header), "X-Session-ID") if header else None


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
    # A thread for a title shares only the installation with its session.
    installation, is_title = turn.get("installation_id"), turn.get("thread_source") == _CODEX_TITLE
    if not isinstance(installation, str) or not installation:
        return None if is_title else agent
    if is_title:
        return call.clients.latest_session(installation)
    if agent is not None:
        call.clients.note_session(installation, agent)
    return agent


def agent_of_session(session: Any) -> str | None:
    return _agent_of(session, "session-")


def agent_of_cache_key(key: Any) -> str | None:
    return _agent_of(key, "pck-")


def session_of_user(user_id: Any) -> Any:
    """The session in Claude Code's user id, else the whole id."""
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
    if not isinstance(said, str) or not said:
        return None
    said = _main_session(said)
    try:
        return check_agent_id(said, "agent")
    except InvalidRequest:
        return prefix + hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:32]


def _main_session(session: str) -> str:
    side = _SIDE_REQUEST.fullmatch(session)
    return session if side is None else side[1]

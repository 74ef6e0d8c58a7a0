"""Codex sessions, and clients without sessions, across requests."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from threading import Lock

from agentcache.text.json_values import json_string

log = logging.getLogger("agentcache.sessions")

_MOST_INSTALLATIONS = 256
_MOST_UNKEPT = 64
_MOST_CHARS = 40  # of a name
_VERSION = re.compile(r"/v?[0-9].*")


class KnownClients:
    """State of clients across requests. Bounded, thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._agents: OrderedDict[str, str] = OrderedDict()
        self._unkept: set[str] = set()

    def note_session(self, installation: str, agent: str) -> None:
        with self._lock:
            self._agents[installation] = agent
            self._agents.move_to_end(installation)
            while len(self._agents) > _MOST_INSTALLATIONS:
                self._agents.popitem(last=False)

    def latest_session(self, installation: str) -> str | None:
        with self._lock:
            return self._agents.get(installation)

    def note_unkept(self, user_agent: str) -> None:
        """Log a client's first request without agent or session."""
        name = client_name(user_agent)
        with self._lock:
            if name in self._unkept or len(self._unkept) >= _MOST_UNKEPT:
                return
            self._unkept.add(name)
        log.info(
            "requests of %s name no agent or session, so nothing of them is kept; --default-agent NAME keeps those of"
            " all such clients, --default-agent %s=NAME of this one, and the header X-Session-ID of one session",
            *(_word(name), _word(name.lower())),
        )


def client_name(user_agent: str) -> str:
    """Return the product in a `User-Agent` header without its version, or `unknown`."""
    words = user_agent.split(None, 1)
    return (_VERSION.sub("", words[0])[:_MOST_CHARS] if words else "") or "unknown"


def _word(name: str) -> str:
    return name if name.isprintable() else json_string(name)

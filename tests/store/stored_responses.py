"""Stored responses for tests, and a way to their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentcache.store.cache_files import CacheFiles
from agentcache.store.disk_usage import DiskUsage, adopt_agents
from agentcache.store.response_files import ResponseFiles, StoredResponse, new_id
from agentcache.store.store import no_fault
from agentcache.store.writing import Fault


def response_files(
    root: Path,
    *,
    budget: int = 1 << 30,
    fault: Fault = no_fault,
    is_saved: Callable[[str], bool] = lambda agent: True,
) -> ResponseFiles:
    """The responses in `root`/agents/model, which is made."""
    files, folder = CacheFiles(root.resolve()), root.resolve() / "agents" / "model"
    usage = DiskUsage(files, budget)
    files.make_folder(folder.parent)
    files.make_folder(folder)
    usage.start_over()
    adopt_agents(files, usage, folder.parent)
    return ResponseFiles(files, folder, usage, fault, is_saved)


def stored(agent: str, text: str = "hi", *, previous: str | None = None, said: str = "yes") -> StoredResponse:
    """A response to one message; its echo has a tool."""
    item = {"type": "message", "id": new_id("msg", agent), "role": "assistant", "content": said}
    body: dict[str, Any] = {"id": new_id("resp", agent), "previous_response_id": previous, "output": [item]}
    return StoredResponse(body, {"tools": [{"type": "function", "name": "look"}]}, ({"role": "user", "content": text},))

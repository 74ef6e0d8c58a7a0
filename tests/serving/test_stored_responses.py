"""Stored responses on the real engine: continued warm after a restart, and gone with their agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache.store.verify import verify_folder
from tests.conftest import ModelFolder
from tests.serving.conversation import make_text
from tests.serving.front import Front, open_front


@pytest.fixture
def chatting(model_folder: ModelFolder) -> Path:
    return model_folder("llama", "qwen3", num_hidden_layers=2)


def respond(front: Front, text: str, previous: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": 8, "temperature": 0} | fields
    if previous is not None:
        body["previous_response_id"] = previous["id"]
    return dict(front.post("/v1/responses", body).json())


def stored_files(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in cache_dir.glob("agents/*/*.responses"))


def test_a_response_is_continued_after_a_restart(chatting: Path, tmp_path: Path) -> None:
    with open_front(chatting, tmp_path) as front:
        first = respond(front, make_text(300))
        second = respond(front, "And then?", first)
        assert second["agentcache"]["match"] == "EXTEND"
    with open_front(chatting, tmp_path) as front:
        third = respond(front, "And now?", second)
        report = third["agentcache"]
        assert (report["agent"], report["cache_state"], report["lineage"]) == ("responses", "warm", "first")
        assert report["computed_tokens"] < 60 < report["prompt_tokens"]
        assert front.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        [agent] = front.get("/v1/agents").json()["data"]
        assert len(agent["lineages"]) == 1
    assert stored_files(tmp_path) == ["responses.responses"]
    assert verify_folder(tmp_path).problems == ()


def test_responses_go_with_their_agent(chatting: Path, tmp_path: Path) -> None:
    with open_front(chatting, tmp_path) as front:
        kept, gone = (respond(front, "hi", agent=agent) for agent in ("alice", "bob"))
        assert stored_files(tmp_path) == ["alice.responses", "bob.responses"]
        front._ask("DELETE", "/v1/agents/bob")
        assert stored_files(tmp_path) == ["alice.responses"]
        with pytest.raises(AssertionError, match="response_not_found"):
            front.get(f"/v1/responses/{gone['id']}")
        respond(front, "more", kept)
    assert not verify_folder(tmp_path).problems


@pytest.mark.slow
def test_files_of_agents_that_another_release_has_deleted_go_at_start(chatting: Path, tmp_path: Path) -> None:
    with open_front(chatting, tmp_path) as front:
        kept, gone = (respond(front, "hi", agent=agent) for agent in ("alice", "bob"))
        usage = front.get("/v1/cache/stats").json()["disk_bytes_by"]["agents"]
    for path in tmp_path.glob("agents/*/bob.*"):
        if path.suffix != ".responses":
            path.unlink()
    with open_front(chatting, tmp_path) as front:
        assert stored_files(tmp_path) == ["alice.responses"]
        assert front.get(f"/v1/responses/{kept['id']}").json()["id"] == kept["id"]
        assert 0 < front.get("/v1/cache/stats").json()["disk_bytes_by"]["agents"] < usage


@pytest.mark.slow
def test_files_of_agents_that_cannot_be_read_now_stay(chatting: Path, tmp_path: Path) -> None:
    with open_front(chatting, tmp_path) as front:
        told = respond(front, "hi", agent="alice")
    [manifest] = tmp_path.glob("agents/*/alice.json")
    hidden = manifest.with_suffix(".hidden")
    manifest.rename(hidden)
    manifest.symlink_to(hidden)  # no link is read
    with open_front(chatting, tmp_path) as front:
        assert stored_files(tmp_path) == ["alice.responses"]
    hidden.rename(manifest)
    with open_front(chatting, tmp_path) as front:
        assert respond(front, "more", told)["agentcache"]["cache_state"] == "warm"


@pytest.mark.slow
def test_a_folder_that_is_removed_meanwhile(chatting: Path, tmp_path: Path) -> None:
    with open_front(chatting, tmp_path / "cache") as front:
        respond(front, "hi", agent="alice")
        (tmp_path / "cache").rename(tmp_path / "elsewhere")
        told = respond(front, "hi again", agent="alice")
        assert told["store"] is True
        assert front.get(f"/v1/responses/{told['id']}").json()["id"] == told["id"]

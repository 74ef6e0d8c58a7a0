"""Conversations of clients that name no session, under one agent: each is continued warm, and few are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache.agents import persistence
from tests.conftest import ModelFolder
from tests.serving.conversation import make_text
from tests.serving.front import Front, open_front

SYSTEM = {"role": "system", "content": make_text(40, seed=99)}


@pytest.fixture
def chatting(model_folder: ModelFolder) -> Path:
    return model_folder("llama", "qwen3", num_hidden_layers=1)


def turn(front: Front, messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    messages.append({"role": "user", "content": text})
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "agentcache": {"report": True}}
    answer = front.post("/v1/chat/completions", body, {"user-agent": "framework/1"}).json()
    messages.append(answer["choices"][0]["message"])
    return dict(answer["agentcache"])


def test_conversations_that_take_turns_are_all_continued(chatting: Path, tmp_path: Path) -> None:
    talks: list[list[dict[str, Any]]] = [[SYSTEM] for _ in range(12)]
    with open_front(chatting, tmp_path, default_agent={"framework": "notes"}) as front:
        for number, talk in enumerate(talks):
            report = turn(front, talk, make_text(60, seed=number))
            assert (report["agent"], report["saved"]) == ("notes", True)
        for talk in talks:
            assert turn(front, talk, "And then?")["computed_tokens"] < 40
    with open_front(chatting, tmp_path, default_agent={"framework": "notes"}) as front:
        report = turn(front, talks[0], "And now?")
        assert (report["cache_state"], report["computed_tokens"] < 40) == ("warm", True)
        [agent] = front.get("/v1/agents").json()["data"]
        assert len(agent["lineages"]) == 12


@pytest.mark.slow
def test_the_number_of_conversations_is_bounded(
    chatting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "SHARED_LINEAGES", 4)
    with open_front(chatting, tmp_path, default_agent={"*": "notes"}, max_lineages=2) as front:
        for number in range(7):
            turn(front, [], make_text(30, seed=number))
        [agent] = front.get("/v1/agents").json()["data"]
        assert len(agent["lineages"]) == 4
    with open_front(chatting, tmp_path, max_lineages=2) as front:
        [agent] = front.get("/v1/agents").json()["data"]
        assert len(agent["lineages"]) == 2

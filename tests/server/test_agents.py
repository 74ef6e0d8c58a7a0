from __future__ import annotations

from typing import Any

import pytest

from agentcache.serving.request import ChatPrompt, TextPrompt, TokenPrompt
from tests.server.driver import ask, post, refused
from tests.server.fake_engine import FakeEngine

ALICE = {
    "id": "alice",
    "adapter": None,
    "policy": "exact",
    "tokens": 0,
    "blocks": 0,
    "cache_state": "cold",
    "ram_bytes": 0,
    "disk_bytes": 0,
    "created": 1.0,
    "last_used": 2.0,
}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    assert post(engine, "/v1/agents", {"id": "alice", "system": "Be brief."}).status_code == 201
    return engine


def test_create_list_and_show(engine: FakeEngine) -> None:
    assert ask(engine, "GET", "/v1/agents").json() == {"object": "list", "data": [ALICE]}
    assert ask(engine, "GET", "/v1/agents/alice").json() == ALICE
    assert engine.systems == {"alice": "Be brief."}


def test_delete(engine: FakeEngine) -> None:
    assert ask(engine, "DELETE", "/v1/agents/alice").json() == {"id": "alice", "deleted": True}
    refused(ask(engine, "GET", "/v1/agents/alice"), 404)


def test_fork(engine: FakeEngine) -> None:
    answer = post(engine, "/v1/agents/alice/fork", {"id": "bob"})
    assert (answer.status_code, answer.json()) == (201, ALICE | {"id": "bob"})
    refused(post(engine, "/v1/agents/alice/fork", {"id": "bob"}), 409)


def test_restore_evict_and_save(engine: FakeEngine) -> None:
    assert ask(engine, "POST", "/v1/agents/alice/restore").json() == {
        "tokens": 10,
        "restored_bytes": 640,
        "restore_ms": 1.5,
        "cache_state": "hot",
    }
    assert ask(engine, "POST", "/v1/agents/alice/evict").json() == ALICE | {"cache_state": "warm"}
    assert ask(engine, "POST", "/v1/agents/alice/save").json() == ALICE


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "hi"}, TextPrompt("hi")),
        ({"prompt": [1, 2]}, TokenPrompt([1, 2])),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            ChatPrompt([{"role": "user", "content": "hi"}], add_generation_prompt=False),
        ),
    ],
)
def test_warm(engine: FakeEngine, body: dict[str, Any], prompt: object) -> None:
    answer = post(engine, "/v1/agents/alice/warm", body)
    assert answer.json() == {
        "tokens": 7,
        "computed": 2,
        "cached": 5,
        "ms": 20.0,
        "cache_state": "cold",
        "saved": True,
        "save_error": None,
    }
    [request] = engine.requests
    assert (request.agent, request.prompt, request.sampling.max_tokens) == ("alice", prompt, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/agents", {}, 400, "id"),
        ("/v1/agents", {"id": "../x"}, 400, "id"),
        ("/v1/agents", {"id": 5}, 400, "id"),
        ("/v1/agents", {"id": "alice"}, 409, "id"),
        ("/v1/agents", {"id": "b", "sistem": "x"}, 400, "sistem"),
        ("/v1/agents", {"id": "b", "system": 5}, 400, "system"),
        ("/v1/agents", {"id": "b", "adapter": "poet"}, 404, "adapter"),
        ("/v1/agents", {"id": "b", "policy": "fast"}, 400, "policy"),
        ("/v1/agents/alice/fork", {}, 400, "id"),
        ("/v1/agents/alice/fork", {"id": ".."}, 400, "id"),
        ("/v1/agents/bob/fork", {"id": "c"}, 404, "id"),
        ("/v1/agents/alice/warm", {}, 400, "messages"),
        ("/v1/agents/alice/warm", {"prompt": "x", "messages": []}, 400, "messages"),
        ("/v1/agents/alice/warm", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/agents/alice/warm", {"prompt": "x", "max_tokens": 5}, 400, "max_tokens"),
        ("/v1/agents/bob/warm", {"prompt": "x"}, 404, "id"),
        ("/v1/agents/bob/restore", {}, 404, "id"),
        ("/v1/agents/bob/evict", {}, 404, "id"),
        ("/v1/agents/bob/save", {}, 404, "id"),
        ("/v1/agents/b%20b/save", {}, 400, "id"),
    ],
)
def test_refusals(engine: FakeEngine, path: str, body: dict[str, Any], status: int, param: str) -> None:
    before = dict(engine.known)
    response = post(engine, path, body)
    assert refused(response, status)["param"] == param
    assert engine.known == before and engine.requests == []

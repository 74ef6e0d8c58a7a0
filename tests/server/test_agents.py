from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.request import ChatPrompt, TextPrompt, TokenPrompt
from tests.server.driver import ask, post, refused
from tests.server.fake_engine import POET, FakeEngine

ALICE = {
    "id": "alice",
    "adapter": None,
    "policy": "exact",
    "tokens": 0,
    "blocks": 0,
    "cache_state": "cold",
    "ram_bytes": 0,
    "disk_bytes": 0,
    "residual_bytes": 0,
    "residual_disk_bytes": 0,
    "created": 1.0,
    "last_used": 2.0,
    "lineages": [],
    "last_turn": None,
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


@pytest.mark.parametrize("operation", ["restore", "evict", "save", "fork"])
def test_one_lineage_by_name(engine: FakeEngine, operation: str) -> None:
    path, body = f"/v1/agents/alice/{operation}", {"id": "copy"} if operation == "fork" else {}
    assert post(engine, path, body | {"lineage": "first"}).is_success
    assert refused(post(engine, path, body | {"lineage": "5e"}), 404)["param"] == "lineage"
    assert refused(post(engine, path, body | {"lineage": 5}), 400)["param"] == "lineage"
    assert engine.lineages[0] == "first"


def test_delete_one_lineage(engine: FakeEngine) -> None:
    assert refused(ask(engine, "DELETE", "/v1/agents/alice?lineage=5e"), 404)["param"] == "lineage"
    answer = ask(engine, "DELETE", "/v1/agents/alice?lineage=first")
    assert answer.json() == {"id": "alice", "deleted": True, "lineage": "first"}


def test_a_request_may_name_the_lineage(engine: FakeEngine) -> None:
    body = {"prompt": "hi", "agentcache": {"lineage": "5e"}}
    assert post(engine, "/v1/completions", body | {"agent": "alice"}).is_success
    assert post(engine, "/v1/agents/alice/warm", {"prompt": "hi", "lineage": "6f"}).is_success
    assert [request.lineage for request in engine.requests] == ["5e", "6f"]
    assert refused(post(engine, "/v1/completions", body), 400)["param"] == "agentcache.lineage"


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
        "lineage": None,
        "saved": True,
        "save_error": None,
        "notes": [],
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
        ("/v1/agents/bob/fork", {"id": "c"}, 404, "{id}"),
        ("/v1/agents/alice/fork", {"id": "c", "adapter": "prose"}, 404, "adapter"),
        ("/v1/agents/alice/fork", {"id": "c", "policy": "fast"}, 400, "policy"),
        ("/v1/agents/alice/evict", {"kind": "weights"}, 400, "kind"),
        ("/v1/agents/alice/evict", {"kind": 5}, 400, "kind"),
        ("/v1/agents/alice/warm", {}, 400, "messages"),
        ("/v1/agents/alice/warm", {"prompt": "x", "messages": []}, 400, "messages"),
        ("/v1/agents/alice/warm", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/agents/alice/warm", {"prompt": "x", "max_tokens": 5}, 400, "max_tokens"),
        ("/v1/agents/bob/warm", {"prompt": "x"}, 404, "{id}"),
        ("/v1/agents/bob/restore", {}, 404, "{id}"),
        ("/v1/agents/bob/evict", {}, 404, "{id}"),
        ("/v1/agents/bob/save", {}, 404, "{id}"),
        ("/v1/agents/b%20b/save", {}, 400, "{id}"),
    ],
)
def test_refusals(engine: FakeEngine, path: str, body: dict[str, Any], status: int, param: str) -> None:
    before = dict(engine.known)
    response = post(engine, path, body)
    assert refused(response, status)["param"] == param
    assert engine.known == before and engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/agents", {"agent": "x"}, "unknown field 'agent'; the id goes into 'id'."),
        ("/v1/agents", {"session_id": "x"}, "unknown field 'session_id'; the id goes into 'id'."),
        ("/v1/agents", {"name": "x", "system": "y"}, "unknown field 'name'; the id goes into 'id'."),
        ("/v1/agents", {"id": "x", "sistem": "y"}, "unknown field 'sistem'; did you mean 'system'?."),
        ("/v1/agents/alice/fork", {"agent": "x"}, "unknown field 'agent'; the id goes into 'id'."),
        ("/v1/agents/alice/warm", {"agent": "x"}, "unknown field 'agent'; the id is in the path."),
        ("/v1/agents/alice/warm", {}, "messages or prompt is required."),
        (
            "/v1/agents/alice/warm",
            {"messages": [], "prompt": ""},
            "messages and prompt are both there; send one of them.",
        ),
    ],
)
def test_refusals_say_where_it_belongs(engine: FakeEngine, path: str, body: dict[str, Any], message: str) -> None:
    assert refused(post(engine, path, body), 400)["message"] == message


def test_a_fork_may_have_another_adapter_and_policy(engine: FakeEngine) -> None:
    engine.model = replace(engine.model, adapters=(POET,))
    forked = post(engine, "/v1/agents/alice/fork", {"id": "bob", "adapter": "poet", "policy": "exact"})
    assert forked.status_code == 201
    assert (forked.json()["adapter"], forked.json()["policy"]) == ("poet", "exact")


@pytest.mark.parametrize("kind", [None, "base", "residual"])
def test_what_is_evicted_may_be_of_one_kind(engine: FakeEngine, kind: str | None) -> None:
    assert post(engine, "/v1/agents/alice/evict", {"kind": kind}).status_code == 200
    assert engine.evicted_kinds == [kind]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"id": null}'])
def test_a_fork_without_a_name_says_what_it_wants(engine: FakeEngine, content: bytes) -> None:
    error = refused(ask(engine, "POST", "/v1/agents/alice/fork", content=content), 400)
    assert error["param"] == "id"
    assert error["message"] == 'id is required: send a JSON object with "id", the new agent\'s name.'


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/agents", {"id": "bob"}),
        ("POST", "/v1/agents", {"id": "alice"}),
        ("GET", "/v1/agents/alice", None),
        ("GET", "/v1/agents/nobody", None),
        ("DELETE", "/v1/agents/alice", None),
        ("POST", "/v1/agents/alice/warm", {"prompt": "x"}),
        ("POST", "/v1/agents/alice/warm", {}),
        ("POST", "/v1/agents/alice/save", None),
        ("POST", "/v1/agents/alice/restore", None),
        ("POST", "/v1/agents/alice/evict", None),
        ("POST", "/v1/agents/alice/fork", {"id": "bob"}),
    ],
)
def test_every_answer_about_an_agent_names_it(engine: FakeEngine, method: str, path: str, body: Any) -> None:
    named = path.split("/")[3] if path.count("/") > 2 else body["id"]
    assert ask(engine, method, path, json=body).headers.get_list("x-agentcache-agent") == [named]


def test_lists_are_of_no_agent(engine: FakeEngine) -> None:
    assert "x-agentcache-agent" not in ask(engine, "GET", "/v1/agents").headers


def test_warm_notes_what_was_left_out(engine: FakeEngine) -> None:
    messages = [{"role": "tool", "content": [{"type": "image_url"}]}]
    [note] = post(engine, "/v1/agents/alice/warm", {"messages": messages}).json()["notes"]
    assert note.startswith("messages[0]: an image")

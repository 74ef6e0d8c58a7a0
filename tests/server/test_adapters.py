from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.policy import Policy
from agentcache.settings.config import Config
from agentcache.settings.tables import AdapterFolder
from tests.server.driver import ask, chat, complete, post, refused
from tests.server.fake_engine import MODEL, POET, FakeEngine

OPEN = Config(host="0.0.0.0")
LISTED = {
    "name": "poet",
    "path": "/adapters/poet",
    "format": "peft",
    "digest": "d" * 40,
    "policy": "activated",
    "ram_bytes": 1000,
    "resident": True,
    "running": 0,
    "max_rank": 8,
    "first_layer": 2,
    "invocation_tokens": [7, 8],
    "created": 1700000001,
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(model=replace(MODEL, adapters=(POET,)))


def test_list_and_show(engine: FakeEngine) -> None:
    assert ask(engine, "GET", "/v1/adapters").json() == {"object": "list", "data": [LISTED]}
    assert ask(engine, "GET", "/v1/adapters/poet").json() == LISTED
    assert refused(ask(engine, "GET", "/v1/adapters/other"), 404)["code"] == "adapter_not_found"


def test_load(engine: FakeEngine) -> None:
    body = {"name": "lawyer", "path": "/adapters/lawyer", "policy": "exact"}
    answer = post(engine, "/v1/adapters", body)
    assert answer.status_code == 201
    assert answer.json() == LISTED | body
    assert [adapter.name for adapter in engine.model.adapters] == ["poet", "lawyer"]
    assert post(engine, "/v1/adapters", {"name": "poet", "path": "/other"}).json()["policy"] == "auto"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "x"}, "path"),
        ({"name": "../x", "path": "/x"}, "name"),
        ({"name": 5, "path": "/x"}, "name"),
        ({"name": "x", "path": "x"}, "path"),
        ({"name": "x", "path": "../x"}, "path"),
        ({"name": "x", "path": 5}, "path"),
        ({"name": "x", "path": "/nothing"}, "path"),
        ({"name": "x", "path": "/x", "policy": "full-reuse"}, "policy"),
        ({"name": "x", "path": "/x", "policy": "fast"}, "policy"),
        ({"name": "x", "path": "/x", "scale": 2}, "scale"),
    ],
)
def test_load_refusals(engine: FakeEngine, body: dict[str, Any], param: str) -> None:
    assert refused(post(engine, "/v1/adapters", body), 400)["param"] == param
    assert engine.model.adapters == (POET,)


def test_unload(engine: FakeEngine) -> None:
    assert ask(engine, "DELETE", "/v1/adapters/poet").json() == {"name": "poet", "deleted": True}
    assert engine.model.adapters == ()
    refused(ask(engine, "DELETE", "/v1/adapters/poet"), 404)


def test_only_those_who_may_use_the_machine_change_adapters(engine: FakeEngine) -> None:
    body = {"name": "x", "path": "/x"}
    for answer in (
        post(engine, "/v1/adapters", body, config=OPEN),
        ask(engine, "DELETE", "/v1/adapters/poet", config=OPEN),
        post(engine, "/v1/adapters", body, headers={"Origin": "https://evil.example"}),
        post(engine, "/v1/adapters", body, base_url="http://evil.example"),
    ):
        assert refused(answer, 403)["code"] == "forbidden"
    with_key = replace(OPEN, api_key="k")
    refused(post(engine, "/v1/adapters", body, config=with_key), 401)
    assert engine.model.adapters == (POET,)
    assert ask(engine, "GET", "/v1/adapters", config=OPEN).status_code == 200
    allowed = post(engine, "/v1/adapters", body, config=with_key, headers={"Authorization": "Bearer k"})
    assert allowed.status_code == 201


def test_models_list_adapters_behind_their_base(engine: FakeEngine) -> None:
    base, poet = ask(engine, "GET", "/v1/models").json()["data"]
    assert base["id"] == MODEL.id and "parent" not in base
    assert (poet["id"], poet["parent"], poet["root"]) == ("poet", MODEL.id, "/adapters/poet")
    for name in ("poet", "org/tiny-model:poet", "default:poet"):
        assert ask(engine, "GET", f"/v1/models/{name}").json() == poet
    assert refused(ask(engine, "GET", "/v1/models/default:other"), 404)["code"] == "adapter_not_found"


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": "poet"},
        {"model": "poet"},
        {"model": "org/tiny-model:poet"},
        {"model": "tiny-model:poet", "adapter": "poet"},
        {"model": "default", "adapter": "poet"},
    ],
)
def test_naming_an_adapter(engine: FakeEngine, fields: dict[str, Any]) -> None:
    for send in (chat, complete):
        assert send(engine, fields).json()["model"] == "poet"
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert post(engine, "/v1/messages", messages | fields).json()["model"] == "poet"
    assert [request.adapter for request in engine.requests] == ["poet"] * 3


def test_how_to_use_it(engine: FakeEngine) -> None:
    extras = {"policy": "activated", "invocation_start": 3, "invocation": "optional"}
    assert chat(engine, {"adapter": "poet", "agentcache": extras}).status_code == 200
    [request] = engine.requests
    assert (request.policy, request.invocation_start, request.invocation_optional) == (Policy.ACTIVATED, 3, True)
    chat(engine)
    plain = engine.requests[-1]
    assert (plain.adapter, plain.policy, plain.invocation_start, plain.invocation_optional) == (None, None, None, False)


def test_refused_names(engine: FakeEngine) -> None:
    for fields, param in (({"adapter": "other"}, "adapter"), ({"model": "default:other"}, "model")):
        error = refused(chat(engine, fields), 404)
        assert (error["param"], error["code"]) == (param, "adapter_not_found")
        assert "poet" in error["message"], "what there is"
    assert refused(chat(engine, {"model": "other"}), 404)["code"] == "model_not_found"
    engine.model = replace(engine.model, adapters=(POET, replace(POET, name="lawyer")))
    assert refused(chat(engine, {"model": "default:poet", "adapter": "lawyer"}), 400)["param"] == "adapter"
    assert not engine.requests


def test_an_agent_with_an_adapter(engine: FakeEngine) -> None:
    answer = post(engine, "/v1/agents", {"id": "alice", "adapter": "poet", "policy": "exact"})
    assert (answer.status_code, answer.json()["adapter"], answer.json()["policy"]) == (201, "poet", "exact")
    warm = post(engine, "/v1/agents/alice/warm", {"prompt": "x"})
    assert warm.status_code == 200
    assert engine.requests[-1].invocation_optional, "a prompt that is to be invoked later is base's"


def test_the_folder_that_is_loaded(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AdapterFolder] = []

    async def load_adapter(folder: AdapterFolder) -> Any:
        seen.append(folder)
        return POET

    monkeypatch.setattr(engine, "load_adapter", load_adapter, raising=False)
    post(engine, "/v1/adapters", {"name": "poet", "path": "/adapters/poet"})
    assert seen == [AdapterFolder("poet", "/adapters/poet", Policy.AUTO)]

"""Slips of base URLs are served as meant; other unknown paths are told the nearest route."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.settings.config import Config
from tests.server.driver import BASE_URL, ask, post, refused
from tests.server.fake_engine import MODEL, FakeEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": "hi", "max_tokens": 4},
    "responses": {"input": "hi"},
    "messages": CHAT,
    "messages/count_tokens": CHAT,
    "agents": {"id": "alice"},
}
SLIPS = ["/{}", "//{}", "/v1/v1/{}", "/v1/v1/v1/{}", "//v1/{}", "/v1//{}", "//v1//v1//{}", "/v1/{}/", "/{}/"]


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("route", BODIES)
def test_slips_of_a_base_url(route: str, slip: str) -> None:
    answer = post(FakeEngine(), BASE_URL + slip.format(route), BODIES[route])
    assert answer.status_code == (201 if route == "agents" else 200), answer.text


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/models/", "/v1/v1/models", "//v1/models"])
def test_models_with_slips(path: str) -> None:
    assert ask(FakeEngine(), "GET", BASE_URL + path).json() == ask(FakeEngine(), "GET", "/v1/models").json()


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL.id}/", f"/models/{MODEL.id}", f"/v1/v1/models/{MODEL.id}"])
def test_one_model_with_slips(path: str) -> None:
    assert ask(FakeEngine(), "GET", BASE_URL + path).json()["id"] == MODEL.id


@pytest.mark.parametrize("path", ["/health/", "/v1/health", "//health", "/v1/v1/health"])
def test_routes_without_a_version(path: str) -> None:
    """They answer without the key, as the route does that is meant."""
    assert ask(FakeEngine(), "GET", BASE_URL + path, config=Config(api_key="k")).json()["status"] == "ok"


def test_a_slip_needs_the_key() -> None:
    answer = post(FakeEngine(), "/chat/completions", CHAT, config=Config(api_key="k"))
    assert refused(answer, 401)["code"] == "missing_api_key"


def test_errors_are_in_the_dialect_that_is_meant() -> None:
    for path in ("/messages", "/v1/v1/messages", "/v1/messages/"):
        answer = post(FakeEngine(), path, {"messages": 1}).json()
        assert answer["type"] == "error", answer


@pytest.mark.parametrize("path", ["/v1/agents/a//fork", "/v1/agents//fork", "/v1/chat//completions", "/v1/x/"])
def test_what_is_no_slip_of_a_base_url(path: str) -> None:
    assert refused(post(FakeEngine(), path, CHAT), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1/chat", None),
        ("/api/v1/chat/completions", "POST /v1/chat/completions"),
        ("/openai/v1/chat/completions", "POST /v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "POST /v1/chat/completions"),
        ("/V1/Chat/Completions", "POST /v1/chat/completions"),
        ("/v1/completion", "POST /v1/completions"),
        ("/v1/response", "POST /v1/responses"),
        ("/v1/model", "GET /v1/models"),
        ("/v1", "GET /v1/models"),
        ("/healthz", "GET /health"),
        ("/v1/agents/alice/forks", "POST /v1/agents/{id}/fork"),
        ("/v1/agent", "GET or POST /v1/agents"),
        ("/v2/models", "GET /v1/models"),
    ],
)
def test_the_nearest_route_is_told(path: str, meant: str | None) -> None:
    message = refused(ask(FakeEngine(), "GET", BASE_URL + path), 404)["message"]
    assert message.startswith(f"GET {path}: Not Found. ")
    if meant is None:
        assert "below /v1" in message
    else:
        assert f"Probably meant: {meant}." in message


@pytest.mark.parametrize(
    ("path", "name"), [("/api/chat", "Ollama"), ("/v1beta/models/x:generateContent", "Google"), ("/props", "OpenAI")]
)
def test_other_servers_routes(path: str, name: str) -> None:
    message = refused(post(FakeEngine(), path, {}), 404)["message"]
    assert name in message and "/v1" in message


def test_a_missing_path_is_told_in_the_dialect_of_what_is_near() -> None:
    answer = post(FakeEngine(), "/anthropic/v1/messages", CHAT)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert "Probably meant: POST /v1/messages." in answer.json()["error"]["message"]

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentcache.settings.config import Config
from tests.server.driver import ask, chat, post, refused
from tests.server.fake_engine import MODEL, POET, FakeEngine

BUILT_IN = ["claude-opus-4-8", "claude-haiku-4-5-20251001", "Claude-3", "gpt-4o", "GPT-5.2-codex", "gpt-oss:20b"]
STRICT = Config(strict_model_names=True)
ALIASES = Config(
    aliases={
        "small": "default",
        "claude-haiku": "poet",
        "verse": "default:poet",
        "lost": "prose",
        "tiny": "org/tiny-model",
        "again": "small",
    }
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(model=replace(MODEL, adapters=(POET,)))


@pytest.mark.parametrize("name", BUILT_IN)
def test_names_that_clients_have_built_in_mean_the_model(engine: FakeEngine, name: str) -> None:
    assert chat(engine, {"model": name}).json()["model"] == MODEL.id
    body = {"model": name, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    assert post(engine, "/v1/messages", body).status_code == 200
    assert post(engine, "/v1/messages/count_tokens", body).status_code == 200
    assert ask(engine, "GET", f"/v1/models/{name}").json()["id"] == MODEL.id
    assert engine.requests[0].adapter is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_strict_names(engine: FakeEngine, name: str) -> None:
    assert refused(chat(engine, {"model": name}, config=STRICT), 404)["code"] == "model_not_found"
    assert ask(engine, "GET", f"/v1/models/{name}", config=STRICT).status_code == 404


@pytest.mark.parametrize("name", ["claude", "gpt", "gpt-", "llama-3", "my-gpt-4", "o3"])
def test_other_names_are_unknown(engine: FakeEngine, name: str) -> None:
    assert refused(chat(engine, {"model": name}), 404)["code"] == "model_not_found"


PLACEHOLDERS = [
    "",
    " ",
    "local-model",
    "local",
    "default",
    "Default_Model",
    "model",
    "none",
    "unknown",
    "my-model",
    "auto",
]
PLACEHOLDERS += ["custom-model", "your-model-name", "model-name-here", "test", "null", "current", "local_llm", "any"]
SPELLINGS = ["Org/Tiny-Model", "tiny-model:latest", "openai/tiny-model", "openai/org/tiny-model", "TINY-MODEL"]


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"]


@pytest.mark.parametrize(
    ("path", "name"), [(PATHS[index % 4], name) for index, name in enumerate(PLACEHOLDERS + SPELLINGS)]
)
def test_names_that_say_no_more_than_a_model_mean_it(engine: FakeEngine, path: str, name: str) -> None:
    hi = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = (
        {"input": "x"} if path == "/v1/responses" else {"messages": hi, "prompt": "x", "max_tokens": 5}
    )
    assert post(engine, path, body | {"model": name}).json()["model"] == MODEL.id
    assert engine.requests[0].adapter is None
    if name not in ("default", "tiny-model:latest"):  # which are its names
        assert post(engine, path, body | {"model": name}, config=STRICT).status_code == 404


@pytest.mark.parametrize("name", ["openai/poet", "Poet", "poet:latest"])
def test_spellings_of_adapters(engine: FakeEngine, name: str) -> None:
    assert chat(engine, {"model": name}).json()["model"] == "poet"
    assert engine.requests[0].adapter == "poet"


@pytest.mark.parametrize("name", ["openai/gpt-4o", "openrouter/anthropic/claude-sonnet-4"])
def test_a_provider_in_front_of_a_built_in_name(engine: FakeEngine, name: str) -> None:
    assert chat(engine, {"model": name}).json()["model"] == MODEL.id


def test_an_adapter_called_like_a_placeholder_is_meant_by_it(engine: FakeEngine) -> None:
    engine.model = replace(MODEL, adapters=(replace(POET, name="local"),))
    chat(engine, {"model": "local"})
    assert engine.requests[0].adapter == "local"


def test_what_has_such_a_name_is_meant_by_it(engine: FakeEngine) -> None:
    engine.model = replace(MODEL, adapters=(replace(POET, name="gpt-poet"), POET))
    for name, adapter in (("gpt-poet", "gpt-poet"), ("gpt-4o:poet", "poet"), ("gpt-4o", None)):
        chat(engine, {"model": name})
        assert engine.requests[-1].adapter == adapter
    served = FakeEngine(model=replace(MODEL, id="org/gpt-oss-20b", name="gpt-oss-20b"))
    assert chat(served, {"model": "gpt-oss-20b"}, config=STRICT).status_code == 200


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("alias", "adapter"), [("small", None), ("tiny", None), ("claude-haiku", "poet"), ("verse", "poet")]
)
def test_aliases(engine: FakeEngine, alias: str, adapter: str | None, strict: bool) -> None:
    config = replace(ALIASES, strict_model_names=strict)
    assert chat(engine, {"model": alias}, config=config).status_code == 200
    assert engine.requests[-1].adapter == adapter
    assert ask(engine, "GET", f"/v1/models/{alias}", config=config).json()["id"] == (adapter or MODEL.id)


@pytest.mark.parametrize(("alias", "target"), [("lost", "prose"), ("again", "small")])
def test_an_alias_that_leads_nowhere_is_named(engine: FakeEngine, alias: str, target: str) -> None:
    error = refused(chat(engine, {"model": alias}, config=ALIASES), 404)
    assert error["param"] == "model"
    assert repr(alias) in error["message"] and repr(target) in error["message"]


def test_real_names_beat_aliases(engine: FakeEngine) -> None:
    chat(engine, {"model": "poet"}, config=Config(aliases={"poet": "default"}))
    assert engine.requests[-1].adapter == "poet"


@pytest.mark.parametrize("fields", [{"model": "gpt-4o", "adapter": "poet"}, {"model": "small", "adapter": "poet"}])
def test_an_adapter_beside_such_a_name(engine: FakeEngine, fields: dict[str, Any]) -> None:
    assert chat(engine, fields, config=ALIASES).json()["model"] == "poet"

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentcache import __version__
from agentcache.api.start_progress import Measuring, Phase
from agentcache.errors import StoreError
from agentcache.server.app import create_app
from agentcache.settings.config import Config
from agentcache.system.memory import Level
from tests.server.driver import ask, chat, refused, settle
from tests.server.fake_engine import MODEL, FakeEngine

POST_ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/agents"]


def test_health_in_each_state() -> None:
    engine = FakeEngine()
    answer = ask(engine, "GET", "/health")
    told = {"status": "ok", "memory_pressure": "normal", "kv_format": "4 bits (layers 0 in 8 bits, values in 4)"}
    assert (answer.status_code, answer.json()) == (200, told)
    short = ask(FakeEngine(memory_pressure=Level.CRITICAL), "GET", "/health")
    assert (short.status_code, short.json()) == (200, told | {"memory_pressure": "critical"})
    assert answer.headers["server"] == "agentcache"
    loading = ask(FakeEngine(ready=False), "GET", "/health")
    assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
    phase = Phase("reading the model", 1, 3)
    loading = ask(FakeEngine(ready=False, starting=phase), "GET", "/health").json()
    assert loading == {"status": "loading", "doing": "reading the model", "done": 1, "total": 3}
    measuring = ask(FakeEngine(measuring=Measuring(2, 16)), "GET", "/health").json()
    assert measuring["status"] == "ok" and measuring["measuring_precision"] == {"done": 2, "most": 16}
    failed = ask(FakeEngine(failure=RuntimeError("no metal")), "GET", "/health")
    assert (failed.status_code, failed.json()) == (503, {"status": "failed", "error": "no metal"})


def test_requests_while_loading_and_after_a_failure() -> None:
    assert refused(chat(FakeEngine(ready=False)), 503)["code"] == "loading"
    assert refused(ask(FakeEngine(ready=False), "GET", "/v1/models"), 503)["code"] == "loading"
    assert refused(chat(FakeEngine(failure=RuntimeError("x"))), 503)["code"] == "engine_stopped"


def test_models() -> None:
    shown = {"id": MODEL.id, "object": "model", "created": MODEL.created, "owned_by": "agentcache"}
    described = {"name": "window512.0", "kind": "window", "window": 512, "layers": 2, "bytes_per_token": 144}
    shown |= {
        "max_model_len": 4096,
        "kv_bits": 4,
        "sampling": {},
        "kv_precision": "4 (layers 0 in k8v4)",
        "kv_format": MODEL.kv_format,
        "kv_divergence": 0.003,
        "cache_groups": [described | {"bytes_per_snapshot": 0, "bytes_per_block": 36864, "packing": ""}],
        "chat_template": {"used": True, "repairs": []},
        "structured_output": True,
        "structured_output_refusal": None,
    }
    assert ask(FakeEngine(), "GET", "/v1/models").json() == {"object": "list", "data": [shown]}
    for name in (MODEL.id, MODEL.name, "default"):
        assert ask(FakeEngine(), "GET", f"/v1/models/{name}").json() == shown
    assert refused(ask(FakeEngine(), "GET", "/v1/models/other"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        (FakeEngine(), MODEL.id),
        (FakeEngine(ready=False), None),
        (FakeEngine(ready=False, failure=RuntimeError("x")), None),
    ],
)
def test_whoever_looks_whether_anybody_is_there_is_told_who(engine: FakeEngine, model: str | None) -> None:
    answer = ask(engine, "GET", "/")
    assert answer.status_code == 200
    assert answer.json() == {"name": "agentcache", "version": __version__, "model": model, "api": "/v1"}
    head = ask(engine, "HEAD", "/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == answer.headers["content-length"]


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "/v1/agents/a/b/c", "/v1/agents/a/dance"])
def test_unknown_routes(path: str) -> None:
    assert refused(ask(FakeEngine(), "GET", path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("PUT", "/v1/agents", {"GET", "HEAD", "POST"}),
        ("POST", "/v1/agents/a", {"GET", "HEAD", "DELETE"}),
        ("GET", "/v1/cache", {"DELETE"}),
    ],
)
def test_wrong_methods(method: str, path: str, allowed: set[str]) -> None:
    answer = ask(FakeEngine(), method, path)
    assert refused(answer, 405)["code"] == "method_not_allowed"
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert f"Allowed: {', '.join(sorted(allowed))}." in refused(answer, 405)["message"]


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"", b'{"a":' * 5000, b"\xff"])
def test_bodies_that_are_no_object(path: str, content: bytes) -> None:
    assert refused(ask(FakeEngine(), "POST", path, content=content), 400)["code"] == "invalid_json"


def test_cache_routes() -> None:
    engine = FakeEngine()
    assert ask(engine, "GET", "/v1/cache/stats").json() == {
        "ram_bytes": {"base": 100, "residual": None, "adapters": 0, "trunk": 0},
        "ram_used_bytes": {"base": 90, "residual": None, "adapters": 7, "trunk": 0},
        "ram_accounts": {
            "base.full": {"capacity_bytes": 60, "used_bytes": 55, "floor_bytes": 20},
            "base.window512": {"capacity_bytes": 40, "used_bytes": 35, "floor_bytes": 10},
            "adapters": {"capacity_bytes": 5, "used_bytes": 5, "floor_bytes": 0},
            "stacks": {"capacity_bytes": 4, "used_bytes": 2, "floor_bytes": 0},
        },
        "disk_bytes": 200,
        "disk_bytes_by": {"base": 150, "residual": 50},
        "evicted_blocks": {"base": 3, "residual": 2},
        "ram_budget": 300,
        "disk_budget": 400,
        "disk_budget_kind": "explicit",
        "disk_budget_reason": "",
        "blocks": {"free": 1, "live": 2, "cached": 3},
        "agents": 0,
        "quarantined": 4,
        "written_bytes": 5,
        "read_bytes": 6,
        "computed_tokens": 7,
        "cached_tokens": 8,
        "save_failures": 9,
        "running": 0,
        "waiting": 0,
        "preemptions": 0,
        "cancelled": 0,
        "failed": 0,
        "generated_tokens": 0,
        "decode_steps": 0,
        "decode_rows": 0,
        "decode_seconds": 0.0,
        "prefill_tokens": 0,
        "prefill_seconds": 0.0,
        "kernel_checks": 0,
        "kernel_differences": 0,
        "ranks": 1,
        "rank_messages": 0,
        "rank_sent_bytes": 0,
        "copied_blocks": 0,
        "computed_layer_tokens": 0,
        "saturated_residuals": 0,
        "memory_limit": 0,
        "memory_pressure": "normal",
        "pressure_evicted_blocks": 0,
        "pressure_freed_bytes": 0,
    }
    assert ask(engine, "DELETE", "/v1/cache").json() == {"cleared": True}
    assert engine.cleared == 1


def test_a_disk_that_is_full_is_not_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Full(FakeEngine):
        async def clear_cache(self) -> None:
            raise StoreError("/private/path: no space left")

    answer = ask(Full(), "DELETE", "/v1/cache")
    assert refused(answer, 507)["code"] == "store_error"
    assert "/private/path" not in answer.text
    assert "/private/path" in caplog.text


def test_unexpected_errors_are_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        async def clear_cache(self) -> None:
            raise KeyError("secret detail")

    answer = ask(Broken(), "DELETE", "/v1/cache")
    assert refused(answer, 500)["code"] == "internal_error"
    assert "secret detail" not in answer.text
    assert "secret detail" in caplog.text


def test_lifespan_starts_in_the_background_and_closes() -> None:
    engine = FakeEngine(ready=False)
    told: list[BaseException | None] = []

    async def run() -> None:
        app = create_app(engine, Config(), on_start=told.append)
        async with app.router.lifespan_context(app):
            assert not engine.ready
            await settle()
            assert engine.ready
        assert engine.closed

    asyncio.run(run())
    assert told == [None]


def test_lifespan_tells_of_a_start_that_failed() -> None:
    error = StoreError("disk")
    engine = FakeEngine(start_error=error)
    told: list[BaseException | None] = []

    async def run() -> None:
        app = create_app(engine, Config(), on_start=told.append)
        async with app.router.lifespan_context(app):
            await settle()

    asyncio.run(run())
    assert told == [error] and engine.closed


def test_the_served_models_name_is_not_a_constant() -> None:
    engine = FakeEngine(model=replace(MODEL, id="x/y", name="y"))
    assert chat(engine, {"model": "y"}).json()["model"] == "x/y"

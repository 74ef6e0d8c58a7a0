"""`agentcache doctor --url`: what is found of servers that work, that refuse, and that are none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentcache import __version__
from agentcache.cli.doctor_server import Check, examine_server, root_of
from agentcache.errors import ConfigError, EngineStopped
from agentcache.server.app import create_app
from agentcache.server_process import ServerProcess
from agentcache.settings.config import Config
from tests.cli.conftest import Invoke
from tests.server.fake_engine import MODEL, FakeEngine


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """A server of `app`, its lifespan left out, in a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, ws="none", server_header=False, loop="asyncio")
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def examined(app: ASGIApp, key: str | None = None) -> dict[str, Check]:
    with serving(app) as url:
        return {check.name: check for check in examine_server(url, key)}


def app_of(engine: FakeEngine | None = None, **settings: Any) -> ASGIApp:
    return create_app(engine or FakeEngine(), Config(**settings))


def test_a_server_that_works() -> None:
    found = examined(app_of())
    assert all(check.ok for check in found.values()), found
    names = ["reachable", "ready", "key", "model", "chat", "streaming", "messages", "responses", "tools"]
    assert list(found) == names
    assert MODEL.id in found["model"].detail and __version__ in found["model"].detail
    assert found["model"].data["max_model_len"] == 4096
    assert f"; keys and values in {MODEL.kv_format}" in found["model"].detail
    assert found["key"].detail == "none needed"
    assert "written" in found["chat"].detail and "events" in found["streaming"].detail


@pytest.mark.parametrize(
    ("key", "ok", "detail"),
    [(None, False, "--api-key-file"), ("wrong", False, "The API key is wrong"), ("s3cret", True, "accepted")],
)
def test_a_server_with_a_key(key: str | None, ok: bool, detail: str) -> None:
    found = examined(app_of(api_key="s3cret"), key)
    assert found["key"].ok is ok and detail in found["key"].detail
    assert ("chat" in found) is ok


@pytest.mark.parametrize(
    ("engine", "detail"),
    [(FakeEngine(ready=False), "loading"), (FakeEngine(ready=False, failure=EngineStopped("no device")), "no device")],
)
def test_a_server_that_is_not_ready(engine: FakeEngine, detail: str) -> None:
    found = examined(app_of(engine))
    assert list(found) == ["reachable", "ready"]
    assert not found["ready"].ok and detail in found["ready"].detail


def test_a_model_that_cannot_be_held_to_a_form() -> None:
    found = examined(app_of(FakeEngine(model=replace(MODEL, forms_refusal="no such tokenizer"))))
    assert found["tools"].ok and "no such tokenizer" in found["tools"].detail


def test_requests_that_fail_say_why() -> None:
    """Each finding stands alone: one that failed ends nothing."""
    found = examined(app_of(FakeEngine(script=lambda request: [EngineStopped("gone")])))
    assert found["model"].ok and "tools" in found
    for name in ("chat", "streaming", "messages", "responses"):
        assert not found[name].ok and "503" in found[name].detail, found[name]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [(PlainTextResponse("Welcome", headers={"Server": "nginx"}), "nginx"), (Response(status_code=404), "HTTP 404")],
)
def test_another_server(answer: Response, detail: str) -> None:
    found = examined(answer)
    assert list(found) == ["reachable"] and not found["reachable"].ok
    assert "not agentcache" in found["reachable"].detail and detail in found["reachable"].detail


@pytest.mark.parametrize("data", [5, [{"id": "a"}]])
@pytest.mark.parametrize("choices", [5, [], [5], [{"message": 5}], [{"message": {"tool_calls": [{}]}}]])
def test_answers_of_another_shape(data: Any, choices: Any) -> None:
    """Each is a finding, and none ends the command."""
    usage = {"completion_tokens": 1}
    found = examined(JSONResponse({"status": "ok", "data": data, "choices": choices, "usage": usage}))
    assert not list(found.values())[-1].ok or found["tools"].detail.startswith("no call")
    assert ("tools" in found) == isinstance(data, list)


def test_a_stream_that_is_cut() -> None:
    """As by a proxy with a limit of its own."""

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        is_stream = False

        async def cutting_send(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = any(b"event-stream" in value for _, value in message["headers"])
            elif is_stream and b"[DONE]" in message.get("body", b""):
                message = message | {"body": b""}
            await send(message)

        await app(scope, receive, cutting_send)

    app = app_of()
    found = examined(cut)
    assert found["chat"].ok and not found["streaming"].ok and "without [DONE]" in found["streaming"].detail


def test_where_no_server_is(invoke: Invoke) -> None:
    done = invoke("doctor", "--url", "http://127.0.0.1:1", "--json")
    assert done.exit_code == 1
    [found] = json.loads(done.stdout)
    assert found["name"] == "reachable" and "agentcache serve" in found["detail"]


@pytest.mark.parametrize("url", ["https://127.0.0.1:{port}", "http://no-such-host.invalid:{port}"])
def test_a_wrong_address(url: str) -> None:
    with serving(app_of()) as served:
        port = served.rpartition(":")[2]
        [found] = examine_server(url.format(port=port), None)
    assert not found.ok and ("TLS" in found.detail or "no connection" in found.detail)


def test_the_command(invoke: Invoke) -> None:
    with serving(app_of()) as url:
        done = invoke("doctor", "--url", f"{url}/v1/")
        assert done.exit_code == 0, done.stdout
        assert f"ok    reachable     {url} answers" in done.stdout
        assert invoke("doctor", "--url", url, "--check").exit_code == 2
        assert invoke("doctor", "--url", url, "--model", "x").exit_code == 2


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://a.example/v1", "https://a.example"),
        ("http://a.example/llm/v1/", "http://a.example/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, root: str) -> None:
    assert root_of(url) == root


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://a:x", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError):
        root_of(url)


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "cache", tmp_path / "log", extra=("--ram-budget", "200MB")) as server:
        found = {check.name: check for check in examine_server(server.client.url, None)}
        assert server.client.request("GET", "/v1/agents")["data"] == []
    assert all(check.ok for check in found.values()), found
    assert "called: look" in found["tools"].detail

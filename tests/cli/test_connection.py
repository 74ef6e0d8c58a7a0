from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentcache.cli.connection import agent_path, connect, open_engine, running_server, url_of
from agentcache.client import Client, ServerError
from agentcache.errors import CacheFolderInUse, InvalidRequest
from agentcache.gateway.async_engine import AsyncEngine
from agentcache.settings.config import Config
from tests.cli.conftest import Invoke
from tests.server.fake_engine import FakeEngine


class Health(BaseHTTPRequestHandler):
    server_version = "agentcache"
    sys_version = ""

    def version_string(self) -> str:
        return self.server_version

    def do_GET(self) -> None:
        body = json.dumps({"data": [], "auth": self.headers.get("authorization")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_server_is_found_by_its_name(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(port=server.server_port)
    assert running_server(config) == f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(Health, "server_version", "something else")
    assert running_server(config) is None
    assert running_server(Config(port=1)) is None


def test_a_running_server_is_used(server: HTTPServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_PORT", str(server.server_port))
    with connect(None, api_key="k") as cache:
        assert isinstance(cache, Client)
        assert cache.request("GET", "/v1/agents")["auth"] == "Bearer k"


@pytest.mark.parametrize("source", ["flag", "variable", "variable of a file", "config file"])
def test_where_commands_have_the_key_from(
    server: HTTPServer, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("AGENTCACHE_PORT", str(server.server_port))
    key_file = tmp_path / "key"
    key_file.write_text("s3cret\n")
    key_file.chmod(0o600)
    if source == "variable":
        monkeypatch.setenv("AGENTCACHE_API_KEY", "s3cret")
    if source == "variable of a file":
        monkeypatch.setenv("AGENTCACHE_API_KEY_FILE", str(key_file))
    if source == "config file":
        (tmp_path / ".agentcache").mkdir()
        (tmp_path / ".agentcache" / "config.toml").write_text(f'api_key_file = "{key_file}"\n')
    flags = ("--api-key-file", str(key_file)) if source == "flag" else ()
    result = invoke("agents", "show", "alice", "--json", *flags)
    assert json.loads(result.stdout)["auth"] == "Bearer s3cret"


def test_every_command_that_asks_a_server_takes_the_key_from_a_file(invoke: Invoke) -> None:
    for command in ("serve", "run", "warm", "restore", "agents", "adapters", "purge"):
        assert "--api-key-file" in invoke(command, "--help").stdout, command


def test_a_named_folder_is_opened_here(
    server: HTTPServer, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCACHE_PORT", str(server.server_port))
    with connect(None, cache_dir=tmp_path / "mine") as cache:
        assert not isinstance(cache, Client)
    assert engine.config.cache_dir == tmp_path / "mine"  # type: ignore[attr-defined]
    assert engine.closed


def test_only_a_server_is_warmed_up() -> None:
    """A command asks once: what it would save there it has paid before."""
    for engine, warm in ((open_engine(Config()), False), (open_engine(Config(), warm_up=True), True)):
        assert isinstance(engine, AsyncEngine)
        assert engine._warm_up is warm


def test_in_process_answers_and_refuses_like_a_server(engine: FakeEngine) -> None:
    with connect(None, api_key="k") as cache:
        assert cache.request("POST", "/v1/agents", {"id": "a"})["id"] == "a"
        with pytest.raises(ServerError, match="exists") as caught:
            cache.request("POST", "/v1/agents", {"id": "a"})
    assert (caught.value.status, caught.value.code) == (409, "conflict")


def test_an_engine_that_does_not_start_is_closed(engine: FakeEngine, invoke: Invoke) -> None:
    engine.start_error = CacheFolderInUse("the cache folder x is in use by process 7")
    result = invoke("agents")
    assert result.exit_code == 1 and engine.closed
    assert result.stderr.splitlines()[0] == "error: the cache folder x is in use by process 7"
    assert result.stderr.splitlines()[1].startswith("hint: ") and "--url" in result.stderr


def test_no_server_at_the_url_is_one_sentence(invoke: Invoke) -> None:
    result = invoke("agents", "list", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:5"), ("0.0.0.0", "http://127.0.0.1:5"), ("::", "http://[::1]:5")]
)
def test_urls(host: str, url: str) -> None:
    assert url_of(host, 5) == url


def test_agent_paths() -> None:
    assert agent_path("a.b") == "/v1/agents/a.b"
    assert agent_path("a", "warm") == "/v1/agents/a/warm"
    with pytest.raises(InvalidRequest):
        agent_path("..")

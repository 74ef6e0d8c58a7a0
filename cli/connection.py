"""Connects commands to a running server, or to an app in this process; common options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import typer
from rich.console import Console

from agentcache.client import Client, ServerError
from agentcache.errors import ConfigError
from agentcache.server.engine import Engine
from agentcache.server.validate import check_agent_id
from agentcache.settings.config import Config
from agentcache.settings.sources import load_config

PROBE_SECONDS = 1.0

Url = Annotated[
    str | None,
    typer.Option(envvar="AGENTCACHE_URL", help="A running server. Default: on the configured port, else the folder."),
]
ApiKey = Annotated[str | None, typer.Option(help="The server's API key, visible in the list of processes.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File that holds the API key.")]
Model = Annotated[str | None, typer.Option(help="Without a server: folder or hub id of the model.")]
CacheDir = Annotated[Path | None, typer.Option(help="Without a server: the cache folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data for programs.")]


class Connection(Protocol):
    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer. Raises ServerError."""


class InProcess:
    def __init__(self, engine: Engine, config: Config) -> None:
        from agentcache.server.app import create_app  # slow

        self.cache_dir = config.cache_dir
        self._runner = asyncio.Runner()
        self._engine = engine
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        local = replace(config, host="127.0.0.1")  # no network: local rules apply
        transport = httpx.ASGITransport(create_app(engine, local))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=None)

    def __enter__(self) -> InProcess:
        try:
            with progress("loading the model"):
                self._runner.run(self._engine.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._runner.run(self._http.aclose())
            self._runner.run(self._engine.close())
        finally:
            self._runner.close()

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response = self._runner.run(self._http.request(method, path, json=body))
        answer = response.json()
        if response.is_error:
            error = answer["error"]
            raise ServerError(error["message"], status=response.status_code, code=error["code"])
        return answer


def open_engine(config: Config, *, warm_up: bool = False) -> Engine:
    from agentcache.gateway.async_engine import AsyncEngine

    engine: Engine = AsyncEngine(config, warm_up=warm_up)
    return engine


def agent_path(agent: str, *verb: str) -> str:
    """Route of an agent. The id is checked: `..` would change the route."""
    return "/".join(["/v1/agents", check_agent_id(agent, "the agent's id"), *verb])


def find_server(
    url: str | None, api_key: str | None, model: str | None, cache_dir: Path | None, api_key_file: Path | None
) -> tuple[Config, str | None]:
    """Settings and URL: without `url`, of a server on the configured port, unless a model or folder is given."""
    config = load_config({"api_key": api_key, "api_key_file": api_key_file, "model": model, "cache_dir": cache_dir})
    return config, url or (running_server(config) if model is None and cache_dir is None else None)


@contextmanager
def connect(
    url: str | None,
    api_key: str | None = None,
    model: str | None = None,
    cache_dir: Path | None = None,
    *,
    api_key_file: Path | None = None,
    without_server: str | None = None,
) -> Iterator[Connection]:
    """Connect to a server; else open the cache, or raise ConfigError(without_server) if given."""
    config, found = find_server(url, api_key, model, cache_dir, api_key_file)
    if found is None and without_server is not None:
        raise ConfigError(without_server)
    if found is not None:
        with Client(found, config.api_key) as client:
            yield client
        return
    with InProcess(open_engine(config), config) as cache:
        yield cache


def running_server(config: Config) -> str | None:
    from agentcache.server.context import SERVER_NAME  # slow

    url = url_of(config.host, config.port)
    try:
        answer = httpx.get(f"{url}/health", timeout=PROBE_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return None
    return url if answer.headers.get("server") == SERVER_NAME else None


def url_of(host: str, port: int) -> str:
    """Local URL of a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def progress(what: str) -> Iterator[None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def check_operands(command: str, action: str, operands: Sequence[str], given: Sequence[str]) -> None:
    if len(given) != len(operands):
        raise ConfigError(f"usage: agentcache {' '.join([command, action, *operands])}")


def as_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

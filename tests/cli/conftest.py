"""CLI tests run with an empty home and, unless they start a server, with a scripted engine in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import connection
from agentcache.cli.main import app
from agentcache.settings.config import Config
from tests.server.fake_engine import FakeEngine

Invoke = Callable[..., Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("AGENTCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AGENTCACHE_KV", "4t")
    monkeypatch.setenv("AGENTCACHE_PORT", "1")  # nobody answers there: no server of the user's is touched
    return tmp_path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()

    def open_engine(config: Config, *, warm_up: bool = False) -> FakeEngine:
        engine.config = config  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr(connection, "open_engine", open_engine)
    return engine


@pytest.fixture
def invoke() -> Invoke:
    """`invoke("agents", "list")`: the result, with its exit code, stdout and stderr."""

    def run(*arguments: str, **options: Any) -> Any:
        return CliRunner().invoke(app, list(arguments), **options)

    return run

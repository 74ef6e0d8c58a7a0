"""Where the clients are, and a server for them whose model says what suits a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache.server_process import ServerProcess
from tests.conftest import ModelFolder

SAYING = (sys.executable, "-m", "tests.clients.serve_saying", "serve")
BUDGETS = ("--ram-budget", "1GB", "--disk-budget", "2GB")


@pytest.fixture(scope="session")
def clients_folder() -> Path:
    """What `make clients` fills: Python's in `python`, a virtual environment, Node's in `node`."""
    return Path(os.environ.get("CLIENTS", Path(sys.prefix) / "clients"))


@pytest.fixture(scope="session")
def talking_model(model_folder: ModelFolder) -> Path:
    """Qwen3's way of thinking and calling; contexts as long as the prompts of coding agents."""
    return model_folder("llama", "qwen3", num_hidden_layers=1, max_position_embeddings=262144)


@pytest.fixture(scope="session")
def saying(talking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("clients")
    options = {"model": str(talking_model), "extra": (*BUDGETS, "--kv", "4"), "command": SAYING, "ready_seconds": 120.0}
    with ServerProcess(folder / "cache", folder / "server.log", **options) as server:  # type: ignore[arg-type]
        yield server

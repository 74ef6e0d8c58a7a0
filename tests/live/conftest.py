"""One server for all tests that leave no trace but their own agents."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from agentcache.server_process import ServerProcess
from agentcache.text.tokenizer import Tokenizer
from tests.conftest import ModelFolder
from tests.live.servers import http_of, openai_of, serving


@pytest.fixture(scope="session")
def live_model(model_folder: ModelFolder) -> Path:
    """The smallest with two cache groups: what a server does around its model does not depend on its depth."""
    return model_folder("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def live_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live") / "cache"


@pytest.fixture(scope="session")
def live_server(live_model: Path, live_cache_dir: Path) -> Iterator[ServerProcess]:
    with serving(live_model, live_cache_dir) as server:
        yield server


@pytest.fixture(scope="session")
def http(live_server: ServerProcess) -> Iterator[httpx.Client]:
    with http_of(live_server) as client:
        yield client


@pytest.fixture(scope="session")
def client(live_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_of(live_server) as client:
        yield client


@pytest.fixture(scope="session")
def model_id(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


@pytest.fixture(scope="session")
def tokenizer(live_model: Path) -> Tokenizer:
    return Tokenizer.load(live_model)


@pytest.fixture
def agent() -> str:
    """An id that no other test uses."""
    return f"agent-{uuid.uuid4().hex[:12]}"

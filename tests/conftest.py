"""Fixtures for all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ModelFolder = Callable[..., Path]

# No deadlines: machines are shared and noisy. In CI the same examples every time, so that green stays green.
settings.register_profile(
    "agentcache", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("agentcache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: begun last, it would keep one process busy while the other has nothing left to do."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """`model_folder(architecture, tokenizer="byte_bpe", seed=0, **config)`: a tiny model's folder, made once a session.

    The folder is shared: copy it before changing it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str, tokenizer: str = "byte_bpe", seed: int = 0, **overrides: Any) -> Path:
        from tests.tiny import tiny_model  # imports mlx; plain-Python tests stay quick without it

        key = json.dumps([architecture, tokenizer, seed, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[key] = tiny_model(folder, architecture, tokenizer, seed, **overrides)
        return made[key]

    return make

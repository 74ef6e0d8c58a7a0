"""Fixtures for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ModelFolder = Callable[..., Path]


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

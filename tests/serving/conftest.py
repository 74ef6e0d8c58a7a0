"""Fixtures for the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ModelFolder


@pytest.fixture(scope="session")
def model(model_folder: ModelFolder) -> Path:
    """The smallest model with two cache groups, for what does not depend on the architecture."""
    return model_folder("mistral", num_hidden_layers=2)

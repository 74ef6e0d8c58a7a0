"""Fixtures for the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ModelFolder

if TYPE_CHECKING:
    from tests.serving.saved import Saved


@pytest.fixture(scope="session")
def model(model_folder: ModelFolder) -> Path:
    """The smallest model with two cache groups, for what does not depend on the architecture."""
    return model_folder("mistral", num_hidden_layers=2)


@pytest.fixture(scope="session")
def saved(model: Path, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """An agent after two turns. Its cache folder is shared: copy it before changing it."""
    from tests.serving.saved import save_two_turns  # imports mlx; plain-Python tests stay quick without it

    other = model_folder("mistral", seed=1, num_hidden_layers=2)
    return save_two_turns(model, other, tmp_path_factory.mktemp("saved"))

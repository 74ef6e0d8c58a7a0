"""A model folder is proved equal to mlx-lm's once a process, not at each load: two thirds of what loading takes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from agentcache.models import loader
from agentcache.models.attachment import Everywhere, Hosted

State = tuple[Any, ...]


def prove_once(patch: pytest.MonkeyPatch) -> None:
    """From now on `loader.load` proves the attention of the same files once only."""
    read, host, proven, reading = loader.read_model, loader.host, set[State](), threading.local()

    def read_and_note(path_or_hub_id: str) -> loader.ReadModel:
        model = read(path_or_hub_id)
        reading.state = _state(model.path)
        return model

    def host_unless_proven(
        model: nn.Module, model_type: str, config: dict[str, Any], *, choose: Any, **options: Any
    ) -> Hosted:
        known = (*getattr(reading, "state", ()), choose)  # a thread that takes over a model has read none
        hosted = host(model, model_type, config, check=known not in proven, choose=choose, **options)
        if isinstance(choose, Everywhere):  # what measures knows the model, which would stay in memory
            proven.add(known)
        return hosted

    patch.setattr(loader, "read_model", read_and_note)
    patch.setattr(loader, "host", host_unless_proven)


def _state(folder: Path) -> State:
    """Changes with the files."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    return folder, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)

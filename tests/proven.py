"""What a load finds out about the same files is found out once a process: most of the time that a load takes.

A model folder is proved equal to mlx-lm's, and mlx-lm's sources are read.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from agentcache.models import fingerprint, loader
from agentcache.models.attachment import Everywhere, Hosted
from agentcache.system.files import file_identity

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


def examine_once(patch: pytest.MonkeyPatch) -> None:
    """From now on `source_digest` parses each version of a module once only, also where a cache folder is new."""
    examine, known = fingerprint._examine, dict[tuple[str, str], list[str]]()

    def examine_unless_known(name: str, file: Path) -> list[str]:
        key = (name, file_identity(file))
        if key not in known:
            known[key] = examine(name, file)
        return known[key]

    patch.setattr(fingerprint, "_examine", examine_unless_known)


def _state(folder: Path) -> State:
    """Changes with the files."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    return folder, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)

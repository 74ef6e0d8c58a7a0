"""The model that serves when none is named: a Qwen3 of 4.7 million parameters, made by `training/`.

The package has float16 weights; first use writes float32, which CPUs compute fastest.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from agentcache.errors import StoreError
from agentcache.store.cache_files import whose
from agentcache.system.durable import sync, sync_path
from agentcache.system.files import give_to_owner, make_private_folder

DATA = Path(__file__).parent / "embedded_model"
TEXT_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
WEIGHTS_FILE = "model.safetensors"


def embedded_file(name: str) -> bytes:
    return (DATA / name).read_bytes()


def embedded_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(embedded_file("config.json"))
    return config


def embedded_model_path(home: Path) -> Path:
    """Folder of the model under `home`, named by content, made on first use. Raises StoreError."""
    packaged = {name: embedded_file(name) for name in (*TEXT_FILES, "config.json", WEIGHTS_FILE)}
    folder = home / "models" / f"embedded-{_digest(packaged)[:8]}"
    try:
        if not folder.is_dir():
            weights = {name: array.astype(np.float32) for name, array in load(packaged[WEIGHTS_FILE]).items()}
            make_folder(folder, packaged | {WEIGHTS_FILE: save(weights, metadata={"format": "mlx"})})
    except OSError as error:
        raise StoreError(f"cannot use the embedded model below {home}: {error}{whose(error)}") from error
    return folder


def _digest(files: dict[str, bytes]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        state.update(f"{name} {len(content)} ".encode() + content)
    return state.hexdigest()


def make_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` beside `folder` and rename them into place, unless another writer was first.

    Modes are 0700 and 0600; what root makes belongs to the owner of the folder above. An OSError leaves nothing.
    """
    for parent in (folder.parent.parent, folder.parent):
        make_private_folder(parent)
    building = folder.with_name(f".{folder.name}-{secrets.token_hex(6)}")
    try:
        make_private_folder(building)
        for name, content in files.items():
            _write(building / name, content)
        sync_path(building)
        os.rename(building, folder)
        sync_path(folder.parent)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        give_to_owner(descriptor, path.parent)
        file.write(content)
        file.flush()
        sync(file.fileno(), covered=True)

"""The model that serves when none is named: small, trained, and in the package, so that everything works offline.

A Qwen3 of 4.7 million parameters (8 layers, 4 heads of 64 over 2 key-value heads, norms on queries and keys, tied
embeddings) that has learnt one thing: to read what it was told and say it again when asked. `training/` in the
repository made it, and says on what. The package holds its weights as float16; on first use they are written out as
float32, which is what CPUs compute fastest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from agentcache.errors import StoreError
from agentcache.models.builtin.new_folder import make_folder
from agentcache.store.cache_files import whose

DATA = Path(__file__).parent / "embedded_model"
TEXT_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
WEIGHTS_FILE = "model.safetensors"


def embedded_file(name: str) -> bytes:
    """Content of one of the packaged files."""
    return (DATA / name).read_bytes()


def embedded_config() -> dict[str, Any]:
    """The model's `config.json`."""
    config: dict[str, Any] = json.loads(embedded_file("config.json"))
    return config


def embedded_model_path(home: Path) -> Path:
    """Folder of the embedded model under `home`, made on first use (19 MB, a few tenths of a second).

    The folder's name holds a digest of the packaged files, so a newer agentcache makes a new folder. It appears in one
    rename, mode 0700: processes that start at once do not see half a model.

    Raises:
        StoreError: `home` cannot be read or written.
    """
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

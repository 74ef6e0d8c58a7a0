"""`precision.json` in the cache folder: KV precision of each model.

One measurement holds for all starts, so that they share blocks. A damaged file is ignored, and precision is measured
again. An unavailable one ends the start, since another precision would lose all blocks.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from agentcache.errors import FileUnavailable
from agentcache.kv.packing import Precision
from agentcache.store.atomic import Fault, as_store_error, replace_file
from agentcache.store.cache_files import CacheFiles, WrongFile

NAME = "precision.json"
_VERSION = 1  # of the file; a choice outlives changes in how it is measured
_MAX_BYTES = 1 << 20


def read_precision(cache_dir: Path, fingerprint: str) -> Precision | None:
    """Return the precision chosen for a model; None without a valid choice. Raises FileUnavailable."""
    try:
        return Precision.of(_read(cache_dir)[fingerprint])
    except (LookupError, TypeError, ValueError):
        return None


def write_precision(cache_dir: Path, fingerprint: str, precision: Precision, fault: Fault = lambda step: None) -> None:
    """Save a choice, under the folder's lock.

    Raises:
        FileUnavailable: the file is not touched.
        StoreError: write failed.
    """
    if read_precision(cache_dir, fingerprint) == precision:
        return
    models = _read(cache_dir) | {fingerprint: precision.as_data()}
    content = json.dumps({"version": _VERSION, "models": models, "checksum": _checksum(models)}, indent=1)
    root = cache_dir.resolve()
    with as_store_error(f"write {root / NAME}"):
        replace_file(CacheFiles(root), root / NAME, content.encode(), "precision", fault)


def _read(cache_dir: Path) -> dict[str, Any]:
    path = cache_dir.resolve() / NAME
    try:
        content = json.loads(CacheFiles(path.parent).read(path, _MAX_BYTES))
        models: dict[str, Any] = content["models"]
        if isinstance(models, dict) and (content["version"], content["checksum"]) == (_VERSION, _checksum(models)):
            return models
        version = content["version"]
    except (FileNotFoundError, WrongFile, ValueError, LookupError, TypeError, RecursionError):
        return {}
    except (OSError, MemoryError) as error:
        raise FileUnavailable(f"{path.parent}: {CacheFiles.describe(path, error)}") from error
    if type(version) is int and version > _VERSION:
        raise FileUnavailable(f"a newer release wrote {path}: version {version}, and {_VERSION} is known")
    return {}


def _checksum(models: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(models, sort_keys=True).encode(), digest_size=16).hexdigest()

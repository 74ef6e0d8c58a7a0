"""`precision.json` in the cache folder: in how many bits the keys and values of each model are kept.

What was measured once holds for all starts, so that they find each other's blocks. A file that is not as it was written
counts for nothing; then it is measured again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from agentcache.kv.precision import Precision
from agentcache.store.atomic import Fault, as_store_error, replace_file
from agentcache.store.cache_files import CacheFiles

NAME = "precision.json"
_VERSION = 1  # of the file; a choice stands, however the next one would be measured
_MAX_BYTES = 1 << 20


def read_precision(cache_dir: Path, fingerprint: str) -> Precision | None:
    """What was chosen for the model of this fingerprint; None where nothing was, or nothing that makes sense."""
    try:
        return Precision.of(_read(cache_dir)[fingerprint])
    except (LookupError, TypeError, ValueError):
        return None


def write_precision(cache_dir: Path, fingerprint: str, precision: Precision, fault: Fault = lambda step: None) -> None:
    """Keep what was chosen; by who holds the folder's lock.

    Raises:
        StoreError: the disk is full, say.
    """
    if read_precision(cache_dir, fingerprint) == precision:
        return
    models = _read(cache_dir) | {fingerprint: precision.as_data()}
    content = json.dumps({"version": _VERSION, "models": models, "checksum": _checksum(models)}, indent=1)
    root = cache_dir.resolve()
    with as_store_error(f"write {root / NAME}"):
        replace_file(CacheFiles(root), root / NAME, content.encode(), "precision", fault)


def _read(cache_dir: Path) -> dict[str, Any]:
    root = cache_dir.resolve()
    try:
        content = json.loads(CacheFiles(root).read(root / NAME, _MAX_BYTES))
        models: dict[str, Any] = content["models"]
        if isinstance(models, dict) and (content["version"], content["checksum"]) == (_VERSION, _checksum(models)):
            return models
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return {}


def _checksum(models: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(models, sort_keys=True).encode(), digest_size=16).hexdigest()

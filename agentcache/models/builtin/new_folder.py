"""A model folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from agentcache.durable import sync, sync_path


def make_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` beside `folder` and rename them into place; a second writer keeps the first one's.

    Folders have mode 0700, files 0600.

    Raises:
        OSError: the disk is full or may not be written; nothing is left behind.
    """
    for parent in (folder.parent.parent, folder.parent):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
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
        file.write(content)
        file.flush()
        sync(file.fileno(), covered=True)

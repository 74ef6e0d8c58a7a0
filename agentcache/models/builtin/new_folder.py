"""A model folder that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from agentcache.system.durable import sync, sync_path
from agentcache.system.files import give_to_owner, make_private_folder


def make_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` beside `folder` and rename them into place; a second writer keeps the first one's.

    Folders have mode 0700, files 0600. What root makes belongs to the owner of the folder above.

    Raises:
        OSError: the disk is full or may not be written; nothing is left behind.
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

"""Fixtures for the tests of what is on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RAM_DISK = Path("/dev/shm")


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are flushed at once, where there is room: for hundreds of runs none of which loses power."""
    if not RAM_DISK.is_dir() or shutil.disk_usage(RAM_DISK).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=RAM_DISK) as folder:
        yield Path(folder)

"""Write small files atomically, readable by their owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`, readable by its owner only.

    Not synced: a power loss may leave a torn file, so readers must check the content.

    Raises:
        OSError: the write failed; the old file is unchanged.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(6)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

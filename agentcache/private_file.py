"""A small file that is written as a whole, for its owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Put `data` in the place of what is there, readable by its owner only.

    It is not waited for until it is on the disk: after a loss of power it may be torn, and whoever reads it checks it.

    Raises:
        OSError: it could not be written; what was there still is.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(6)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

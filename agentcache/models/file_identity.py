"""Whether a file is still the one whose content is known."""

from __future__ import annotations

from pathlib import Path


def file_identity(file: Path) -> str:
    """Changes whenever the file's content may have changed: its path, size, times and inode."""
    stat = file.stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"

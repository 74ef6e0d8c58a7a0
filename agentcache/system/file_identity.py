from __future__ import annotations

from pathlib import Path


def file_identity(file: Path) -> str:
    """Path, size, times and inode, which change whenever the content may have changed."""
    stat = file.stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"

"""Kernels that an earlier start has found right on this machine are not tried again: on CUDA that takes 20 seconds.

Remembered are those that were right, by everything that could change it: the text of our kernels, MLX, the device, its
driver and the shape. What was wrong is tried again at every start.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import mlx.core as mx

from agentcache.metal_kernels import kernel_text
from agentcache.models.memo import read_memo, write_memo

_DRIVER = Path("/proc/driver/nvidia/version")
_FOUND_RIGHT = "right"


class KernelMemo:
    """What is known of shapes. One a process.

    Attributes:
        found: shapes that are right, by their digests.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._file: Path | None = None

    def knows(self, shape: object) -> bool:
        """Whether kernels for this shape were right, here or at an earlier start."""
        return _digest(shape) in self.found

    def note(self, shape: object) -> None:
        """They are."""
        self.found[_digest(shape)] = _FOUND_RIGHT
        if self._file is not None:
            self.keep_in(self._file)

    def recall(self, file: Path) -> None:
        """Know what an earlier start has written."""
        self.found |= read_memo(file)

    def keep_in(self, file: Path) -> None:
        """Write it, and what is found from now on, for later starts; nothing is done where there is nothing new."""
        self._file = file
        before = read_memo(file)
        if not self.found.keys() <= before.keys():
            write_memo(file, before | self.found)


def _digest(shape: object) -> str:
    return hashlib.blake2b(f"{_machine()} {shape!r}".encode(), digest_size=16).hexdigest()


@cache
def _machine() -> str:
    """The texts, and all that compiles and runs them."""
    info = {name: value for name, value in mx.device_info().items() if name != "free_memory"}
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.is_file() else ""
    texts = [file.read_bytes() for file in sorted(Path(kernel_text.__file__).parent.glob("*.py"))]
    text = hashlib.blake2b(b"".join(texts)).hexdigest()
    return repr((mx.__version__, sorted(info.items()), platform.version(), driver, text))

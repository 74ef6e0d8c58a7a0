"""Kernels that passed the self-test on this machine: later starts skip it.

The key has kernel text, MLX, device, driver and shape. Failures are tried again.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import mlx.core as mx

from agentcache.metal_kernels import kernel_text
from agentcache.system.memo import read_memo, write_memo

_DRIVER = Path("/proc/driver/nvidia/version")
_FOUND_RIGHT = "right"


class KernelMemo:
    """Shapes that passed, by digest in `found`; one per process."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._file: Path | None = None

    def knows(self, shape: object) -> bool:
        return _digest(shape) in self.found

    def note(self, shape: object) -> None:
        self.found[_digest(shape)] = _FOUND_RIGHT
        if self._file is not None:
            self.keep_in(self._file)

    def recall(self, file: Path) -> None:
        self.found |= read_memo(file)

    def keep_in(self, file: Path) -> None:
        """Write results, now and as they come; unchanged results are not written."""
        self._file = file
        before = read_memo(file)
        if not self.found.keys() <= before.keys():
            write_memo(file, before | self.found)


def _digest(shape: object) -> str:
    return hashlib.blake2b(f"{_machine()} {shape!r}".encode(), digest_size=16).hexdigest()


@cache
def _machine() -> str:
    """Kernel texts, and all that compiles and runs them."""
    info = {name: value for name, value in mx.device_info().items() if name != "free_memory"}
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.is_file() else ""
    texts = [file.read_bytes() for file in sorted(Path(kernel_text.__file__).parent.glob("*.py"))]
    text = hashlib.blake2b(b"".join(texts)).hexdigest()
    return repr((mx.__version__, sorted(info.items()), platform.version(), driver, text))

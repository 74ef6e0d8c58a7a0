"""Compile kernels for CUDA, and cache the results across processes.

`mx.fast.cuda_kernel` compiles every kernel again in each process, behind large headers, which takes seconds. The cached
code is executed. So it has a folder of its own, apart from models and agents' files, which may come from elsewhere. A
file is used only if no other user can write to the folder and its checksum is right.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx.core as mx

from agentcache.metal_kernels.nvrtc import Compiler, DoesNotCompile, NoCompiler, loaded_library
from agentcache.system.private_file import write_private

log = logging.getLogger("agentcache.kernels")

_DIGEST_BYTES = 32
_UNUSED_SECONDS = 90 * 86_400  # files of older versions
_OTHERS_MAY_WRITE = 0o022


def default_folder() -> Path:
    return Path.home() / ".agentcache" / "kernels"


class CompiledKernels:
    """A file is a checksum and a cubin. Its name is a hash of everything that the cubin depends on."""

    def __init__(self, folder: Path, compiler: Compiler) -> None:
        self._compiler = compiler
        self._folder = folder if _is_private(folder) else None

    def get(self, text: str) -> bytes:
        """Return the cubin of a text, cached or compiled. Raises DoesNotCompile, with the compiler's log."""
        if self._folder is None:
            return self._compiler.compile(text)
        compiler = self._compiler
        of = _digest(repr((compiler.version, compiler.architecture, text)).encode())
        file = self._folder / f"{of.hex()}.cubin"
        if (kept := _read(file)) is not None:
            return kept
        cubin = compiler.compile(text)
        with suppress(OSError):  # the next start compiles it again
            write_private(file, _digest(file.name.encode() + cubin) + cubin)
            _remove_unused(self._folder)
        return cubin


def _read(file: Path) -> bytes | None:
    with suppress(OSError):
        data = file.read_bytes()
        digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest == _digest(file.name.encode() + cubin):
            os.utime(file)
            return cubin
    return None


def cubin_of(text: str) -> bytes | None:
    """The cubin for this process's device; None if MLX must compile it, or report the error."""
    try:
        return _kernels_here().get(text)
    except (NoCompiler, DoesNotCompile) as error:
        _tell(str(error))
        return None


@cache
def _kernels_here() -> CompiledKernels:
    info = mx.device_info()
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    # As in MLX: from 9.0 on with architecture-specific features.
    architecture = f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"
    return CompiledKernels(default_folder(), Compiler.of_library(loaded_library(), architecture))


@cache
def _tell(why: str) -> None:
    log.info("kernels are compiled by MLX at each start: %s", why)


def _is_private(folder: Path) -> bool:
    """Create the folder; return whether it belongs to the user and no other user can write to it."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        log.info("compiled kernels are not kept: %s", error)
        return False
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_MAY_WRITE:
        log.warning("compiled kernels are not kept: others can write to %s", folder)
        return False
    return True


def _remove_unused(folder: Path) -> None:
    before = time.time() - _UNUSED_SECONDS
    for file in folder.iterdir():
        if file.stat().st_mtime < before:
            file.unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()

"""Compile kernels for CUDA and cache them on disk: `mx.fast.cuda_kernel` takes seconds in each process.

Cached code is executed: its folder is apart from models and agents' files, which may come from elsewhere; no other user
may write there, and checksums must be right.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from agentcache.system.files import write_private

log = logging.getLogger("agentcache.kernels")

_DIGEST_BYTES = 32
_UNUSED_SECONDS = 90 * 86_400  # files of older versions
_OTHERS_MAY_WRITE = 0o022


def default_folder() -> Path:
    return Path.home() / ".agentcache" / "kernels"


class CompiledKernels:
    """Cubins in files behind their checksums, named by a hash of all that they depend on."""

    def __init__(self, folder: Path, compiler: Compiler) -> None:
        self._compiler = compiler
        self._folder = folder if _is_private(folder) else None

    def get(self, text: str) -> bytes:
        """Return a text's cubin, cached or compiled. Raises DoesNotCompile."""
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
    """The cubin for this device; None if MLX must compile it."""
    try:
        return _kernels_here().get(text)
    except (NoCompiler, DoesNotCompile) as error:
        _tell(str(error))
        return None


@cache
def _kernels_here() -> CompiledKernels:
    info = mx.device_info()
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    # As in MLX: architecture-specific from 9.0 on.
    architecture = f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"
    return CompiledKernels(default_folder(), Compiler.of_library(loaded_library(), architecture))


@cache
def _tell(why: str) -> None:
    log.info("kernels are compiled by MLX at each start: %s", why)


def _is_private(folder: Path) -> bool:
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


_NAME = "libnvrtc.so."
_HEADER = "cuda_fp16.h"
_OPTIONS = ("--device-as-default-execution-space",)  # as in MLX


class NoCompiler(Exception):
    """NVRTC is not loaded, or its headers are missing."""


class DoesNotCompile(Exception):
    """The compiler's log for a text."""


@dataclass(frozen=True)
class Compiler:
    """NVRTC for one architecture, such as sm_90a."""

    library: ctypes.CDLL
    headers: Path
    architecture: str

    @classmethod
    def of_library(cls, library: Path, architecture: str) -> Compiler:
        try:
            return cls(ctypes.CDLL(str(library)), _headers_of(library), architecture)
        except OSError as error:
            raise NoCompiler(str(error)) from error

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, text: str) -> bytes:
        """Compile to a cubin. Raises DoesNotCompile."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        try:
            options = [f"--gpu-architecture={self.architecture}", f"--include-path={self.headers}", *_OPTIONS]
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self.library.nvrtcCompileProgram(program, len(options), given):
                raise DoesNotCompile(self._get("ProgramLog", program).rstrip(b"\0").decode(errors="replace"))
            return self._get("CUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise DoesNotCompile(f"{name}: error {code}")


def loaded_library() -> Path:
    """The NVRTC that this process has loaded. Raises NoCompiler."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NoCompiler(str(error)) from error
    for line in maps.splitlines():
        path = Path(line.partition("/")[1] + line.partition("/")[2])
        if path.name.startswith(_NAME):
            return path
    raise NoCompiler(f"no {_NAME}* is loaded in this process")


def _headers_of(library: Path) -> Path:
    for folder in _header_folders(library):
        if (folder / _HEADER).is_file():
            return folder
    raise NoCompiler(f"no {_HEADER} belongs to {library}")


def _header_folders(library: Path) -> Iterator[Path]:
    # Beside the library (toolkit, packages for CUDA 13), or in another package (CUDA 12).
    yield library.parent.parent / "include"
    yield library.parent.parent.parent / "cuda_runtime" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "include"
    yield Path("/usr/local/cuda/include")

"""NVIDIA's runtime compiler (NVRTC), as loaded by MLX for its own kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = "libnvrtc.so."
_HEADER = "cuda_fp16.h"
_OPTIONS = ("--device-as-default-execution-space",)  # as in MLX


class NoCompiler(Exception):
    """NVRTC is not loaded in this process, or its headers are missing."""


class DoesNotCompile(Exception):
    """The compiler's log for a text."""


@dataclass(frozen=True)
class Compiler:
    """NVRTC for one GPU architecture, such as sm_90a."""

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
        """Compile to a cubin. Raises DoesNotCompile, with the compiler's log."""
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
    """The NVRTC library loaded in this process. Raises NoCompiler."""
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
    """Beside the library (toolkit, packages for CUDA 13), or in another package (CUDA 12)."""
    yield library.parent.parent / "include"
    yield library.parent.parent.parent / "cuda_runtime" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "include"
    yield Path("/usr/local/cuda/include")

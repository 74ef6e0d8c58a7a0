"""Kernels that are compiled for CUDA: kept for later processes, and never taken from where others can write."""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from agentcache.metal_kernels import compiled, kernel_text
from agentcache.metal_kernels.compiled import (
    CompiledKernels,
    Compiler,
    DoesNotCompile,
    NoCompiler,
    cubin_of,
    loaded_library,
)
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.latent_decode import LatentShape
from agentcache.metal_kernels.self_test import Shape, differences
from agentcache.metal_kernels.tiling import HeadShape
from tests.marks import slow

TEXT = "a kernel"


@dataclass
class Counting:
    """Stands in for NVIDIA's compiler, and remembers what it was given."""

    version: tuple[int, int] = (13, 0)
    architecture: str = "sm_90a"
    given: list[str] = field(default_factory=list)

    def compile(self, text: str) -> bytes:
        self.given.append(text)
        return f"{self.version} {self.architecture} {text}".encode()


def process(folder: Path, **compiler: Any) -> tuple[CompiledKernels, Counting]:
    """What another process has of the same folder."""
    counting = Counting(**compiler)
    return CompiledKernels(folder, counting), counting  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "kernels"


@pytest.fixture
def kept(folder: Path) -> Path:
    """The file of `TEXT`, which a process before has compiled."""
    process(folder)[0].get(TEXT)
    [file] = folder.iterdir()
    return file


def test_what_one_process_has_compiled_the_next_finds(folder: Path) -> None:
    first, _ = process(folder)
    second, compiler = process(folder)
    assert first.get(TEXT) == second.get(TEXT)
    assert not compiler.given


def test_what_cannot_be_kept_is_compiled(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    kernels, compiler = process(not_a_folder)
    assert kernels.get(TEXT).endswith(b" a kernel")
    assert compiler.given == [TEXT]


def test_a_process_asks_once_for_what_it_launches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, launched = list[str](), list[bytes]()
    monkeypatch.setattr(kernel_text, "device", lambda: "cuda")
    monkeypatch.setattr(kernel_text, "cubin_of", lambda text: (asked.append(text), b"cubin")[1])
    monkeypatch.setattr(
        mx.fast, "precompiled_cuda_kernel", lambda *, compiled_source, **_: launched.append(compiled_source)
    )
    kernel, x = KernelText("once", ("x",), ("y",), "y[0] = T(x[0]);"), mx.zeros(1, mx.float16)
    for constants in ({"T": mx.float32}, {"T": mx.float32}, {"T": mx.bfloat16}):
        kernel.launch([x], constants, threadgroups=1, threads=32, outputs=[((1,), constants["T"])])
    assert launched == [b"cubin"] * 3
    assert [text.count("using T = float;") for text in asked] == [1, 0]
    assert "void once(const __half* x, __nv_bfloat16* y)" in asked[1]


@pytest.mark.parametrize("other", [{"version": (13, 1)}, {"architecture": "sm_80"}], ids=str)
def test_what_another_compiler_made_is_not_taken(other: dict[str, Any], folder: Path, kept: Path) -> None:
    kernels, compiler = process(folder, **other)
    assert kernels.get(TEXT) != process(folder)[0].get(TEXT)
    assert compiler.given == [TEXT]


@pytest.mark.parametrize("at", [0, 31, 32, -1], ids=lambda at: f"byte {at}")
def test_a_changed_byte_is_noticed_and_mended(at: int, folder: Path, kept: Path) -> None:
    right = kept.read_bytes()
    wrong = bytearray(right)
    wrong[at] ^= 1
    kept.write_bytes(wrong)
    kernels, compiler = process(folder)
    assert kernels.get(TEXT) == right[32:]
    assert compiler.given == [TEXT]
    assert kept.read_bytes() == right


@pytest.mark.parametrize("length", [0, 1, 32, -1], ids=lambda length: f"to {length}")
def test_a_torn_file_is_not_taken(length: int, folder: Path, kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:length])
    kernels, compiler = process(folder)
    kernels.get(TEXT)
    assert compiler.given == [TEXT]


def test_another_kernel_s_file_is_not_taken(folder: Path, kept: Path) -> None:
    process(folder)[0].get("another")
    [other] = set(folder.iterdir()) - {kept}
    os.replace(other, kept)
    kernels, compiler = process(folder)
    assert kernels.get(TEXT).endswith(b" a kernel")
    assert compiler.given == [TEXT]


def test_only_its_user_can_read_and_write_them(folder: Path, kept: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702], ids=oct)
def test_where_others_can_write_nothing_is_taken_or_kept(
    mode: int, folder: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(mode)
    kernels, compiler = process(folder)
    kernels.get(TEXT)
    kernels.get("another")
    assert compiler.given == [TEXT, "another"]
    assert list(folder.iterdir()) == [kept]
    assert "others can write" in caplog.text


def test_what_belongs_to_another_user_is_not_taken(folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    kernels, compiler = process(folder)
    kernels.get(TEXT)
    assert compiler.given == [TEXT]


def test_what_nobody_uses_goes_with_time(folder: Path, kept: Path) -> None:
    long_ago = time.time() - 100 * 86_400
    process(folder)[0].get("of another version")
    [other] = set(folder.iterdir()) - {kept}
    half_written = folder / "of-a-killed-process.tmp"
    half_written.touch()
    for file in (kept, other, half_written):
        os.utime(file, (long_ago, long_ago))
    process(folder)[0].get(TEXT)  # used
    process(folder)[0].get("new")
    assert kept.exists()
    assert not other.exists() and not half_written.exists()
    assert len(list(folder.iterdir())) == 2


def test_without_a_compiler_mlx_compiles(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> CompiledKernels:
        raise NoCompiler("none is loaded")

    monkeypatch.setattr(compiled, "_kernels_here", none)
    compiled._tell.cache_clear()
    with caplog.at_level(logging.INFO):
        assert cubin_of(TEXT) is None
        assert cubin_of(TEXT) is None
    assert caplog.text.count("none is loaded") == 1


# -- NVIDIA's compiler, which needs no GPU ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Path:
    """Of the package that is installed for development where there is one."""
    try:
        import nvidia
    except ImportError:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    for parent in nvidia.__path__:
        for found in Path(parent).glob("cu13/lib/libnvrtc.so.13"):
            return found
    pytest.skip("nvidia-cuda-nvrtc is not installed")


def texts(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled for a shape, without launching it."""
    found: dict[str, None] = {}

    def note(kernel: KernelText, inputs: list[mx.array], constants: Any, *, outputs: Any, **_grid: int) -> Any:
        found[kernel.cuda_text([each.dtype for each in inputs], [dtype for _, dtype in outputs], constants)] = None
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(KernelText, "launch", note)
    for _ in differences(shape):
        pass
    return list(found)


SHAPES = [
    slow(HeadShape(128, 8, 4, 64, mx.bfloat16)),
    slow(HeadShape(128, 2, 3, 64, mx.float16, value_rank=16)),
    slow(HeadShape(96, 2, 16, 32, mx.float16, value_rank=8, key_rank=8, pairs=16, interleaved=True, normed=True)),
    HeadShape(128, 8, 4, 64, mx.bfloat16, by_channel=True),
    slow(HeadShape(64, 2, 2, 64, mx.float32, by_channel=True)),
    slow(HeadShape(96, 2, 16, 32, mx.float16, by_channel=True, value_rank=8, key_rank=8, pairs=16)),
    slow(HeadShape(256, 2, 4, 64, mx.float16, bits=8, value_bits=8)),
    LatentShape(512, 64, 16, 64, mx.bfloat16),
    slow(LatentShape(64, 32, 3, 32, mx.float32, 8)),
    slow(HeadShape(64, 2, 2, 64, mx.float32)),
    slow(HeadShape(256, 2, 1, 64, mx.bfloat16, value_rank=64, key_rank=64, pairs=128)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_text_is_compiled(shape: Shape, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler.of_library(library, "sm_90a")
    cubins = [compiler.compile(text) for text in texts(shape, monkeypatch)]
    assert len(cubins) > 1
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


@pytest.mark.parametrize("architecture", ["sm_80", slow("sm_89"), slow("sm_100a"), slow("sm_120a")])
def test_they_are_compiled_for_other_gpus(architecture: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler.of_library(library, architecture)
    assert compiler.version >= (13, 0)
    for text in texts(LatentShape(128, 64, 4, 64, mx.float16), monkeypatch):
        assert compiler.compile(text)


def test_what_does_not_compile_is_told(library: Path) -> None:
    with pytest.raises(DoesNotCompile, match='identifier "nonsense" is undefined'):
        Compiler.of_library(library, "sm_90a").compile('extern "C" __global__ void k() { nonsense = 1; }')


def test_an_architecture_that_it_does_not_know_is_told(library: Path) -> None:
    with pytest.raises(DoesNotCompile, match="gpu-architecture"):
        Compiler.of_library(library, "sm_7").compile("")


def test_the_library_is_found_where_it_is_loaded(library: Path) -> None:
    Compiler.of_library(library, "sm_90a")
    assert loaded_library().samefile(library)


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoCompiler):
        Compiler.of_library(tmp_path / "libnvrtc.so.13", "sm_90a")


def test_without_headers_there_is_no_compiler(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_header_folders", lambda library: iter([tmp_path]))
    with pytest.raises(NoCompiler, match=r"cuda_fp16\.h"):
        Compiler.of_library(library, "sm_90a")

"""From a kernel's text to a library: checked strictly as Metal's dialect of C++, then compiled to run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import mlx

from tests.metal_kernels.emulator.lint import lint

HERE = Path(__file__).parent
MLX_INCLUDES = next(Path(path) / "include" for path in mlx.__path__ if (Path(path) / "include").exists())
_CACHE = Path(tempfile.gettempdir()) / f"agentcache-emulator-{os.getuid()}"
_COMMON = [
    "-nostdinc++",
    "-ferror-limit=8",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-everything",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
]
_STRICT = [
    "-std=c++14",
    "-DMSL_STRICT",
    "-Werror=c++17-extensions",
    "-Werror=c++20-extensions",
    "-Werror=implicit-float-conversion",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-Werror=conditional-uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=vla-extension",
    "-Werror=vla-cxx-extension",
    "-Werror=array-bounds",
    "-Werror=shift-count-overflow",
]
# A loop that became memcpy would escape the hooks, so would vector code.
_RUN = [
    "-std=c++17",
    "-O1",
    "-gline-tables-only",
    "-fPIC",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-disable-loop-idiom-all",
    "-fsanitize-coverage=trace-pc-guard,trace-loads,trace-stores",
    "-fsanitize=bounds,integer-divide-by-zero,float-cast-overflow,shift-exponent,signed-integer-overflow",
    "-fsanitize-minimal-runtime",
    "-fsanitize-recover=all",
    "-ffp-contract=off",
]
_UNROLL = re.compile(r'_Pragma\("clang loop unroll\(full\)"\)')
_RUNTIME = ["-std=c++17", "-O2", "-fPIC", "-c"]
# In front of every kernel.
_PREAMBLE = "#include <mlx_utils.h>\n" + (HERE / "attributes.h").read_text()


class KernelSyntaxError(Exception):
    """Metal's compiler, or CUDA's, would refuse the text."""


def clang() -> str | None:
    """The compiler to use, or None if there is none."""
    names = [os.environ.get("AGENTCACHE_CLANG", ""), *(f"clang++-{version}" for version in (21, 20, 19, 18)), "clang++"]
    found = [path for name in names if name and (path := shutil.which(name))]
    return next((path for path in found if _version(path) >= 18), None)


@cache
def _version(path: str) -> int:
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", said)
    return int(match[1]) if match else 0


def check(source: str) -> None:
    """Raise KernelSyntaxError if `source` is not Metal."""
    if found := lint(source):
        raise KernelSyntaxError("\n".join(found))


@cache
def build(source: str, strict: bool = True) -> Path:
    """The library of a kernel's text; made once, also between runs.

    Raises:
        KernelSyntaxError: it does not compile.
    """
    if strict:
        check(source)
    code = translate(source)
    folder = _folder()
    library = folder / f"{_digest(code, str(strict))}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        file, built = work / "kernel.cpp", work / "kernel.so"
        file.write_text(code)
        _compile("-fsyntax-only", _STRICT, file)
        file.write_text(_UNROLL.sub("", code))  # which changes no result, and takes clang half a minute
        _compile("-c", _RUN, file, "-o", str(work / "kernel.o"))
        _link(work / "kernel.o", built)
        built.rename(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """A library of `build`. Loaded privately: every kernel has a runtime of its own."""
    return ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def translate(source: str) -> str:
    """The kernel as a C++ function without parameters, which takes its buffers and attributes from the runtime.

    It stands behind `_PREAMBLE`.
    """
    kernel = re.search(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", source, re.S)
    if kernel is None:
        raise KernelSyntaxError("there is no kernel")
    name, parameters = kernel[1], kernel[2].split(",\n")
    if sum("[[buffer(" in parameter for parameter in parameters) > 31:
        raise KernelSyntaxError("more than 31 buffers")
    template = re.search(rf"decltype\({name}(<.*?>)\)", source)
    arguments = ", ".join(_argument(parameter) for parameter in parameters)
    body = re.sub(r"\ntemplate \[\[host_name.*", "", source, flags=re.S).replace("[[kernel]] ", "")
    body = re.sub(r" \[\[\w+(?:\(\d+\))?\]\]", "", body)
    launch = f"{name}{template[1] if template else ''}({arguments});"
    return "\n".join(
        [
            f'#line 1 "{name[:40]}.metal"',
            _threadgroup_variables(body),
            '#line 1 "launch"',
            f'extern "C" {{ void* emulator_buffers[32]; void emulator_entry() {{ {launch} }} }}\n',
        ]
    )


def _argument(parameter: str) -> str:
    if match := re.search(r"(?:const )?(device|constant) (.+?)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]", parameter):
        space, kind, mark, _, index = match.groups()
        const = "const " if parameter.strip().startswith("const") else ""
        return f"{'*' if mark == '&' else ''}({const}{space} {kind}*)emulator_buffers[{index}]"
    match = re.search(r"uint3? \w+ \[\[(\w+)\]\]", parameter)
    if match is None:
        raise KernelSyntaxError(f"unknown parameter {parameter.strip()}")
    return f"at_{match[1]}()"


def _threadgroup_variables(source: str) -> str:
    """`threadgroup T name[n];` becomes a reference into memory of the runtime, which knows its bounds."""
    count = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal count
        before, kind, name, extent = match.groups()
        own = f"msl_variable_{count}"
        reference = f"threadgroup {own}& {name} = *(threadgroup {own}*)"
        count += 1
        memory = f"emulator_threadgroup_memory({count}, sizeof({own}))"
        return f"{before}using {own} = {kind}{extent or ''}; {reference}{memory};"

    pattern = r"((?:^|[;{}])\s*)threadgroup\s+([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\])+)?\s*;"
    return re.sub(pattern, replace, source, flags=re.M)


@cache
def _folder() -> Path:
    """Where libraries are kept, with MLX's own utils.h as clang takes it: array parameters spelt as pointers."""
    includes = _CACHE / "include"
    includes.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = (MLX_INCLUDES / "mlx/backend/metal/kernels/utils.h").read_text()
    own = includes / f".{os.getpid()}"
    own.write_text(re.sub(r"constant const int64_t strides\[\d\]", "constant const int64_t* strides", text))
    own.replace(includes / "mlx_utils.h")
    return _CACHE


@cache
def _runtime() -> Path:
    source = HERE / "runtime.cpp"
    built = _folder() / f"{_digest(source.read_text())}.o"
    if not built.exists():
        own = built.with_suffix(f".{os.getpid()}")
        _run([_required_clang(), *_RUNTIME, str(source), "-o", str(own)])
        own.replace(built)
    return built


def _link(kernel: Path, library: Path) -> None:
    """There are hundreds of libraries to link, and clang takes longer to find the linker than that takes to link."""
    line = list(_linker())
    line[line.index("LIBRARY")] = str(library)
    line.insert(line.index(str(_runtime())), str(kernel))
    _run(line)


@cache
def _linker() -> tuple[str, ...]:
    """What clang runs to link the runtime; gold, where it is installed, takes half of ld's time."""
    gold = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
    asked = [_required_clang(), "-###", "-shared", *gold, str(_runtime()), "-o", "LIBRARY", "-lstdc++", "-lm"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
    return tuple(shlex.split(said.strip().splitlines()[-1]))


@cache
def _shim() -> str:
    return "".join(path.read_text() for path in sorted((HERE / "shim").rglob("*")) if path.is_file())


def _digest(*texts: str) -> str:
    flags = str((_COMMON, _STRICT, _RUN, _RUNTIME, _required_clang()))
    runtime = (HERE / "runtime.cpp").read_text()
    return hashlib.sha256("\0".join([flags, _shim(), runtime, _PREAMBLE, *texts]).encode()).hexdigest()[:24]


def _compile(action: str, flags: list[str], file: Path, *more: str) -> None:
    """Have clang go through `_PREAMBLE` and the file."""
    header = ["-include-pch", str(_header(tuple(flags)))]
    _run([_required_clang(), "-x", "c++", action, *_COMMON, *_includes(), *flags, *header, str(file), *more])


@cache
def _header(flags: tuple[str, ...]) -> Path:
    """`_PREAMBLE`, which clang reads once for all kernels: that takes as long as most kernels take."""
    known = [*_COMMON, *_includes(), *flags]
    built = _folder() / f"{_digest(*known)}.pch"
    if not built.exists():
        text, own = built.with_suffix(".h"), built.with_suffix(f".{os.getpid()}")
        own.write_text(_PREAMBLE)
        own.replace(text)
        # Every process writes the headers anew, with the same content.
        timeless = ["-Xclang", "-fno-pch-timestamp"]
        _run([_required_clang(), "-x", "c++-header", *known, *timeless, str(text), "-o", str(own)])
        own.replace(built)
    return built


def _includes() -> list[str]:
    return [f"-isystem{path}" for path in (HERE / "shim", _folder() / "include", MLX_INCLUDES)]


def _required_clang() -> str:
    found = clang()
    if found is None:
        raise FileNotFoundError("the emulator needs clang 18 or newer")
    return found


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if result.returncode:
        raise KernelSyntaxError(result.stderr)

"""What MLX hands to the C++ compiler on a CPU begins with the same headers: read once instead of for each function.

MLX compiles fused operations as they come up, some fifty in all tests, each with the headers for almost a second, and
keeps the libraries in a folder below that for temporary files. Beside an included file the compiler looks for one that
is precompiled, first in the folder of the text that includes it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_HEADER = "mlx/backend/cpu/compiled_preamble.h"
_COMMAND = ("g++", "-std=c++17", "-O3", "-Wall", "-fPIC")  # MLX's own, without which it is not taken


def precompile() -> subprocess.Popen[bytes] | None:
    """Begin to, where that is of use and has not been done."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(folder) / "include" for folder in (spec and spec.submodule_search_locations) or ()]
    include = next((folder for folder in folders if (folder / _HEADER).is_file()), None)
    if sys.platform != "linux" or include is None or shutil.which("g++") is None:
        return None
    try:
        made = Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "cpu" / f"{_HEADER}.gch"
    except PackageNotFoundError:
        return None
    if made.exists():
        return None
    made.parent.mkdir(parents=True, exist_ok=True)
    own = made.with_name(f".{os.getpid()}")
    command = [*_COMMAND, "-x", "c++-header", f"-I{include}", str(include / _HEADER), "-o", str(own)]
    script = f"{shlex.join(command)} && mv {shlex.quote(str(own))} {shlex.quote(str(made))}"
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

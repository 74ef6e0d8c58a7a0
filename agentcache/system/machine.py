"""Describe a benchmark's machine, versions and commit, without importing mlx."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from agentcache.version import __version__

PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "transformers", "numpy")
_FAST_BLAS, _LIBRARIES = ("openblas", "libmkl", "libblis"), ("/usr/lib", "/usr/lib64")
_DEVICE = "import mlx.core as mx; d = mx.default_device(); print(d.type.name, mx.device_info(d).get('device_name', ''))"


def describe_run(benchmark: str) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "command": sys.argv,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def describe_machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": _output([sys.executable, "-c", _DEVICE]) or "unknown",
        "preloaded": os.environ.get("LD_PRELOAD") or os.environ.get("DYLD_INSERT_LIBRARIES"),
    }


def describe_blas() -> str:
    loaded, installed = fast_blas(), installed_openblas()
    if loaded:
        return f"preloaded: {loaded}"
    fix = f"start with LD_PRELOAD={installed}" if installed else "apt-get install libopenblas0-pthread, and preload it"
    return f"MLX's own; float32 models compute many times faster with OpenBLAS: {fix}"


def fast_blas() -> str:
    """Fast BLAS library in this process (Linux); empty if MLX uses its own."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    files = (line.partition("/")[2] for line in lines)
    return next((f"/{file}" for file in files if any(name in file.lower() for name in _FAST_BLAS)), "")


def installed_openblas() -> str:
    """Library file in the usual places; empty if not found."""
    places = ("*/openblas-*/libopenblas.so.0", "*/libopenblas.so.0", "libopenblas.so.0")
    found = (file for root in _LIBRARIES for place in places for file in sorted(Path(root).glob(place)))
    return str(next(found, ""))


def describe_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "agentcache": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit, with "+changes" if files differ; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return f"{commit}+changes" if changed else commit


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

"""`agentcache doctor`: checks the installation, its back end and the cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentcache.cli.connection import ApiKey, ApiKeyFile, AsJson, CacheDir, running_server
from agentcache.cli.doctor_check import Check
from agentcache.cli.doctor_model import examine_model, local_folder
from agentcache.cli.doctor_server import examine_server, root_of
from agentcache.errors import AgentCacheError, CacheFolderInUse, ConfigError, StoreError
from agentcache.ranks.rank import RANK_FOLDER, rank_folders
from agentcache.settings.config import Config
from agentcache.settings.sizes import disk_room
from agentcache.settings.sources import load_config
from agentcache.store.disk_usage import automatic_budget, explicit_budget

OPS_SECONDS = 120
MAX_PROBLEMS = 20
# A broken back end ends the process without an exception.
OPS_SCRIPT = """
import mlx.core as mx
x, w = mx.random.normal((4, 128), key=mx.random.key(0)), mx.random.normal((32, 128), key=mx.random.key(1))
q, scales, biases = mx.quantize(w, group_size=64, bits=4)
dense = mx.matmul(x, mx.dequantize(q, scales, biases, group_size=64, bits=4).T)
error = mx.abs(mx.quantized_matmul(x, q, scales, biases, group_size=64, bits=4) - dense).max().item()
assert error < 1e-2, f"quantized_matmul is off by {error}"
print(mx.default_device().type.name)
"""


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; the served or configured one without it.")
    ] = None,
    cache_dir: CacheDir = None,
    kv: Annotated[
        str | None, typer.Option(help="Bits of cached keys and values (4).", metavar="auto|4|8|k8v4|16")
    ] = None,
    files: Annotated[bool, typer.Option("--check", help="Also verify every file of the cache folder.")] = False,
    url: Annotated[
        str | None, typer.Option(help="Examine a running server over HTTP instead, with tiny requests.")
    ] = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation, the cache folder, and what is served of a model; or, with --url, a running server."""
    if url is not None:
        if files or any(option is not None for option in (model, cache_dir, kv)):
            raise ConfigError(
                "--model, --cache-dir, --kv and --check are about this machine: leave them out with --url"
            )
        config = load_config({"api_key": api_key, "api_key_file": api_key_file})
        _tell(examine_server(root_of(url), config.api_key), as_json=as_json)
        return
    config = load_config({"model": model, "cache_dir": cache_dir, "kv": kv})
    checks = list(examine(config, model))
    if files:
        for folder in (config.cache_dir, *rank_folders(config.cache_dir)):
            checks += verify(folder)
    _tell(checks, as_json=as_json)


def _tell(checks: Iterable[Check], *, as_json: bool) -> None:
    """Print findings as they come, or all as JSON; exit with 1 if one failed."""
    told = []
    for check in checks:
        told.append(check)
        if not as_json:
            typer.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<12}  {check.detail}")
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in told]))
    if not all(check.ok for check in told):
        raise typer.Exit(1)


def examine(config: Config, model: str | None = None) -> Iterator[Check]:
    """All checks but that of files' content; `model` replaces a running server's."""
    yield from check_installation()
    ops = check_ops()
    yield ops
    yield check_kernels(config)
    url = running_server(config)
    yield Check("server", True, f"running at {url}" if url else "none on the configured port")
    yield check_folder(config.cache_dir)
    yield from check_readable(config.cache_dir)
    yield check_quarantine(config.cache_dir)
    yield check_disk_budget(config)
    if ops.ok:  # a broken back end ends the process
        yield from check_model(config, url if model is None else None)


def check_disk_budget(config: Config) -> Check:
    if config.disk_budget is not None:
        return Check("disk budget", True, str(explicit_budget(config.disk_budget)))
    try:
        room = disk_room(config.cache_dir)
    except StoreError as error:
        return Check("disk budget", False, str(error))
    return Check("disk budget", True, str(automatic_budget(room.free, room.held)))


def check_installation() -> Iterator[Check]:
    from agentcache.system.machine import describe_blas, describe_machine, describe_versions

    machine, versions = describe_machine(), describe_versions()
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    yield Check("machine", True, f"{machine['platform']}, {machine['cpu']}, {machine['cores']} cores, {memory}")
    yield Check("versions", "mlx" in versions, ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield Check("device", machine["device"] != "unknown", str(machine["device"]))
    if sys.platform == "linux" and "cpu" in str(machine["device"]).lower():
        yield Check("BLAS", True, describe_blas())


def check_ops() -> Check:
    """Test the operations of attention."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", OPS_SCRIPT], capture_output=True, text=True, timeout=OPS_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("mx ops", False, str(error))
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Check("mx ops", False, lines[-1] if lines else f"ended with code {done.returncode}")
    return Check("mx ops", True, f"4-bit products agree on {done.stdout.strip()}")


def check_model(config: Config, url: str | None) -> Iterator[Check]:
    try:
        found = examine_model(config, url)
    except AgentCacheError as error:
        yield Check("model", False, str(error))
    else:
        yield from (Check(each.name, True, each.detail, each.data) for each in found)


def check_kernels(config: Config) -> Check:
    """Layers with a kernel. Never fails: the reference is correct too."""
    with tempfile.TemporaryDirectory(prefix="agentcache-doctor-") as home:
        folder = _model_folder(config, Path(home))
        if folder is None:
            return Check("kernels", True, f"{config.model} is not a folder here, so none are tried")
        try:
            from agentcache.kv.precision import AUTO, LayerBits
            from agentcache.models.kernel_report import in_child
        except ImportError as error:  # no back end
            return Check("kernels", True, f"none: {error}")
        kinds = in_child(folder, str(LayerBits()) if config.kv == AUTO else config.kv)
    said = "; ".join(kind.phrase for kind in kinds) or "nothing could be tried; the reference serves"
    if config.kv == AUTO:
        said += "; layers in more than 4 bits: reference"
    return Check("kernels", True, said, [asdict(kind) for kind in kinds])


def _model_folder(config: Config, home: Path) -> Path | None:
    """Local folder of the model, if any; the embedded one is made in `home`."""
    from agentcache.models.builtin.embedded import embedded_model_path

    folder = embedded_model_path(home) if config.model is None else local_folder(config.model)
    with suppress(OSError):  # the check of the model reports it
        return folder if folder is not None and (folder / "config.json").is_file() else None
    return None


def check_folder(cache_dir: Path) -> Check:
    """Whether a server could use or create the folder."""
    try:
        return _check_folder(cache_dir)
    except OSError as error:
        return Check("cache folder", False, f"{cache_dir}: {error.strerror}")


def _check_folder(cache_dir: Path) -> Check:
    if not cache_dir.exists():
        return _check_writable(_nearest(cache_dir), f"{cache_dir} (made at first use)")
    if not cache_dir.is_dir():
        return Check("cache folder", False, f"{cache_dir} is not a folder")
    try:
        in_use = _holder(cache_dir)
    except StoreError as error:
        return Check("cache folder", False, str(error))
    return _check_writable(cache_dir, f"{cache_dir}{f' ({in_use})' if in_use else ''}")


def _nearest(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def _check_writable(folder: Path, detail: str) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache folder", True, detail)
    except OSError as error:
        return Check("cache folder", False, f"{detail}: cannot write: {error.strerror}")


def _holder(cache_dir: Path) -> str | None:
    from agentcache.store.cache_files import CacheFiles
    from agentcache.store.lock import FolderLock

    if not (cache_dir / "lock").exists():
        return None
    try:
        FolderLock(CacheFiles(cache_dir.resolve())).release()
    except CacheFolderInUse:
        return "in use by a running server"
    return None


def verify(cache_dir: Path) -> Iterator[Check]:
    """Verify every block, manifest and transcript, also beside a running server."""
    from agentcache.store.verify import verify_folder

    found = verify_folder(cache_dir)
    of_rank = f"{cache_dir.name}: " if RANK_FOLDER.fullmatch(cache_dir.name) else ""
    detail = f"{of_rank}{found.agents} agents, {found.blocks} blocks; {found.missing_blocks} gone to make room"
    yield Check("content", not found.problems, f"{detail}; {len(found.problems)} bad files")
    for problem in found.problems[:MAX_PROBLEMS]:
        yield Check("bad file", False, problem)
    for unavailable in found.unavailable[:MAX_PROBLEMS]:
        yield Check("unavailable", False, f"{unavailable} (not known to be damaged; it stays as it is)")


def check_quarantine(cache_dir: Path) -> Check:
    count = sum(len(names) for _, _, names in os.walk(cache_dir / "quarantine"))
    return Check("quarantine", True, f"{count} files that failed verification")


def check_readable(cache_dir: Path) -> Iterator[Check]:
    from agentcache.store.verify import find_unavailable

    found = find_unavailable(cache_dir)
    if not found:
        yield Check("agents", True, "the files of all agents can be read")
    for reason in found[:MAX_PROBLEMS]:
        yield Check("agents", False, f"unavailable: {reason}")

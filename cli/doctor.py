"""`agentcache doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from agentcache.cli.connection import ApiKey, ApiKeyFile, AsJson, CacheDir, running_server
from agentcache.cli.doctor_server import Check, examine_server, root_of
from agentcache.client import Client
from agentcache.errors import AgentCacheError, CacheFolderInUse, ConfigError, StoreError
from agentcache.ranks.folders import RANK_FOLDER, rank_folders
from agentcache.settings.config import Config
from agentcache.settings.memory_plan import state_budget
from agentcache.settings.sizes import disk_room
from agentcache.settings.sources import load_config
from agentcache.store.disk_usage import automatic_budget, explicit_budget

if TYPE_CHECKING:
    from agentcache.api.model import CacheGroupInfo

OPS_SECONDS = 120
MAX_PROBLEMS = 20
# In a child: a broken back end ends its process.
OPS_SCRIPT = """
import mlx.core as mx
x, w = mx.random.normal((4, 128), key=mx.random.key(0)), mx.random.normal((32, 128), key=mx.random.key(1))
q, scales, biases = mx.quantize(w, group_size=64, bits=4)
dense = mx.matmul(x, mx.dequantize(q, scales, biases, group_size=64, bits=4).T)
error = mx.abs(mx.quantized_matmul(x, q, scales, biases, group_size=64, bits=4) - dense).max().item()
assert error < 1e-2, f"quantized_matmul is off by {error}"
print(mx.default_device().type.name)
"""

AGENT_TOKENS = 8192  # of each counted agent


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; the served or configured one without it.")
    ] = None,
    cache_dir: CacheDir = None,
    kv: Annotated[
        str | None, typer.Option(help="Format of cached keys and values (auto).", metavar="auto|2.5|3|4|4t|k8v4|8|16")
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
            raise ConfigError("--model, --cache-dir, --kv and --check examine this machine: leave them out with --url")
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
    """Run all checks but those of files' content; `model` replaces a running server's."""
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
    if ops.ok:  # else loading would end this process
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
    """Report the kernels; never fails: the reference serves without."""
    with tempfile.TemporaryDirectory(prefix="agentcache-doctor-") as home:
        folder = _model_folder(config, Path(home))
        if folder is None:
            return Check("kernels", True, f"not tried: {config.model} is not a folder here")
        try:
            from agentcache.kv.packing import AUTO, BY_CHANNEL
            from agentcache.models.kernel_report import in_child
        except ImportError as error:  # no back end
            return Check("kernels", True, f"none: {error}")
        kinds = in_child(folder, str(BY_CHANNEL) if config.kv == AUTO else config.kv)
    said = "; ".join(kind.phrase for kind in kinds) or "nothing could be tried; the reference serves"
    if config.kv == AUTO:
        said += f"; tried for {BY_CHANNEL.words}, not for other formats"
    return Check("kernels", True, said, [asdict(kind) for kind in kinds])


def _model_folder(config: Config, home: Path) -> Path | None:
    from agentcache.models.builtin.embedded import embedded_model_path

    folder = embedded_model_path(home) if config.model is None else local_folder(config.model)
    with suppress(OSError):  # the model's check reports it
        return folder if folder is not None and (folder / "config.json").is_file() else None
    return None


def check_folder(cache_dir: Path) -> Check:
    try:
        if not cache_dir.exists():
            nearest = next(parent for parent in cache_dir.parents if parent.exists())
            return _check_writable(nearest, f"{cache_dir} (made at first use)")
        if not cache_dir.is_dir():
            return Check("cache folder", False, f"{cache_dir} is not a folder")
        in_use = _holder(cache_dir)
    except OSError as error:
        return Check("cache folder", False, f"{cache_dir}: {error.strerror}")
    except StoreError as error:
        return Check("cache folder", False, str(error))
    return _check_writable(cache_dir, f"{cache_dir}{f' ({in_use})' if in_use else ''}")


def _check_writable(folder: Path, detail: str) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache folder", True, detail)
    except OSError as error:
        return Check("cache folder", False, f"{detail}: cannot write: {error.strerror}")


def _holder(cache_dir: Path) -> str | None:
    from agentcache.store.cache_files import CacheFiles
    from agentcache.store.writing import FolderLock

    if not (cache_dir / "lock").exists():
        return None
    try:
        FolderLock(CacheFiles(cache_dir.resolve())).release()
    except CacheFolderInUse:
        return "in use by a running server"
    return None


def verify(cache_dir: Path) -> Iterator[Check]:
    """Verify all blocks, manifests and transcripts; a server may run."""
    from agentcache.store.verify import verify_folder

    found = verify_folder(cache_dir)
    of_rank = f"{cache_dir.name}: " if RANK_FOLDER.fullmatch(cache_dir.name) else ""
    detail = f"{of_rank}{found.agents} agents, {found.blocks} blocks; {found.missing_blocks} evicted"
    yield Check("content", not found.problems, f"{detail}; {len(found.problems)} bad files")
    for problem in found.problems[:MAX_PROBLEMS]:
        yield Check("bad file", False, problem)
    for unavailable in found.unavailable[:MAX_PROBLEMS]:
        yield Check("unavailable", False, f"{unavailable} (not known to be damaged; left alone)")


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


class Finding(NamedTuple):
    name: str
    detail: str
    data: Any = None


def examine_model(config: Config, url: str | None) -> list[Finding]:
    if url is not None:
        with Client(url, config.api_key) as client:
            models, stats = client.request("GET", "/v1/models"), client.request("GET", "/v1/cache/stats")
        return list(_served(models["data"][0], stats))
    if config.model is not None and local_folder(config.model) is None:
        return [Finding("model", f"{config.model} is not on this machine; `agentcache serve` downloads it")]
    with tempfile.TemporaryDirectory(prefix="agentcache-doctor-") as home:
        return list(_loaded(config, Path(home)))


def _served(model: Mapping[str, Any], stats: Mapping[str, Any]) -> Iterator[Finding]:
    from agentcache.api.model import CacheGroupInfo, GroupKind

    groups = [CacheGroupInfo(**each | {"kind": GroupKind(each["kind"])}) for each in model["cache_groups"]]
    yield _model(
        model["id"],
        model["max_model_len"],
        {name: model.get(name) for name in ("kv_bits", "kv_precision", "kv_format", "kv_divergence")},
    )
    yield _sampling(model.get("sampling", {}))
    yield _groups(groups)
    yield _forms(model.get("structured_output_refusal"))
    if (template := model.get("chat_template")) is not None:
        yield _template(template["repairs"] if template["used"] else None)
    accounts = stats["ram_accounts"]
    plan = {
        "limit": stats["memory_limit"],
        "weights": accounts["weights"]["capacity_bytes"],
        "ram_budget": stats["ram_budget"],
    }
    yield _memory(groups, model["max_model_len"], plan, accounts.get("state", {}).get("floor_bytes", 0))


def _loaded(config: Config, home: Path) -> Iterator[Finding]:
    from agentcache.engine.open import inspect_model
    from agentcache.models.builtin.embedded import embedded_model_path

    found = inspect_model(config, config.model or str(embedded_model_path(home)))
    info = found.info
    kv = {
        "kv_bits": info.kv_bits,
        "kv_precision": info.kv_precision,
        "kv_format": info.kv_format,
        "kv_divergence": info.kv_divergence,
    }
    yield _model(info.id, info.max_context, kv)
    yield _sampling(info.sampling.known)
    yield _groups(info.cache_groups)
    yield _forms(info.forms_refusal)
    yield _template(info.template_repairs)
    for_states = state_budget(config.state_budget, found.plan.ram_budget)
    yield _memory(info.cache_groups, info.max_context, dataclasses.asdict(found.plan), for_states)


def local_folder(model: str) -> Path | None:
    """Folder of a model; None if it must be downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(os.path.expanduser(model))
    if model.startswith((".", "~", "/")) or model.count("/") != 1 or os.path.exists(folder):
        return folder
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        return folder  # the loader reports the id


def _model(name: str, max_context: int, kv: Mapping[str, Any]) -> Finding:
    data = {"id": name, "max_model_len": max_context, **kv}
    told = "no keys and values" if kv["kv_bits"] is None else f"keys and values in {_format(kv)}"
    if kv["kv_divergence"] is not None:
        told += f", which moves its logits by {kv['kv_divergence']:.2g} nats"
    return Finding("model", f"{name} is served: context of {max_context:,} tokens, {told}", data)


def _format(kv: Mapping[str, Any]) -> str:
    return kv["kv_format"] or f"{kv['kv_precision'] or kv['kv_bits']} bits"  # an earlier server has no kv_format


def _sampling(known: Mapping[str, Any]) -> Finding:
    values = ", ".join(f"{name} {value:g}" for name, value in known.items()) or "temperature 1"
    return Finding("sampling", f"{values}, unless a request sets others", dict(known))


def _forms(refusal: str | None) -> Finding:
    detail = f"off: {refusal}" if refusal else "schemas, grammars and demanded tool calls are enforced"
    return Finding("forms", detail, {"structured_output": not refusal, "refusal": refusal or None})


def _template(repairs: Sequence[str] | None) -> Finding:
    if repairs is None:
        detail = "not used: the model has none, or it refuses every chat; messages become lines with roles"
    elif repairs:
        detail = f"chats are changed where the template refuses or drops something: {', '.join(repairs)}"
    else:
        detail = "accepts every chat unchanged"
    return Finding("template", detail, {"used": repairs is not None, "repairs": list(repairs or ())})


def _groups(groups: Sequence[CacheGroupInfo]) -> Finding:
    kinds = sorted(groups, key=_kind)
    phrases = [_phrase(list(members)) for _, members in groupby(kinds, key=_kind)]
    return Finding("cache", "; ".join(phrases), [dataclasses.asdict(group) for group in groups])


def _kind(group: CacheGroupInfo) -> tuple[str, int]:
    return group.kind, group.window or 0


def _phrase(members: Sequence[CacheGroupInfo]) -> str:
    first, layers = members[0], sum(group.layers for group in members)
    what = first.kind.value if first.window is None else f"{first.kind.value} of {first.window:,}"
    names = ", ".join(group.name for group in members)
    sizes = [
        f"{_size(sum(group.bytes_per_token for group in members))} a token",
        f"{_size(sum(group.bytes_per_snapshot for group in members))} a snapshot",
    ]
    told = [size for size in sizes if not size.startswith("0 ")]
    return f"{what} ({names}): {f'{layers} layers, ' if layers else ''}{', '.join(told)}"


def _memory(groups: Sequence[CacheGroupInfo], max_context: int, plan: Mapping[str, Any], for_states: int) -> Finding:
    """`for_states` bytes are for recurrent state only."""
    from agentcache.api.model import GroupKind
    from agentcache.kv.group_info import bytes_for, tokens_within

    states = [group for group in groups if group.kind is GroupKind.STATE]
    others = [group for group in groups if group.kind is not GroupKind.STATE]
    for_others = plan["ram_budget"] - (for_states if states else 0)
    tokens = tokens_within(others, for_others, max_context)
    shares = [(others, for_others), (states, for_states)]
    agents = min(share // sum(bytes_for(group, AGENT_TOKENS) for group in kind) for kind, share in shares if kind)
    detail = (
        f"of {_size(plan['limit'])}: weights {_size(plan['weights'])}, cache {_size(plan['ram_budget'])}: "
        f"an agent of up to {tokens:,} tokens, or {agents:,} agents of {AGENT_TOKENS:,} in RAM at once"
    )
    return Finding("memory", detail, dict(plan) | {"longest_agent_tokens": tokens, "agents_of_8k": agents})


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"

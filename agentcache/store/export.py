"""Export of an agent from disk to an archive (`archive.py`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentcache.blocks.keys import FORMAT_VERSION
from agentcache.errors import BlockRejected, Conflict, NotFound, StoreError
from agentcache.store.agent_folder import SavedAgent
from agentcache.store.archive import ArchiveWriter, block_kind
from agentcache.store.cache_files import CacheFiles, set_mode, whose
from agentcache.store.manifest import MAX_MANIFEST_BYTES, agent_of, decode_manifest
from agentcache.store.model_names import folder_of, identity_of
from agentcache.store.transcript_log import MAX_LOG_BYTES, parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, examine_block
from agentcache.system.durable import sync, sync_path

_TRIES = 5  # a server may be changing the agent


@dataclass(frozen=True)
class Exported:
    """Summary of an export; `blocks` counts one rank's."""

    agent: str
    lineages: int
    tokens: int
    blocks: int
    missing_blocks: int
    num_bytes: int


def export_agent(
    cache_dir: Path, agent_id: str, target: Path, *, fingerprint: str | None = None, others: Sequence[Path] = ()
) -> Exported:
    """Write an agent to a new archive. Only reads the cache folder, so a server may run.

    Args:
        others: cache folders of ranks 1, 2, …; only blocks in all of them are exported.
        fingerprint: prefix of the model's fingerprint, to choose between models.

    Raises:
        NotFound: no such agent.
        Conflict: several models have one, or `target` exists.
        StoreError: read or write failed.
    """
    if target.exists() or target.is_symlink():
        raise Conflict(f"there is {target} already", param="file")
    for tries_left in reversed(range(_TRIES)):
        try:
            ranks = [CacheFiles(folder.resolve()) for folder in (cache_dir, *others)]
            return _export(ranks, agent_id, target, fingerprint or "")
        except (FileNotFoundError, BlockRejected) as error:
            if not tries_left:  # no server is changing it, then
                raise StoreError(f"agent {agent_id} cannot be exported: {error}") from error
        except OSError as error:
            raise StoreError(f"agent {agent_id} cannot be exported: {error}{whose(error)}") from error
    raise AssertionError  # the last try returns or raises


def _export(ranks: Sequence[CacheFiles], agent_id: str, target: Path, fingerprint: str) -> Exported:
    lineages = _lineages_of(ranks[0], agent_id, fingerprint)
    keys = sorted({key for lineage, _ in lineages for key in lineage.block_keys()})
    # Evicted blocks are recomputed, here or after import.
    there = [key for key in keys if all(_path(files, key).exists() for files in ranks)]
    temp = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            set_mode(file.fileno(), 0o600)
            archive = ArchiveWriter(file)
            for _, (encoded, log) in lineages:
                archive.add("manifest", encoded)
                archive.add("log", log)
            for rank, files in enumerate(ranks):
                for key in there:
                    archive.add(block_kind(rank), _block(files, key))
            manifest = lineages[0][0].manifest
            archive.finish(manifest, len(ranks), identity_of(ranks[0], folder_of(manifest.model)))
            num_bytes = file.tell()
            file.flush()
            sync(file.fileno(), covered=True)
        _put_in_place(temp, target)
        sync_path(target.parent)
    finally:
        temp.unlink(missing_ok=True)
    return Exported(
        agent=agent_id,
        lineages=len(lineages),
        tokens=max(len(lineage.content.transcript) for lineage, _ in lineages),
        blocks=len(there),
        missing_blocks=len(keys) - len(there),
        num_bytes=num_bytes,
    )


def _put_in_place(temp: Path, target: Path) -> None:
    """Give a complete file its name. Never replaces a file; raises FileExistsError."""
    try:
        os.link(temp, target)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links: exFAT, some of FUSE and SMB
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.replace(temp, target)
        except BaseException:
            target.unlink()  # it is empty
            raise


def _lineages_of(files: CacheFiles, agent_id: str, fingerprint: str) -> list[tuple[SavedAgent, tuple[bytes, bytes]]]:
    found = manifests_of(files.root, agent_id, fingerprint)
    if not found:
        raise NotFound(f"there is no agent {agent_id!r:.80} in {files.root}", param="agent", code="agent_not_found")
    if len(found) > 1:
        raise Conflict(f"agents of {len(found)} models are called {agent_id}: {', '.join(found)}", param="fingerprint")
    return [_lineage_at(files, path) for path in next(iter(found.values()))]


def manifests_of(cache_dir: Path, agent_id: str, fingerprint: str = "") -> dict[str, list[Path]]:
    """Return the agent's manifests by folder. Raises StoreError if one may be in an unreadable folder."""
    found: dict[str, list[Path]] = {}
    unreadable: OSError | None = None
    try:
        for name in _names_in(cache_dir / "agents"):
            if not name.startswith(fingerprint[:16]):
                continue
            folder = cache_dir / "agents" / name
            try:
                manifests = [folder / each for each in _names_in(folder) if each.endswith(".json")]
            except OSError as error:
                unreadable = error
                continue
            if paths := [path for path in manifests if agent_of(path.stem) == agent_id]:
                found[name] = paths
    except OSError as error:
        unreadable = error
    if unreadable is not None and not found:
        raise StoreError(f"agent {agent_id} cannot be found: {unreadable}{whose(unreadable)}") from unreadable
    return found


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _lineage_at(files: CacheFiles, path: Path) -> tuple[SavedAgent, tuple[bytes, bytes]]:
    encoded = files.read(path, MAX_MANIFEST_BYTES)
    manifest = decode_manifest(encoded)
    if manifest.format_version != FORMAT_VERSION:
        raise BlockRejected("it was written by an older version: start a server once, and let the agent speak")
    log = files.read(path.with_name(f"{manifest.name}.{manifest.log.generation}.log"), MAX_LOG_BYTES)
    log = log[: manifest.log.num_bytes]
    saved = SavedAgent(manifest, parse_log(log, manifest.name, manifest.model, manifest.log))
    return saved, (encoded, log)


def _path(files: CacheFiles, key: str) -> Path:
    return files.root / "blocks" / key[:2] / f"{key}.safetensors"


def _block(files: CacheFiles, key: str) -> bytes:
    """Read and verify a block. Raises BlockRejected, and FileNotFoundError if just removed."""
    data = files.read(_path(files, key), MAX_BLOCK_BYTES)
    if examine_block(data) != key:
        raise BlockRejected(f"block {key} is damaged; agentcache doctor --check tells more")
    return data

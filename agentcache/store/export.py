"""What is on disk of one agent, written to an archive (`archive.py`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agentcache.blocks.keys import FORMAT_VERSION
from agentcache.errors import BlockRejected, Conflict, NotFound, StoreError
from agentcache.store.agent_folder import SavedAgent
from agentcache.store.archive import ArchiveWriter
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import MAX_MANIFEST_BYTES, agent_of, decode_manifest
from agentcache.store.transcript_log import parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, MAX_LOG_BYTES, examine_block

_TRIES = 5  # to read an agent that a server is at work on


@dataclass(frozen=True)
class Exported:
    """What has gone into an archive."""

    agent: str
    lineages: int
    tokens: int
    blocks: int
    missing_blocks: int
    num_bytes: int


def export_agent(cache_dir: Path, agent_id: str, target: Path, *, fingerprint: str | None = None) -> Exported:
    """Write what is on disk of an agent to a new file. Only reads the folder, beside a server too.

    Args:
        fingerprint: beginning of the fingerprint of the agent's model, where several have an agent of that name.

    Raises:
        NotFound: there is no such agent.
        Conflict: several models have one, or there is such a file.
        StoreError: the folder cannot be read, or the file cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise Conflict(f"there is {target} already", param="file")
    for tries_left in reversed(range(_TRIES)):
        try:
            return _export(CacheFiles(cache_dir.resolve()), agent_id, target, fingerprint or "")
        except (FileNotFoundError, BlockRejected) as error:
            if not tries_left:  # not a server that is at work on it, then
                raise StoreError(f"agent {agent_id} cannot be exported: {error}") from error
        except OSError as error:
            raise StoreError(f"agent {agent_id} cannot be exported: {error}") from error
    raise AssertionError  # the last try returns or raises


def _export(files: CacheFiles, agent_id: str, target: Path, fingerprint: str) -> Exported:
    lineages = _lineages_of(files, agent_id, fingerprint)
    keys = sorted({key for lineage, _ in lineages for key in lineage.block_keys()})
    temp = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            archive = ArchiveWriter(file)
            for _, (manifest, log) in lineages:
                archive.add("manifest", manifest)
                archive.add("log", log)
            num_blocks = sum(_add_block(files, key, archive) for key in keys)
            archive.finish(lineages[0][0].manifest)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        os.link(temp, target)  # never in place of another file
    finally:
        temp.unlink()
    return Exported(
        agent=agent_id,
        lineages=len(lineages),
        tokens=max(len(lineage.content.transcript) for lineage, _ in lineages),
        blocks=num_blocks,
        missing_blocks=len(keys) - num_blocks,
        num_bytes=num_bytes,
    )


def _lineages_of(files: CacheFiles, agent_id: str, fingerprint: str) -> list[tuple[SavedAgent, tuple[bytes, bytes]]]:
    """The agent's lineages, with the bytes of their manifests and logs."""
    found: dict[str, list[Path]] = {}
    for path in sorted((files.root / "agents").glob("*/*.json")):
        if agent_of(path.stem) == agent_id and path.parent.name.startswith(fingerprint[:16]):
            found.setdefault(path.parent.name, []).append(path)
    if not found:
        raise NotFound(f"there is no agent {agent_id!r:.80} in {files.root}", param="agent", code="agent_not_found")
    if len(found) > 1:
        raise Conflict(f"agents of {len(found)} models are called {agent_id}: {', '.join(found)}", param="fingerprint")
    return [_lineage_at(files, path) for path in next(iter(found.values()))]


def _lineage_at(files: CacheFiles, path: Path) -> tuple[SavedAgent, tuple[bytes, bytes]]:
    encoded = files.read(path, MAX_MANIFEST_BYTES)
    manifest = decode_manifest(encoded)
    if manifest.format_version != FORMAT_VERSION:
        raise BlockRejected("it was written by an older version: start a server once, and let the agent speak")
    log = files.read(path.with_name(f"{manifest.name}.{manifest.log.generation}.log"), MAX_LOG_BYTES)
    log = log[: manifest.log.num_bytes]
    saved = SavedAgent(manifest, parse_log(log, manifest.name, manifest.model, manifest.log))
    return saved, (encoded, log)


def _add_block(files: CacheFiles, key: str, archive: ArchiveWriter) -> bool:
    """Whether the block is there. One that went for want of room is computed again, there as here."""
    try:
        data = files.read(files.root / "blocks" / key[:2] / f"{key}.safetensors", MAX_BLOCK_BYTES)
    except FileNotFoundError:
        return False
    if examine_block(data) != key:
        raise BlockRejected(f"block {key} is damaged; agentcache doctor --check tells more")
    archive.add("block", data)
    return True

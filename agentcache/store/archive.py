"""One agent as one file, for a machine with the same model.

    magic line
    contents: manifest and log of each lineage, then their blocks, rank by rank
    index: JSON, kind, length and SHA-256 of each content, in file order
    length of the index (8 bytes, little endian), SHA-256 of magic line, index and length (32 bytes)

The index has the model's identity if manifests use an older name. Digests detect damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentcache.blocks.keys import FORMAT_VERSION
from agentcache.errors import BlockRejected, Conflict, InvalidRequest, NotFound, StoreError
from agentcache.store.cache_files import CacheFiles, set_mode, whose
from agentcache.store.lineage_files import SavedAgent
from agentcache.store.manifest import MAX_MANIFEST_BYTES, Manifest, agent_of, decode_manifest
from agentcache.store.model_files import folder_of, identity_of
from agentcache.store.transcript_log import MAX_LOG_BYTES, parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, examine_block
from agentcache.system.durable import sync, sync_path
from agentcache.system.files import open_plain

_TRIES = 5  # of an export: a server may be changing the agent
_MAGIC = b"agentcache agent 1\n"
_TAIL_BYTES = 8 + 32
_MAX_INDEX_BYTES = 1 << 27
_ANY_FORMAT = b"agentcache agent "
# Must match `ArchiveWriter.finish`.
_INDEX_HEAD = re.compile(
    rb'\{"agent": "([A-Za-z0-9._-]{1,64})", "model": "([ !#-\[\]-~]{1,200})", '
    rb'(?:"identity": "([0-9a-f]{32})", )?(?:"ranks": ([1-9][0-9]{0,3}), )?"contents": \['
)
_INDEX_ENTRY = re.compile(
    rb'(?:, )?\{"kind": "([a-z0-9 ]{1,40})", "bytes": ([0-9]{1,15}), "sha256": "([0-9a-f]{64})"\}'
)
_INDEX_END = b"]}"


class ArchiveRejected(InvalidRequest):
    """Not an archive, damaged, or of another model."""

    code = "archive_rejected"


class ArchiveWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._contents: list[dict[str, Any]] = []
        file.write(_MAGIC)

    def add(self, kind: str, data: bytes) -> None:
        self._contents.append({"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._file.write(data)

    def finish(self, manifest: Manifest, ranks: int = 1, identity: str = "") -> None:
        further = ({"identity": identity} if identity not in ("", manifest.model) else {}) | (
            {"ranks": ranks} if ranks > 1 else {}
        )
        fields = {"agent": manifest.id, "model": manifest.model, **further, "contents": self._contents}
        index = json.dumps(fields).encode()
        length = len(index).to_bytes(8, "little")
        self._file.write(index + length + _digest_of_index(index, length))


def block_kind(rank: int) -> str:
    return f"block of rank {rank}" if rank else "block"


def _digest_of_index(index: bytes, length: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + index + length).digest()


@dataclass(frozen=True, slots=True)
class ArchivedContent:
    kind: str
    begin: int
    num_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


def _none_there() -> ArchiveRejected:
    # One message for all causes reveals nothing about files.
    message = "no agentcache archive can be read at this path: name a file that agentcache export has written"
    return ArchiveRejected(message, param="path")


def _parse_index(index: bytes) -> tuple[str, str, str, int, list[ArchivedContent]]:
    head = _INDEX_HEAD.match(index)
    if head is None:
        raise ArchiveRejected("the index is unreadable", param="path")
    contents, at, begin = list[ArchivedContent](), head.end(), len(_MAGIC)
    # By entry: parsed JSON takes 20 times the bytes.
    while (entry := _INDEX_ENTRY.match(index, at)) is not None:
        kind, num_bytes, sha256 = sys.intern(entry[1].decode()), int(entry[2]), entry[3].decode()
        contents.append(ArchivedContent(kind, begin, num_bytes, sha256))
        at, begin = entry.end(), begin + num_bytes
    if index[at:] != _INDEX_END:
        raise ArchiveRejected("the index is unreadable", param="path")
    return head[1].decode(), head[2].decode(), (head[3] or b"").decode(), int(head[4] or 1), contents


class ArchiveFile:
    """An open archive with a verified index; `read` verifies each content. Raises ArchiveRejected."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = open_plain(path)
        except (OSError, ValueError):
            raise _none_there() from None
        weakref.finalize(self, os.close, self._fd)
        try:
            size = os.fstat(self._fd).st_size
            self._check_magic()
            index, end = self._read_index(size)
        except OSError:
            raise _none_there() from None
        self.agent, self.model, self.identity, self.ranks, self.contents = _parse_index(index)
        described = self.contents[-1].end if self.contents else len(_MAGIC)
        if described != end:
            raise ArchiveRejected(f"it is damaged: {end} bytes of contents, {described} in the index", param="path")

    def _check_magic(self) -> None:
        begin = self._pread(len(_MAGIC), 0)
        if begin == _MAGIC:
            return
        if begin.startswith(_ANY_FORMAT) and begin.removeprefix(_ANY_FORMAT)[:1].isdigit():
            message = "the archive has a format that this version of agentcache does not read; a newer version may"
            raise ArchiveRejected(message, param="path", code="newer_format")
        raise _none_there()

    def _read_index(self, size: int) -> tuple[bytes, int]:
        tail = self._pread(_TAIL_BYTES, max(len(_MAGIC), size - _TAIL_BYTES))
        length, digest = tail[:8], tail[8:]
        index_bytes = int.from_bytes(length, "little")
        end = size - _TAIL_BYTES - index_bytes
        if len(tail) < _TAIL_BYTES or index_bytes > _MAX_INDEX_BYTES or end < len(_MAGIC):
            raise ArchiveRejected("it is damaged: the length of its index is impossible", param="path")
        index = self._pread(index_bytes, end)
        if _digest_of_index(index, length) != digest:
            raise ArchiveRejected("it is damaged: the checksum of its index does not match", param="path")
        return index, end

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        parts = []
        while num_bytes and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            num_bytes, offset = num_bytes - len(part), offset + len(part)
        return b"".join(parts)

    def read(self, content: ArchivedContent, max_bytes: int) -> bytes:
        if content.num_bytes > max_bytes:
            raise ArchiveRejected(f"a {content.kind} of {content.num_bytes} bytes is too long", param="path")
        data = self._pread(content.num_bytes, content.begin)
        if hashlib.sha256(data).hexdigest() != content.sha256:
            raise ArchiveRejected(f"it is damaged: a {content.kind} does not match its checksum", param="path")
        return data


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

    `cache_dir` is rank 0's; blocks that another rank lacks are left out. `fingerprint` may be a prefix.
    Raises NotFound, StoreError; Conflict if `target` exists or several models have the agent.
    """
    if target.exists() or target.is_symlink():
        raise Conflict(f"there is {target} already", param="file")
    for tries_left in reversed(range(_TRIES)):
        try:
            ranks = [CacheFiles(folder.resolve()) for folder in (cache_dir, *others)]
            return _export(ranks, agent_id, target, fingerprint or "")
        except (FileNotFoundError, BlockRejected) as error:
            if not tries_left:
                raise StoreError(f"agent {agent_id} cannot be exported: {error}") from error
        except OSError as error:
            raise StoreError(f"agent {agent_id} cannot be exported: {error}{whose(error)}") from error
    raise AssertionError  # the last try returns or raises


def _export(ranks: Sequence[CacheFiles], agent_id: str, target: Path, fingerprint: str) -> Exported:
    lineages = _lineages_of(ranks[0], agent_id, fingerprint)
    keys = sorted({key for lineage, _ in lineages for key in lineage.block_keys()})
    # Evicted blocks are computed again.
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
    """Never replace a file: raises FileExistsError."""
    try:
        os.link(temp, target)
    except FileExistsError:
        raise
    except OSError:  # no links: exFAT, some of FUSE and SMB
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.replace(temp, target)
        except BaseException:
            target.unlink()  # empty
            raise


def _lineages_of(files: CacheFiles, agent_id: str, fingerprint: str) -> list[tuple[SavedAgent, tuple[bytes, bytes]]]:
    found = manifests_of(files.root, agent_id, fingerprint)
    if not found:
        raise NotFound(f"there is no agent {agent_id!r:.80} in {files.root}", param="agent", code="agent_not_found")
    if len(found) > 1:
        raise Conflict(f"agents of {len(found)} models are called {agent_id}: {', '.join(found)}", param="fingerprint")
    return [_lineage_at(files, path) for path in next(iter(found.values()))]


def manifests_of(cache_dir: Path, agent_id: str, fingerprint: str = "") -> dict[str, list[Path]]:
    """Return the agent's manifests by folder. Raises StoreError if an unreadable folder may have one."""
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
    data = files.read(_path(files, key), MAX_BLOCK_BYTES)
    if examine_block(data) != key:
        raise BlockRejected(f"block {key} is damaged; see agentcache doctor --check")
    return data

"""One agent as one file, to be taken to another machine with the same model.

    magic line
    contents, one after the other: each lineage's manifest and log, then the blocks that they name
    index: JSON, what lies there in that order
    length of the index (8 bytes, little endian), SHA-256 of magic line, index and length (32 bytes)

The index has kind, length and SHA-256 of each content. It has no names of files: what a content is follows from what
it says, checked as if it had been found in a cache folder and then some. So nothing in an archive can name a place on
disk. The digests find damage; against forgery helps only to take archives from those one trusts, as with any model.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION, RESIDUAL, BlockName, Namespace, kind_of
from agentcache.blocks.lanes import chain_keys
from agentcache.errors import AgentCacheError, BlockRejected, Conflict, InvalidRequest, NotFound, StoreError
from agentcache.kv.spec import CacheSpec
from agentcache.names import is_name
from agentcache.store.agent_folder import SavedAgent, check_caches
from agentcache.store.block_file import (
    BlockHeader,
    decode_block,
    make_header,
    max_encoded_size,
)
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import (
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    SavedCache,
    agent_of,
    decode_manifest,
    valid_lineage,
)
from agentcache.store.transcript_log import parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, MAX_LOG_BYTES, examine_block

_MAGIC = b"agentcache agent 1\n"
_TAIL_BYTES = 8 + 32
_MAX_INDEX_BYTES = 1 << 28
_TRIES = 5  # to read an agent that a server is at work on
_CHUNK = 32  # blocks that are in memory at once while they are brought in


class ArchiveRejected(InvalidRequest):
    """The file is no archive, is damaged, or is of another model. Nothing has changed."""

    code = "archive_rejected"


@dataclass(frozen=True)
class Exported:
    """What has gone into an archive."""

    agent: str
    lineages: int
    tokens: int
    blocks: int
    missing_blocks: int
    num_bytes: int


# --- out -------------------------------------------------------------------------------------------------------------


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
            archive = _Writing(file)
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


def _add_block(files: CacheFiles, key: str, archive: _Writing) -> bool:
    """Whether the block is there. One that went for want of room is computed again, there as here."""
    try:
        data = files.read(files.root / "blocks" / key[:2] / f"{key}.safetensors", MAX_BLOCK_BYTES)
    except FileNotFoundError:
        return False
    if examine_block(data) != key:
        raise BlockRejected(f"block {key} is damaged; agentcache doctor --check tells more")
    archive.add("block", data)
    return True


class _Writing:
    """An archive as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._contents: list[dict[str, Any]] = []
        file.write(_MAGIC)

    def add(self, kind: str, data: bytes) -> None:
        self._contents.append({"kind": kind, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._file.write(data)

    def finish(self, manifest: Manifest) -> None:
        index = json.dumps({"agent": manifest.id, "model": manifest.model, "contents": self._contents}).encode()
        length = len(index).to_bytes(8, "little")
        self._file.write(index + length + _digest_of_index(index, length))


def _digest_of_index(index: bytes, length: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + index + length).digest()


# --- in --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """A content of the file: where it lies."""

    kind: str
    begin: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class _ExpectedBlock:
    """A block that a lineage names; `group` is its group's place in its cache."""

    header: BlockHeader
    group: int


@dataclass(frozen=True)
class _PlacedBlock(_ExpectedBlock):
    """The same, and where it lies in the file."""

    content: _Content


class ArchiveFile:
    """An archive whose index is sound; its contents are read, and compared with their digests, one at a time.

    The file stays open until nobody has this any more: a path may lead to another file later.

    Raises:
        ArchiveRejected: it is none, or its index is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ArchiveRejected(f"the file cannot be opened: {error}", param="path") from None
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ArchiveRejected("it is not a regular file", param="path")
        try:
            self._read_index(status.st_size)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ArchiveRejected(f"the index is unreadable: {error!r:.100}", param="path") from None

    def _read_index(self, size: int) -> None:
        if size < len(_MAGIC) + _TAIL_BYTES or self._pread(len(_MAGIC), 0) != _MAGIC:
            raise ArchiveRejected("it is no agentcache archive, or of another version", param="path")
        tail = self._pread(_TAIL_BYTES, size - _TAIL_BYTES)
        length, digest = tail[:8], tail[8:]
        index_bytes = int.from_bytes(length, "little")
        end = size - _TAIL_BYTES - index_bytes
        if index_bytes > _MAX_INDEX_BYTES or end < len(_MAGIC):
            raise ArchiveRejected("it is damaged: the length of its index makes no sense", param="path")
        index = self._pread(index_bytes, end)
        if _digest_of_index(index, length) != digest:
            raise ArchiveRejected("it is damaged: its index is not the one that was written", param="path")
        fields = json.loads(index)
        self.agent, self.model = str(fields["agent"]), str(fields["model"])
        self.contents: list[_Content] = []
        begin = len(_MAGIC)
        for content in fields["contents"]:
            kind, num_bytes, sha256 = content["kind"], content["bytes"], content["sha256"]
            if type(num_bytes) is not int or num_bytes < 0 or type(sha256) is not str or type(kind) is not str:
                raise TypeError("a content is none")
            self.contents.append(_Content(kind, begin, num_bytes, sha256))
            begin += num_bytes
        if begin != end:
            raise ArchiveRejected(f"it is damaged: {end} bytes of contents, {begin} in the index", param="path")

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        parts = []
        while num_bytes and (part := os.pread(self._fd, num_bytes, offset)):
            parts.append(part)
            num_bytes, offset = num_bytes - len(part), offset + len(part)
        return b"".join(parts)

    def read(self, content: _Content, max_bytes: int) -> bytes:
        """A content. Raises ArchiveRejected where it is longer than makes sense, or not what was written."""
        if content.num_bytes > max_bytes:
            raise ArchiveRejected(f"a {content.kind} of {content.num_bytes} bytes makes no sense", param="path")
        data = self._pread(content.num_bytes, content.begin)
        if hashlib.sha256(data).hexdigest() != content.sha256:
            raise ArchiveRejected(f"it is damaged: a {content.kind} is not the one that was written", param="path")
        return data


class Archive:
    """An agent in a file, all of which has been verified against the served model; `read_archive` makes it.

    Args:
        agent_id: what the agent is to be called.
        records: its lineages, under that name.
        blocks: those in the file.
    """

    def __init__(
        self,
        file: ArchiveFile,
        spec: CacheSpec,
        agent_id: str,
        records: Sequence[AgentRecord],
        blocks: Sequence[_PlacedBlock],
    ) -> None:
        self.agent_id = agent_id
        self.records = tuple(records)
        self._file = file
        self._spec = spec
        self._blocks = blocks

    @property
    def names(self) -> list[BlockName]:
        """All blocks in the file."""
        return [BlockName(each.header.chain, each.group, each.header.cache) for each in self._blocks]

    @property
    def num_bytes(self) -> int:
        """About what it will take on disk."""
        return sum(content.num_bytes for content in self._file.contents)

    def writes(self) -> Iterator[list[BlockWrite | BlockCopy]]:
        """The blocks, some at a time; read and verified once more. Raises ArchiveRejected."""
        for at in range(0, len(self._blocks), _CHUNK):
            yield [self._write(each.header, each.content) for each in self._blocks[at : at + _CHUNK]]

    def _write(self, header: BlockHeader, content: _Content) -> BlockWrite | BlockCopy:
        if header.cache != BASE_CACHE:  # its adapter may not be loaded
            return BlockCopy(header, self._file.read(content, MAX_BLOCK_BYTES))
        block = _decode(self._file, self._spec, header, content)
        return BlockWrite(header, block.data, block.extras)


def read_archive(path: Path, spec: CacheSpec, fingerprint: str, agent_id: str) -> Archive:
    """The agent in a file, once every byte of it has been verified. It changes nothing.

    Args:
        spec, fingerprint: the served model's.
        agent_id: what the agent is to be called.

    Raises:
        ArchiveRejected: it is damaged, is no archive, or is of another model.
    """
    file = ArchiveFile(path)
    if file.model != fingerprint:
        message = f"the agent is of another model ({file.model[:16]!r}; this one is {fingerprint[:16]!r})"
        raise ArchiveRejected(message, param="path", code="other_model")
    try:
        return _verified(file, spec, agent_id)
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error
    except ArchiveRejected:
        raise
    except (AgentCacheError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ArchiveRejected(f"it is unreadable: {error!r:.100}", param="path") from error


def _verified(file: ArchiveFile, spec: CacheSpec, agent_id: str) -> Archive:
    contents = list(file.contents)
    lineages: dict[str, SavedAgent] = {}
    while contents and contents[0].kind == "manifest":
        lineage = _read_lineage(file, spec, *_pair(contents))
        if lineage.manifest.name in lineages:
            raise ArchiveRejected("it has a lineage twice", param="path")
        lineages[lineage.manifest.name] = lineage
    if not lineages:
        raise ArchiveRejected("it has no lineage", param="path")
    expected = {each.header.block_key: each for lineage in lineages.values() for each in _expected(lineage)}
    blocks = [_place(file, spec, content, expected) for content in contents]
    records = [replace(lineage.record(spec.digest), id=agent_id) for lineage in lineages.values()]
    return Archive(file, spec, agent_id, records, blocks)


def _pair(contents: list[_Content]) -> tuple[_Content, _Content]:
    manifest, log = contents[:2]
    del contents[:2]
    if log.kind != "log":
        raise ArchiveRejected("it has a manifest without a log", param="path")
    return manifest, log


def _read_lineage(file: ArchiveFile, spec: CacheSpec, manifest_at: _Content, log_at: _Content) -> SavedAgent:
    """A lineage whose chains are those of its tokens, in this model's cache."""
    manifest = decode_manifest(file.read(manifest_at, MAX_MANIFEST_BYTES))
    if (manifest.id, manifest.model) != (file.agent, file.model) or not is_name(manifest.id):
        raise ArchiveRejected("a manifest is of another agent or model", param="path")
    if not valid_lineage(manifest.lineage):
        raise ArchiveRejected("a lineage's id is none", param="path")
    base, groups = manifest.base, tuple(group.name for group in spec.groups)
    further = {kind_of(cache.name) for cache in manifest.caches[1:]}
    if manifest.format_version != FORMAT_VERSION or base.spec != spec.digest or not further <= {RESIDUAL}:
        message = "its cache is of another kind (quantisation, say) than this server's"
        raise ArchiveRejected(message, param="path", code="other_model")
    content = parse_log(file.read(log_at, MAX_LOG_BYTES), manifest.name, manifest.model, manifest.log)
    check_caches(manifest, content)
    if base.groups != groups:
        raise ArchiveRejected("a lineage's blocks are not those of its tokens", param="path")
    for cache in manifest.caches:
        chains = tuple(chain_keys(_root(manifest, cache), content.transcript.ids, cache.spans()))
        if content.chains.get(cache.name, ()) != chains:
            raise ArchiveRejected("a lineage's blocks are not those of its tokens", param="path")
    return SavedAgent(manifest, content)


def _root(manifest: Manifest, cache: SavedCache) -> str:
    return Namespace(manifest.model, cache.spec, manifest.salt, cache.name).root


def _expected(lineage: SavedAgent) -> Iterator[_ExpectedBlock]:
    """What every block that the lineage names has to be."""
    for cache in lineage.manifest.caches:
        chains, root = lineage.content.chains.get(cache.name, ()), _root(lineage.manifest, cache)
        for span in cache.spans():
            parent = root if span.parent is None else chains[span.parent]
            tokens, position = lineage.content.transcript.ids[span.begin : span.end], span.begin // BLOCK_SIZE
            for group in span.groups:
                header = make_header(parent, cache.groups[group], position, tokens, span.producer, cache.name)
                yield _ExpectedBlock(header, group)


def _place(file: ArchiveFile, spec: CacheSpec, content: _Content, expected: dict[str, _ExpectedBlock]) -> _PlacedBlock:
    """Which block a content is; each is there once."""
    if content.kind != "block":
        raise ArchiveRejected(f"it has a {content.kind!r:.40} where only blocks may be", param="path")
    block = expected.pop(examine_block(file.read(content, MAX_BLOCK_BYTES)), None)
    if block is None:
        raise ArchiveRejected("it has a block that no lineage names, or one twice", param="path")
    if block.header.cache == BASE_CACHE:
        _decode(file, spec, block.header, content)
    return _PlacedBlock(block.header, block.group, content)


def _decode(file: ArchiveFile, spec: CacheSpec, header: BlockHeader, content: _Content) -> Any:
    try:
        return decode_block(spec, header, file.read(content, max_encoded_size(spec, header)))
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error

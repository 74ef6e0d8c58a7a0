"""An agent out of an archive (`archive.py`): nothing of it is used before every byte is verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION, RESIDUAL, BlockName, Namespace, kind_of
from agentcache.blocks.lanes import chain_keys
from agentcache.errors import AgentCacheError, BlockRejected
from agentcache.kv.spec import CacheSpec
from agentcache.names import is_name
from agentcache.store.agent_folder import SavedAgent, check_caches
from agentcache.store.archive import ArchivedContent, ArchiveFile, ArchiveRejected, block_kind
from agentcache.store.block_file import BlockHeader, decode_block, make_header, max_encoded_size
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.manifest import (
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    SavedCache,
    decode_manifest,
    valid_lineage,
)
from agentcache.store.transcript_log import parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, MAX_LOG_BYTES, examine_block

_CHUNK_BYTES = 64 << 20  # of blocks that are in memory at once while they are brought in, and one more


@dataclass(frozen=True)
class _ExpectedBlock:
    """A block that a lineage names; `group` is its group's index in its cache."""

    header: BlockHeader
    group: int


@dataclass(frozen=True)
class _ArchivedBlock(_ExpectedBlock):
    """The same, and where it lies in the file: of each rank."""

    contents: Sequence[ArchivedContent]


class ArchivedAgent:
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
        blocks: Sequence[_ArchivedBlock],
    ) -> None:
        self.agent_id = agent_id
        self.records = tuple(records)
        self._file = file
        self._specs = spec.by_rank
        self._blocks = blocks

    @property
    def names(self) -> list[BlockName]:
        """All blocks in the file."""
        return [BlockName(each.header.chain, each.group, each.header.cache) for each in self._blocks]

    @property
    def num_bytes(self) -> int:
        """About what it will take on disk, on one rank."""
        others = {block_kind(rank) for rank in range(1, self._file.ranks)}
        return sum(content.num_bytes for content in self._file.contents if content.kind not in others)

    def writes(self) -> Iterator[list[BlockWrite | BlockCopy]]:
        """The blocks, some at a time; read and verified once more. Raises ArchiveRejected."""
        chunk, num_bytes = list[BlockWrite | BlockCopy](), 0
        for block in self._blocks:
            chunk.append(self._write(block.header, block.contents))
            num_bytes += sum(content.num_bytes for content in block.contents)
            if num_bytes >= _CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            yield chunk

    def _write(self, header: BlockHeader, contents: Sequence[ArchivedContent]) -> BlockWrite | BlockCopy:
        if header.cache != BASE_CACHE:  # its adapter may not be loaded
            return BlockCopy(header, self._file.read(contents[0], MAX_BLOCK_BYTES))
        own, *others = (
            _decode(self._file, spec, header, content) for spec, content in zip(self._specs, contents, strict=True)
        )
        return BlockWrite(header, own.data, own.extras, [other.data for other in others])


def read_archive(path: Path, spec: CacheSpec, fingerprint: str, agent_id: str) -> ArchivedAgent:
    """The agent in a file, once every byte of it has been verified. It changes nothing.

    Args:
        spec, fingerprint: the served model's.
        agent_id: what the agent is to be called.

    Raises:
        ArchiveRejected: it is damaged, is no archive, or is of another model or of another number of ranks.
    """
    file = ArchiveFile(path)
    if file.model != fingerprint:
        message = f"the agent is of another model ({file.model[:16]!r}; this one is {fingerprint[:16]!r})"
        raise ArchiveRejected(message, param="path", code="other_model")
    if file.ranks != len(spec.by_rank):
        message = f"{file.ranks} ranks have the agent's keys and values, each a part; here it is {len(spec.by_rank)}"
        raise ArchiveRejected(message, param="path", code="other_model")
    try:
        return _verified(file, spec, agent_id)
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error
    except ArchiveRejected:
        raise
    except (AgentCacheError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ArchiveRejected(f"it is unreadable: {error!r:.100}", param="path") from error


def _verified(file: ArchiveFile, spec: CacheSpec, agent_id: str) -> ArchivedAgent:
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
    specs = enumerate(spec.by_rank)
    by_rank = [_blocks_of(file, each, block_kind(rank), contents, expected) for rank, each in specs]
    if contents:
        raise ArchiveRejected(f"it has a {contents[0].kind!r:.40} where only blocks may be", param="path")
    if any(found.keys() != by_rank[0].keys() for found in by_rank):
        raise ArchiveRejected("it has a block of some ranks, and not of all", param="path")
    blocks = [
        _ArchivedBlock(expected[key].header, expected[key].group, [found[key] for found in by_rank])
        for key in by_rank[0]
    ]
    records = [replace(lineage.record(spec.digest), id=agent_id) for lineage in lineages.values()]
    return ArchivedAgent(file, spec, agent_id, records, blocks)


def _pair(contents: list[ArchivedContent]) -> tuple[ArchivedContent, ArchivedContent]:
    manifest, log = contents[:2]
    del contents[:2]
    if log.kind != "log":
        raise ArchiveRejected("it has a manifest without a log", param="path")
    return manifest, log


def _read_lineage(
    file: ArchiveFile, spec: CacheSpec, manifest_at: ArchivedContent, log_at: ArchivedContent
) -> SavedAgent:
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


def _blocks_of(
    file: ArchiveFile, spec: CacheSpec, kind: str, contents: list[ArchivedContent], expected: dict[str, _ExpectedBlock]
) -> dict[str, ArchivedContent]:
    """One rank's blocks, by key: they are taken off the front of `contents`. Each is there once."""
    found: dict[str, ArchivedContent] = {}
    while contents and contents[0].kind == kind:
        content = contents.pop(0)
        key = examine_block(file.read(content, MAX_BLOCK_BYTES))
        if key not in expected or key in found:
            raise ArchiveRejected("it has a block that no lineage names, or one twice", param="path")
        if expected[key].header.cache == BASE_CACHE:
            _decode(file, spec, expected[key].header, content)
        found[key] = content
    return found


def _decode(file: ArchiveFile, spec: CacheSpec, header: BlockHeader, content: ArchivedContent) -> Any:
    try:
        return decode_block(spec, header, file.read(content, max_encoded_size(spec, header)))
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error

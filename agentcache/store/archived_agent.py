"""An agent out of an archive (`archive.py`): nothing of it is used before every byte is verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION, BlockName, Namespace
from agentcache.blocks.lanes import BlockSpan, chain_keys
from agentcache.errors import AgentCacheError, BlockRejected
from agentcache.kv.spec import CacheSpec
from agentcache.names import is_name
from agentcache.store.agent_folder import SavedAgent, check_caches
from agentcache.store.archive import ArchivedContent, ArchiveFile, ArchiveRejected
from agentcache.store.block_file import BlockHeader, decode_block, make_header, max_encoded_size
from agentcache.store.block_folder import BlockWrite
from agentcache.store.manifest import MAX_MANIFEST_BYTES, AgentRecord, decode_manifest, valid_lineage
from agentcache.store.transcript_log import parse_log
from agentcache.store.verify import MAX_BLOCK_BYTES, MAX_LOG_BYTES, examine_block

_CHUNK = 32  # blocks that are in memory at once while they are brought in


class ArchivedAgent:
    """An agent in a file, all of which has been verified against the served model; `read_archive` makes it.

    Args:
        agent_id: what the agent is to be called.
        records: its lineages, under that name.
        blocks: of those in the file, what each is and where it lies.
    """

    def __init__(
        self,
        file: ArchiveFile,
        spec: CacheSpec,
        agent_id: str,
        records: Sequence[AgentRecord],
        blocks: Sequence[tuple[BlockHeader, ArchivedContent]],
    ) -> None:
        self.agent_id = agent_id
        self.records = tuple(records)
        self._file = file
        self._spec = spec
        self._blocks = blocks

    @property
    def names(self) -> list[BlockName]:
        """All blocks in the file."""
        return [BlockName(header.chain, self._group_index[header.group]) for header, _ in self._blocks]

    @property
    def num_bytes(self) -> int:
        """About what it will take on disk."""
        return sum(content.num_bytes for content in self._file.contents)

    @cached_property
    def _group_index(self) -> dict[str, int]:
        return {group.name: index for index, group in enumerate(self._spec.groups)}

    def writes(self) -> Iterator[list[BlockWrite]]:
        """The blocks, some at a time; read and verified once more. Raises ArchiveRejected."""
        for at in range(0, len(self._blocks), _CHUNK):
            yield [self._write(header, content) for header, content in self._blocks[at : at + _CHUNK]]

    def _write(self, header: BlockHeader, content: ArchivedContent) -> BlockWrite:
        block = _decode(self._file, self._spec, header, content)
        return BlockWrite(header, block.data, block.extras)


def read_archive(path: Path, spec: CacheSpec, fingerprint: str, agent_id: str) -> ArchivedAgent:
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
    headers = {header.block_key: header for lineage in lineages.values() for header in _headers(lineage, spec)}
    blocks = [_identified(file, spec, content, headers) for content in contents]
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
    if manifest.format_version != FORMAT_VERSION or len(manifest.caches) > 1 or base.spec != spec.digest:
        message = "its cache is of another kind (quantisation, say) than this server's"
        raise ArchiveRejected(message, param="path", code="other_model")
    content = parse_log(file.read(log_at, MAX_LOG_BYTES), manifest.name, manifest.model, manifest.log)
    check_caches(manifest, content)
    root = Namespace(manifest.model, base.spec, manifest.salt).root
    chains = tuple(chain_keys(root, content.transcript.ids, base.spans()))
    if base.groups != groups or content.chains.get(BASE_CACHE, ()) != chains:
        raise ArchiveRejected("a lineage's blocks are not those of its tokens", param="path")
    return SavedAgent(manifest, content)


def _headers(lineage: SavedAgent, spec: CacheSpec) -> Iterator[BlockHeader]:
    """What every block that the lineage names has to be."""
    manifest, ids = lineage.manifest, lineage.content.transcript.ids
    spans, chains = manifest.base.spans(), lineage.content.chains.get(BASE_CACHE, ())
    root = Namespace(manifest.model, manifest.base.spec, manifest.salt).root

    def header(span: BlockSpan, group: int) -> BlockHeader:
        parent = root if span.parent is None else chains[span.parent]
        tokens = ids[span.begin : span.end]
        return make_header(parent, spec.groups[group].name, span.begin // BLOCK_SIZE, tokens, span.producer)

    return (header(span, group) for span in spans for group in span.groups)


def _identified(
    file: ArchiveFile, spec: CacheSpec, content: ArchivedContent, headers: dict[str, BlockHeader]
) -> tuple[BlockHeader, ArchivedContent]:
    """Which block a content is; each is there once."""
    if content.kind != "block":
        raise ArchiveRejected(f"it has a {content.kind!r:.40} where only blocks may be", param="path")
    header = headers.pop(examine_block(file.read(content, MAX_BLOCK_BYTES)), None)
    if header is None:
        raise ArchiveRejected("it has a block that no lineage names, or one twice", param="path")
    _decode(file, spec, header, content)
    return header, content


def _decode(file: ArchiveFile, spec: CacheSpec, header: BlockHeader, content: ArchivedContent) -> Any:
    try:
        return decode_block(spec, header, file.read(content, max_encoded_size(spec, header)))
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error

"""An agent in an archive, verified before use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentcache.blocks.keys import (
    BASE_CACHE,
    BLOCK_SIZE,
    FORMAT_VERSION,
    RESIDUAL,
    STATE_GROUP,
    BlockName,
    kind_of,
)
from agentcache.blocks.origin_paths import chain_keys, state_blocks
from agentcache.errors import AgentCacheError, BlockRejected, FileUnavailable
from agentcache.kv.spec import CacheSpec
from agentcache.store.archive import ArchivedContent, ArchiveFile, ArchiveRejected, block_kind
from agentcache.store.block_file import (
    MAX_HEADER_BYTES,
    BlockHeader,
    StoredBlock,
    decode_block,
    make_header,
    max_encoded_size,
)
from agentcache.store.block_folder import BlockCopy, BlockWrite
from agentcache.store.lineage_files import SavedAgent, ServedCache, check_lineage
from agentcache.store.manifest import (
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    SavedCache,
    SavedSnapshot,
    as_time,
    decode_manifest,
)
from agentcache.store.model_files import ModelNames
from agentcache.store.transcript_log import parse_log
from agentcache.store.verify import examine_block

_CHUNK_BYTES = 64 << 20  # blocks in memory at once, plus one
_MAX_LOG_BYTES = 1 << 28  # of all logs: millions of tokens
_MAX_RESIDUAL_BYTES = 1 << 27  # a block; its adapter may not be loaded


@dataclass(frozen=True)
class _ExpectedBlock:
    header: BlockHeader
    group: int  # index in the cache


@dataclass(frozen=True)
class _ArchivedBlock(_ExpectedBlock):
    contents: Sequence[ArchivedContent]  # by rank
    archived: BlockHeader  # as addressed in the archive


class ArchivedAgent:
    """A verified agent in an archive, by its name here."""

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
        return [BlockName(each.header.chain, each.group, each.header.cache) for each in self._blocks]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes on disk for one rank."""
        others = {block_kind(rank) for rank in range(1, self._file.ranks)}
        return sum(content.num_bytes for content in self._file.contents if content.kind not in others)

    def writes(self) -> Iterator[list[BlockWrite | BlockCopy]]:
        """Yield the blocks in chunks, verified again. Raises ArchiveRejected."""
        chunk, num_bytes = list[BlockWrite | BlockCopy](), 0
        for block in self._blocks:
            chunk.append(self._write(block))
            num_bytes += sum(content.num_bytes for content in block.contents)
            if num_bytes >= _CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            yield chunk

    def _write(self, block: _ArchivedBlock) -> BlockWrite | BlockCopy:
        if block.header.cache != BASE_CACHE:
            return BlockCopy(block.header, self._file.read(block.contents[0], _MAX_RESIDUAL_BYTES))
        own, *others = (
            _decode(self._file, spec, block.archived, content)
            for spec, content in zip(self._specs, block.contents, strict=True)
        )
        return BlockWrite(block.header, own.data, own.extras, [other.data for other in others])


def read_archive(
    path: Path, spec: CacheSpec, names: ModelNames | str, agent_id: str, num_token_ids: int | None = None
) -> ArchivedAgent:
    """Verify an archive's agent; address it as `agent_id` of the served model. Raises ArchiveRejected."""
    file, names = ArchiveFile(path), ModelNames.of(names)
    check_model(file, names)
    if file.ranks != len(spec.by_rank):
        message = f"{file.ranks} ranks have the agent's keys and values, each a part; here it is {len(spec.by_rank)}"
        raise ArchiveRejected(message, param="path", code="other_model")
    try:
        return _verified(file, ServedCache(spec, num_token_ids), names.current, agent_id)
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error
    except FileUnavailable as error:
        message = f"the archive has a format that this version of agentcache does not read: {error}"
        raise ArchiveRejected(message, param="path", code="newer_format") from error
    except ArchiveRejected:
        raise
    except (AgentCacheError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ArchiveRejected(f"it is unreadable: {error!r:.100}", param="path") from error


def check_model(file: ArchiveFile, served: ModelNames) -> None:
    if not served.mean(file.model, file.identity):
        message = f"the agent is of another model ({file.model[:16]!r}; this one is {served.current[:16]!r})"
        raise ArchiveRejected(message, param="path", code="other_model")


def _verified(file: ArchiveFile, served: ServedCache, model: str, agent_id: str) -> ArchivedAgent:
    spec, contents = served.spec, deque(file.contents)
    if sum(content.num_bytes for content in contents if content.kind == "log") > _MAX_LOG_BYTES:
        raise ArchiveRejected(f"its transcripts take more than {_MAX_LOG_BYTES} bytes", param="path")
    lineages: dict[str, SavedAgent] = {}
    while contents and contents[0].kind == "manifest":
        lineage = _read_lineage(file, served, contents.popleft(), _log_of(contents))
        if lineage.manifest.name in lineages:
            raise ArchiveRejected("it has a lineage twice", param="path")
        lineages[lineage.manifest.name] = lineage
    if not lineages:
        raise ArchiveRejected("it has no lineage", param="path")
    _check_residuals_agree([lineage.manifest for lineage in lineages.values()])
    expected = {each.header.block_key: each for lineage in lineages.values() for each in _expected(lineage)}
    specs = enumerate(spec.by_rank)
    by_rank = [_blocks_of(file, each, block_kind(rank), contents, expected) for rank, each in specs]
    if contents:
        raise ArchiveRejected(f"it has a {contents[0].kind!r:.40} where only blocks may be", param="path")
    if any(found.keys() != by_rank[0].keys() for found in by_rank):
        raise ArchiveRejected("it has a block of some ranks, and not of all", param="path")
    here = {name: lineage if file.model == model else _addressed(lineage, model) for name, lineage in lineages.items()}
    targets = {key: block for name, lineage in lineages.items() for key, block in _pairs(lineage, here[name])}
    blocks = [
        _ArchivedBlock(targets[key].header, targets[key].group, [found[key] for found in by_rank], expected[key].header)
        for key in by_rank[0]
        if key in targets
    ]
    now, saved = as_time(time.time()), [lineage.record(spec.digest) for lineage in here.values()]
    # Another machine's clock may be ahead.
    records = [replace(record, id=agent_id, created=min(record.created, now)) for record in saved]
    return ArchivedAgent(file, spec, agent_id, records, blocks)


def _addressed(lineage: SavedAgent, model: str) -> SavedAgent:
    # Without residual KV: only a loaded adapter can rewrite it.
    manifest = replace(lineage.manifest, model=model, caches=lineage.manifest.caches[:1])
    base, ids = manifest.base, lineage.content.transcript.ids
    chains = tuple(chain_keys(manifest.root_of(base), ids, base.spans()))
    content = replace(lineage.content, chains={BASE_CACHE: chains} if chains else {})
    moved = SavedAgent(manifest, content)
    snapshots = tuple(replace(each, chain=block.header.chain) for each, block in _state_blocks(moved))
    return SavedAgent(replace(manifest, caches=(replace(base, snapshots=snapshots),)), content)


def _pairs(archived: SavedAgent, here: SavedAgent) -> Iterator[tuple[str, _ExpectedBlock]]:
    of_here, caches = _expected(here), {cache.name for cache in here.manifest.caches}
    for block in _expected(archived):
        if block.header.cache in caches:
            yield block.header.block_key, next(of_here)


def _check_residuals_agree(manifests: Sequence[Manifest]) -> None:
    groups: dict[str, tuple[str, ...]] = {}
    for cache in (cache for manifest in manifests for cache in manifest.caches[1:]):
        if groups.setdefault(cache.name, cache.groups) != cache.groups:
            raise ArchiveRejected("its lineages have different groups of residuals", param="path")


def _log_of(contents: deque[ArchivedContent]) -> ArchivedContent:
    if not contents or contents[0].kind != "log":
        raise ArchiveRejected("it has a manifest without a log", param="path")
    return contents.popleft()


def _read_lineage(
    file: ArchiveFile, served: ServedCache, manifest_at: ArchivedContent, log_at: ArchivedContent
) -> SavedAgent:
    manifest = decode_manifest(file.read(manifest_at, MAX_MANIFEST_BYTES))
    if (manifest.id, manifest.model) != (file.agent, file.model):
        raise ArchiveRejected("a manifest is of another agent or model", param="path")
    further = {kind_of(cache.name) for cache in manifest.caches[1:]}
    if (
        manifest.format_version != FORMAT_VERSION
        or manifest.base.spec != served.spec.digest
        or not further <= {RESIDUAL}
    ):
        message = "its cache is of another kind than this server's (quantisation, say, or the model's code in mlx-lm)"
        raise ArchiveRejected(message, param="path", code="other_model")
    content = parse_log(file.read(log_at, _MAX_LOG_BYTES), manifest.name, manifest.model, manifest.log)
    check_lineage(manifest, content, served)
    for cache in manifest.caches[1:]:
        _check_residual_groups(cache, served.spec)
    lineage = SavedAgent(manifest, content)
    _check_chains(lineage)
    return lineage


def _check_residual_groups(cache: SavedCache, spec: CacheSpec) -> None:
    # The adapter may not be loaded, but `residual_spec` limits its groups.
    if list(cache.groups) != [group.name for group in spec.groups if group.name in cache.groups]:
        raise ArchiveRejected("a lineage has residuals of groups that its cache has not", param="path")


def _check_chains(lineage: SavedAgent) -> None:
    ids = lineage.content.transcript.ids
    for cache in lineage.manifest.caches:
        root = lineage.manifest.root_of(cache)
        if lineage.content.chains.get(cache.name, ()) != tuple(chain_keys(root, ids, cache.spans())):
            raise ArchiveRejected("a lineage's blocks are not those of its tokens", param="path")
    if any(each.header.chain != snapshot.chain for snapshot, each in _state_blocks(lineage)):
        raise ArchiveRejected("a lineage's snapshots are not those of its tokens", param="path")


def _expected(lineage: SavedAgent) -> Iterator[_ExpectedBlock]:
    for cache in lineage.manifest.caches:
        chains, root = lineage.content.chains.get(cache.name, ()), lineage.manifest.root_of(cache)
        for span in cache.spans():
            parent = root if span.parent is None else chains[span.parent]
            tokens, position = lineage.content.transcript.ids[span.begin : span.end], span.begin // BLOCK_SIZE
            for group in span.groups:
                header = make_header(parent, cache.groups[group], position, tokens, span.producer, cache.name)
                yield _ExpectedBlock(header, group)
    yield from (block for _, block in _state_blocks(lineage))


def _state_blocks(lineage: SavedAgent) -> Iterator[tuple[SavedSnapshot, _ExpectedBlock]]:
    base, ids = lineage.manifest.base, lineage.content.transcript.ids
    if not base.snapshots:
        return
    ends = [each.num_tokens for each in base.snapshots]
    found = state_blocks(lineage.manifest.root_of(base), ids, ends, base.named_origin(), base.num_block_groups)
    for snapshot, block in zip(base.snapshots, found, strict=True):
        tokens, position = ids[block.begin : block.end], block.begin // BLOCK_SIZE
        header = make_header(block.parent, STATE_GROUP, position, tokens, block.producer)
        yield snapshot, _ExpectedBlock(header, base.num_block_groups)


def _blocks_of(
    file: ArchiveFile,
    spec: CacheSpec,
    kind: str,
    contents: deque[ArchivedContent],
    expected: dict[str, _ExpectedBlock],
) -> dict[str, ArchivedContent]:
    found: dict[str, ArchivedContent] = {}
    largest = MAX_HEADER_BYTES + max(group.bytes_per_block for group in spec.all_groups)
    while contents and contents[0].kind == kind:
        content = contents.popleft()
        key = examine_block(file.read(content, max(largest, _MAX_RESIDUAL_BYTES)))
        if key not in expected or key in found:
            raise ArchiveRejected("it has a block that no lineage names, or one twice", param="path")
        if expected[key].header.cache == BASE_CACHE:
            _decode(file, spec, expected[key].header, content)
        elif content.num_bytes > _MAX_RESIDUAL_BYTES:
            raise ArchiveRejected(f"residuals of {content.num_bytes} bytes make no sense", param="path")
        found[key] = content
    return found


def _decode(file: ArchiveFile, spec: CacheSpec, header: BlockHeader, content: ArchivedContent) -> StoredBlock:
    try:
        return decode_block(spec, header, file.read(content, max_encoded_size(spec, header)))
    except BlockRejected as error:
        raise ArchiveRejected(f"it is damaged: {error}", param="path") from error

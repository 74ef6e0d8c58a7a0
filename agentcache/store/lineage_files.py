"""Reads and checks a lineage's files, or rebuilds it from their proven parts. Changes no file.

All readers call `decode_manifest`, `parse_log`, then `check_lineage`: the engine relies on checked values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from agentcache.api.names import is_name
from agentcache.api.policy import Policy
from agentcache.api.stats import STATE
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION, STATE_GROUP, block_key, kind_of
from agentcache.blocks.origin_paths import chain_keys, name_blocks, state_chains
from agentcache.blocks.transcript import Transcript, TranscriptContent
from agentcache.errors import BlockRejected, FileUnavailable, StoreError
from agentcache.kv.spec import CacheSpec
from agentcache.store.cache_files import CacheFiles, NotAFile, WrongFile
from agentcache.store.manifest import (
    FIRST_LINEAGE,
    MAX_MANIFEST_BYTES,
    AgentRecord,
    Manifest,
    ResidualBlocks,
    SavedCache,
    agent_of,
    as_time,
    decode_manifest,
    encode_manifest,
    manifest_of,
    valid_lineage,
)
from agentcache.store.transcript_log import (
    MAX_LOG_BYTES,
    Content,
    SalvagedLog,
    parse_log,
    salvage_log,
)

_CHAIN = re.compile(r"[0-9a-f]{40}")
_KINDS = ("prompt", "generated")


@dataclass(frozen=True)
class SavedAgent:
    """A lineage's parsed files; not `extendable` if another manifest may be on disk."""

    manifest: Manifest
    content: Content
    extendable: bool = True

    @property
    def is_current(self) -> bool:
        return self.manifest.format_version == FORMAT_VERSION

    def block_keys(self) -> Iterator[str]:
        for cache in self.manifest.caches if self.is_current else ():
            yield from cache.block_keys(self.content.chains.get(cache.name, ()))

    def keys_by_kind(self) -> Iterator[tuple[str, list[str]]]:
        """Keys of blocks other than base KV."""
        for cache in self.manifest.caches if self.is_current else ():
            if cache.snapshots:
                yield STATE, [block_key(each.chain, STATE_GROUP) for each in cache.snapshots]
            if cache.name != BASE_CACHE:
                yield kind_of(cache.name), list(cache.block_keys(self.content.chains.get(cache.name, ())))

    def fits(self, spec: str) -> bool:
        return self.is_current and self.manifest.base.spec == spec

    def record(self, spec: str) -> AgentRecord:
        """Return the lineage, without blocks unless they fit `spec`, a cache spec's digest."""
        manifest, content, base = self.manifest, self.content, self.manifest.base
        fits = self.fits(spec)
        return AgentRecord(
            id=manifest.id,
            model=manifest.model,
            salt=manifest.salt,
            created=manifest.created,
            last_used=manifest.last_used,
            adapter=manifest.adapter,
            policy=manifest.policy,
            system=content.system,
            producer=base.named_origin() if fits else None,
            transcript=content.transcript,
            num_saved=base.num_saved if fits else 0,
            blocks=name_blocks(content.chains.get(BASE_CACHE, ()), base.spans()) if fits else (),
            lineage=manifest.lineage,
            snapshots=base.named_snapshots() if fits else (),
            residuals=tuple(self._residual(each) for each in manifest.caches[1:] if each.num_saved) if fits else (),
        )

    def _residual(self, cache: SavedCache) -> ResidualBlocks:
        blocks = name_blocks(self.content.chains.get(cache.name, ()), cache.spans(), cache.name)
        return ResidualBlocks(cache.name, cache.spec, cache.groups, cache.num_saved, blocks)


class LineageReader:
    """Reads one folder's lineages, by `manifest.lineage_name`. Raises FileUnavailable; BlockRejected for damage."""

    def __init__(self, files: CacheFiles, folder: Path) -> None:
        self._files = files
        self._folder = folder

    def manifest_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def log_path(self, name: str, generation: int) -> Path:
        return self._folder / f"{name}.{generation}.log"

    def read(self, name: str, served: ServedCache | None) -> SavedAgent:
        """Read and check a lineage. Raises FileNotFoundError without a manifest."""
        manifest = self._read_manifest(name)
        try:
            content = self._read_content(manifest)
        except FileNotFoundError:
            raise BlockRejected(f"its log {manifest.log.generation} does not exist") from None
        check_lineage(manifest, content, served)
        return self.as_saved(manifest, content)

    def as_saved(self, manifest: Manifest, content: Content) -> SavedAgent:
        content.transcript.store_in(partial(self._read_again, manifest))  # so it may leave RAM
        return SavedAgent(manifest, content)

    def rebuild(self, name: str, served: ServedCache, generations: Iterable[int]) -> tuple[Rebuilt | None, int | None]:
        """Rebuild a damaged lineage; also return the log generation that a sound manifest names."""
        stated, is_sound = self._stated_manifest(name)
        paths = [self.log_path(name, generation) for generation in sorted(generations)]
        logs = [log for path in paths if (log := self._read_log(path))]
        used = as_time(max((self._files.status(path).st_mtime for path in paths), default=0.0))
        with _unless_short_of_memory(name):
            found = rebuild(name, self._folder.name, served, stated, logs, used, is_sound=is_sound)
        return found, stated.log.generation if is_sound and stated is not None else None

    def is_on_disk(self, manifest: Manifest) -> bool:
        try:
            return self._files.read(self.manifest_path(manifest.name), MAX_MANIFEST_BYTES) == encode_manifest(manifest)
        except OSError:
            return False

    def _read_manifest(self, name: str) -> Manifest:
        manifest = decode_manifest(self._read_whole(self.manifest_path(name), MAX_MANIFEST_BYTES))
        is_named_well = is_name(manifest.id) and valid_lineage(manifest.lineage)
        if manifest.name != name or not is_named_well or manifest.model[:16] != self._folder.name:
            raise BlockRejected(f"the manifest is of agent {manifest.name!r:.100} of model {manifest.model!r:.80}")
        return manifest

    def _read_content(self, manifest: Manifest) -> Content:
        path = self.log_path(manifest.name, manifest.log.generation)
        try:
            log = self._read_whole(path, MAX_LOG_BYTES)
        except NotAFile as error:  # the log may return
            raise FileUnavailable(self._files.describe(path, error)) from error
        with _unless_short_of_memory(manifest.name):
            return parse_log(log, manifest.name, manifest.model, manifest.log, manifest.format_version)

    def _read_again(self, manifest: Manifest) -> TranscriptContent:
        try:
            return self._read_content(manifest).transcript.content()
        except (BlockRejected, FileNotFoundError) as error:
            raise StoreError(f"the transcript of agent {manifest.name} cannot be read: {error}") from error

    def _stated_manifest(self, name: str) -> tuple[Manifest | None, bool]:
        try:
            return self._read_manifest(name), True
        except (BlockRejected, FileNotFoundError):
            with suppress(WrongFile, FileNotFoundError):
                data = self._read_whole(self.manifest_path(name), MAX_MANIFEST_BYTES)
                return read_hint(data, name, self._folder.name), False
            return None, False

    def _read_log(self, path: Path) -> bytes | None:
        with suppress(WrongFile, FileNotFoundError):
            return self._read_whole(path, MAX_LOG_BYTES)
        return None

    def _read_whole(self, path: Path, max_bytes: int) -> bytes:
        try:
            return self._files.read(path, max_bytes)
        except (FileNotFoundError, WrongFile):
            raise
        except (OSError, MemoryError) as error:
            raise FileUnavailable(self._files.describe(path, error)) from error


@contextmanager
def _unless_short_of_memory(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise FileUnavailable(f"{name} cannot be read: there is no memory for it") from error


@dataclass(frozen=True)
class ServedCache:
    """The served model's cache."""

    spec: CacheSpec
    num_token_ids: int | None = None


def check_lineage(manifest: Manifest, content: Content, served: ServedCache | None = None) -> None:
    """Raise BlockRejected unless manifest and log are consistent. Does not compare chain keys with tokens."""
    _check_transcript(content.transcript, None if served is None else served.num_token_ids)
    for cache in manifest.caches:
        _check_cache(cache, content)
    for cache in manifest.caches[1:]:
        if kind_of(cache.name) == BASE_CACHE or not _may_be_beside_base(cache):
            raise BlockRejected(f"the cache {cache.name!r:.80} is not one that may stand beside base's")
    if strange := content.chains.keys() - {cache.name for cache in manifest.caches}:
        raise BlockRejected(f"the log has blocks of caches that the manifest does not name: {sorted(strange)!r:.100}")
    fits = served is not None and manifest.base.spec == served.spec.digest
    # Later code identifies groups by index.
    if served is not None and fits and not _has_groups_of(manifest.base, served.spec):
        raise BlockRejected("its cache groups are not those of its cache")


def _has_groups_of(cache: SavedCache, spec: CacheSpec) -> bool:
    return (cache.groups, cache.holds) == (tuple(group.name for group in spec.all_groups), spec.holds)


def _may_be_beside_base(cache: SavedCache) -> bool:
    return cache.producer is None and not cache.has_state and bool(cache.groups) and not cache.holds


def _check_transcript(transcript: Transcript, num_token_ids: int | None) -> None:
    ids, ends = np.frombuffer(transcript.ids, np.uint32), np.frombuffer(transcript.ends, np.uint32)
    if num_token_ids is not None and ids.size and (largest := int(ids.max())) >= num_token_ids:
        raise BlockRejected(f"token id {largest} is outside the vocabulary of {num_token_ids}")
    if (ends[1:] < ends[:-1]).any():
        raise BlockRejected("a token ends before its predecessor")
    last, length = int(ends[-1]) if ends.size else 0, len(transcript.text)
    if last > length:
        raise BlockRejected(f"the last token ends at {last} of {length} characters")
    if not all(kind in _KINDS and count > 0 for kind, count in transcript.spans):
        raise BlockRejected("a span of tokens is empty, or of an unknown kind")
    if (total := sum(count for _, count in transcript.spans)) != ids.size:
        raise BlockRejected(f"spans of {total} tokens, but {ids.size} token ids")
    try:
        transcript.text.encode()
    except UnicodeEncodeError:
        raise BlockRejected("the text holds half of a surrogate pair") from None


def _check_cache(cache: SavedCache, content: Content) -> None:
    num_tokens, chains = len(content.transcript.ids), content.chains.get(cache.name, ())
    if not 0 <= cache.num_saved <= num_tokens:
        raise BlockRejected(f"{cache.num_saved} of {num_tokens} tokens are named as saved")
    if len(chains) != len(cache.spans()):
        raise BlockRejected(f"{len(chains)} blocks are named for {cache.num_saved} tokens")
    if STATE_GROUP in cache.groups[:-1]:
        raise BlockRejected("the group of recurrent state is not the last one")
    if cache.snapshots and not cache.has_state:
        raise BlockRejected("it names snapshots of a cache without recurrent state")
    if not all(0 < each.num_tokens <= cache.num_saved for each in cache.snapshots):
        raise BlockRejected("it names snapshots of tokens that are not saved")
    if not all(map(_CHAIN.fullmatch, (*chains, *(each.chain for each in cache.snapshots)))):
        raise BlockRejected("a chain key is invalid")


@dataclass(frozen=True)
class Rebuilt:
    """The proven part of a lineage; `lost` describes the rest; `is_cut`: the log continues."""

    manifest: Manifest
    content: Content
    lost: str
    is_cut: bool


def read_hint(data: bytes, name: str, model: str) -> Manifest | None:
    """Parse a damaged manifest; None if it is not that lineage's. `model`: prefix of the fingerprint."""
    with suppress(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        hint = manifest_of(json.loads(data))
        if hint.name == name and hint.model.startswith(model):
            return hint
    return None


def rebuild(
    name: str,
    model: str,
    served: ServedCache,
    hint: Manifest | None,
    logs: Sequence[bytes],
    time: float,
    *,
    is_sound: bool,
) -> Rebuilt | None:
    """Rebuild from the stated log, else the newest that proves anything; None if none does.

    `model`: prefix of the fingerprint. `hint`: the manifest if `is_sound`, or result of `read_hint`. `time`: last use,
    in Unix time, without a manifest.
    """
    end = None if hint is None else hint.log
    found = [salvage_log(data, name, model, end) for data in logs]
    salvaged = max(
        (each for each in found if each is not None),
        key=lambda each: (end is not None and each.end.generation == end.generation, each.end.generation),
        default=None,
    )
    if salvaged is None:
        return None
    bare = _bare_manifest(name, served, salvaged, time)
    stated = [] if hint is None else [hint, replace(hint, caches=bare.caches)]
    for settings in (*stated, bare):
        manifest, content = _as_proven(settings, served, salvaged, is_sound=is_sound)
        with suppress(BlockRejected):
            check_lineage(manifest, content, served)
            lost = "; ".join(_losses(salvaged, content, None if settings is bare else hint))
            return Rebuilt(manifest, content, lost, salvaged.lost_bytes > 0)
    return None


def _as_proven(
    settings: Manifest, served: ServedCache, salvaged: SalvagedLog, *, is_sound: bool
) -> tuple[Manifest, Content]:
    salts = [settings.salt] if is_sound or not settings.salt else [settings.salt, ""]
    for salt in salts:
        manifest = replace(settings, salt=salt, log=salvaged.end)
        caches, chains = _proven_caches(manifest, served, salvaged)
        if caches[0].num_saved:
            break
    manifest = replace(manifest, model=salvaged.model, caches=caches, format_version=FORMAT_VERSION)
    return manifest, replace(salvaged.content, chains=chains)


def _blank(served: ServedCache) -> SavedCache:
    groups = tuple(group.name for group in served.spec.all_groups)
    return SavedCache(BASE_CACHE, served.spec.digest, groups, 0, holds=served.spec.holds)


def _bare_manifest(name: str, served: ServedCache, salvaged: SalvagedLog, time: float) -> Manifest:
    return Manifest(
        id=agent_of(name),
        model=salvaged.model,
        salt="",
        created=time,
        last_used=time,
        adapter=None,
        policy=Policy.EXACT.value,
        caches=(_blank(served),),
        log=salvaged.end,
        lineage=name[len(agent_of(name)) + 1 :] or FIRST_LINEAGE,
    )


def _proven_caches(
    manifest: Manifest, served: ServedCache, salvaged: SalvagedLog
) -> tuple[tuple[SavedCache, ...], dict[str, tuple[str, ...]]]:
    content, ids = salvaged.content, salvaged.content.transcript.ids
    base, *further = manifest.caches
    known = {} if salvaged.format_version == 1 else content.chains
    proven: list[tuple[SavedCache, tuple[str, ...]]] = []
    for cache in _bases(manifest, served, ids, known.get(BASE_CACHE, ())):
        if (chains := _proven_chains(manifest, cache, ids, known.get(BASE_CACHE, ()))) is not None:
            proven.append((cache, chains))
            break
    else:
        proven.append((_blank(served), ()))
    for cache in further:
        chains = _proven_chains(manifest, cache, ids, known.get(cache.name, ()))
        if chains is not None and _may_be_beside_base(cache):
            proven.append((cache, chains))
    with_snapshots = tuple(_with_proven_snapshots(manifest, cache, ids) for cache, _ in proven)
    return with_snapshots, {cache.name: chains for cache, chains in proven if chains}


def _bases(
    manifest: Manifest, served: ServedCache, ids: Sequence[int], chains: tuple[str, ...]
) -> Iterator[SavedCache]:
    stated, blank, num_tokens = manifest.base, _blank(served), len(ids)
    yield stated
    for cache in (stated, replace(blank, producer=stated.producer), blank):
        for num_saved in (num_tokens, num_tokens - 1):
            if num_saved > 0:
                yield replace(cache, num_saved=num_saved)
    for cache in (stated, blank):
        plain = replace(cache, num_saved=num_tokens - num_tokens % BLOCK_SIZE, producer=None)
        if num_saved := BLOCK_SIZE * _proven_blocks(manifest, plain, ids, chains):
            yield replace(plain, num_saved=num_saved)


def _proven_chains(
    manifest: Manifest, cache: SavedCache, ids: Sequence[int], chains: tuple[str, ...]
) -> tuple[str, ...] | None:
    if type(cache.num_saved) is not int or not 0 <= cache.num_saved <= len(ids):
        return None
    layout = cache.spans()
    if layout and cache.producer is None:
        chains = chains[: len(layout)]
    if len(chains) != len(layout):
        return None
    return chains if tuple(chain_keys(manifest.root_of(cache), ids, layout)) == chains else None


def _proven_blocks(manifest: Manifest, cache: SavedCache, ids: Sequence[int], chains: tuple[str, ...]) -> int:
    pairs = zip(chain_keys(manifest.root_of(cache), ids, cache.spans()), chains, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _with_proven_snapshots(manifest: Manifest, cache: SavedCache, ids: Sequence[int]) -> SavedCache:
    if not cache.has_state:
        return replace(cache, snapshots=())
    root, producer = manifest.root_of(cache), cache.named_origin()
    within = [each for each in cache.snapshots if 0 < each.num_tokens <= cache.num_saved]
    chains = state_chains(root, ids, [each.num_tokens for each in within], producer, cache.num_block_groups)
    proven = (each for each, chain in zip(within, chains, strict=True) if each.chain == chain)
    return replace(cache, snapshots=tuple(proven))


def _losses(salvaged: SalvagedLog, content: Content, hint: Manifest | None) -> Iterator[str]:
    if salvaged.lost_bytes:
        yield f"the last {salvaged.lost_bytes} bytes of its log"
    if hint is None:
        yield "its settings (adapter, policy, salt)"
    unproven = sum(map(len, salvaged.content.chains.values())) - sum(map(len, content.chains.values()))
    if unproven:
        yield f"the names of {unproven} cached blocks"

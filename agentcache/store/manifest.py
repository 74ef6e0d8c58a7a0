"""A lineage's manifest: names its durable data. Written last, it commits a save."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import xxhash

from agentcache.api.names import is_name
from agentcache.api.policy import Policy
from agentcache.blocks.keys import (
    BASE_CACHE,
    BLOCK_SIZE,
    FORMAT_VERSION,
    STATE_GROUP,
    BlockName,
    KVOrigin,
    Namespace,
    block_key,
)
from agentcache.blocks.origin_paths import BlockSpan, NamedBlock, NamedSnapshot, name_blocks, spans
from agentcache.blocks.pool import Holds, are_paired, full_partner
from agentcache.blocks.transcript import Transcript
from agentcache.errors import BlockRejected, FileUnavailable
from agentcache.store.transcript_log import LogEnd

MAX_MANIFEST_BYTES = 1 << 20
FIRST_LINEAGE = "first"
MAX_TIME = 253402300799  # Unix time: end of year 9999
_MAX_GROUPS = 1024  # per cache
_MAX_POSITION = 2**32
_LINEAGE = re.compile(r"[a-z0-9]{1,16}")
_BETWEEN = "~"  # not allowed in ids


@dataclass(frozen=True)
class ResidualBlocks:
    """A lineage's residual KV on disk, of one adapter. Attributes as in `SavedCache`; a block per span."""

    cache: str
    spec: str
    groups: tuple[str, ...]
    num_saved: int
    blocks: tuple[NamedBlock, ...]

    @property
    def chains(self) -> tuple[str, ...]:
        return tuple(block.chain for block in self.blocks)

    def first_tokens(self, num_tokens: int) -> ResidualBlocks | None:
        """Return the blocks within the first tokens."""
        if num_tokens >= self.num_saved:
            return self
        count = num_tokens // BLOCK_SIZE
        return replace(self, num_saved=count * BLOCK_SIZE, blocks=self.blocks[:count]) if count else None


@dataclass(frozen=True)
class AgentRecord:
    """All durable data of a lineage, with its agent's settings. Times are Unix times."""

    id: str
    model: str  # fingerprint
    salt: str
    created: float  # of the agent
    last_used: float  # of the lineage
    adapter: str | None
    policy: str
    system: str | None
    producer: KVOrigin | None  # None: base
    transcript: Transcript
    num_saved: int  # tokens with KV on disk
    blocks: tuple[NamedBlock, ...]  # one per span
    lineage: str = FIRST_LINEAGE
    snapshots: tuple[NamedSnapshot, ...] = ()  # ordered
    residuals: tuple[ResidualBlocks, ...] = ()

    @property
    def name(self) -> str:
        return lineage_name(self.id, self.lineage)

    @property
    def held(self) -> tuple[NamedBlock, ...]:
        """Blocks of base, checkpoints and residual KV."""
        if not self.snapshots and not self.residuals:
            return self.blocks
        further = (block for residual in self.residuals for block in residual.blocks)
        return (*self.blocks, *(snapshot.block for snapshot in self.snapshots), *further)

    def with_blocks_of(self, other: AgentRecord) -> AgentRecord:
        return replace(
            self,
            num_saved=other.num_saved,
            blocks=other.blocks,
            snapshots=other.snapshots,
            residuals=other.residuals,
        )

    def without_blocks(self) -> AgentRecord:
        return replace(self, num_saved=0, blocks=(), snapshots=(), residuals=())

    def residual_of(self, cache: str) -> ResidualBlocks | None:
        return next((residual for residual in self.residuals if residual.cache == cache), None)

    def without_residual(self, cache: str) -> AgentRecord:
        return replace(self, residuals=tuple(each for each in self.residuals if each.cache != cache))

    def with_residual(self, residual: ResidualBlocks) -> AgentRecord:
        others = self.without_residual(residual.cache).residuals
        return replace(self, residuals=(*others, residual))

    @property
    def chains(self) -> tuple[str, ...]:
        return tuple(block.chain for block in self.blocks)

    @property
    def block_names(self) -> list[BlockName]:
        return [name for block in self.held for name in block.names]


@dataclass(frozen=True)
class SavedOrigin:
    """A `KVOrigin` by group names."""

    key: str
    start: int
    groups: tuple[str, ...]


@dataclass(frozen=True)
class SavedSnapshot:
    """A checkpoint: tokens covered, chain key of the last block."""

    num_tokens: int
    chain: str


@dataclass(frozen=True)
class SavedCache:
    """A lineage's data in one cache; the log has the chains."""

    name: str  # `Namespace.cache`
    spec: str  # digest of the cache spec
    groups: tuple[str, ...]  # file names follow from these and chains
    num_saved: int
    producer: SavedOrigin | None = None
    snapshots: tuple[SavedSnapshot, ...] = ()  # ordered; only if the last group is the state's
    holds: tuple[Holds, ...] = ()  # of groups of blocks; empty if all hold all blocks

    @property
    def has_state(self) -> bool:
        return self.groups[-1:] == (STATE_GROUP,)

    @property
    def num_block_groups(self) -> int:
        return len(self.groups) - self.has_state

    def named_snapshots(self) -> tuple[NamedSnapshot, ...]:
        index = self.num_block_groups
        return tuple(NamedSnapshot(each.num_tokens, each.chain, index) for each in self.snapshots)

    def named_origin(self) -> KVOrigin | None:
        if self.producer is None:
            return None
        indices = frozenset(self.groups.index(name) for name in self.producer.groups)
        return KVOrigin(self.producer.key, self.producer.start, indices)

    def spans(self) -> list[BlockSpan]:
        origin, count = self.named_origin(), self.num_block_groups
        return spans(self.num_saved, origin, count, has_state=self.has_state, holds=self.holds)

    def block_keys(self, chains: Iterable[str]) -> Iterator[str]:
        """Keys of blocks and checkpoints."""
        for block in name_blocks(chains, self.spans()):
            for name in block.names:
                yield block_key(name.chain, self.groups[name.group])
        for snapshot in self.snapshots:
            yield block_key(snapshot.chain, STATE_GROUP)


@dataclass(frozen=True)
class Manifest:
    """The parts of an `AgentRecord` that do not grow, and the log's end; base is the first cache."""

    id: str
    model: str
    salt: str
    created: float
    last_used: float
    adapter: str | None
    policy: str
    caches: tuple[SavedCache, ...]
    log: LogEnd
    lineage: str = FIRST_LINEAGE
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        names = [cache.name for cache in self.caches]
        if names[:1] != [BASE_CACHE] or len(set(names)) != len(names):
            raise ValueError(f"base is not the first of the caches {names!r:.100}, or one is there twice")

    @property
    def name(self) -> str:
        return lineage_name(self.id, self.lineage)

    @property
    def base(self) -> SavedCache:
        return self.caches[0]

    def root_of(self, cache: SavedCache) -> str:
        """Return the chain key before the cache's first block."""
        return Namespace(self.model, cache.spec, self.salt, cache.name).root


_CACHE_FIELDS = {field.name for field in dataclass_fields(SavedCache)}
_OLD_FIELDS = {"cache", "groups", "num_saved", "producer"}  # of version 1
_FIELDS = {field.name for field in dataclass_fields(Manifest)} | _OLD_FIELDS | {"checksum"}


def as_time(seconds: float) -> float:
    """Clamp to the allowed times."""
    return min(max(seconds, 0.0), float(MAX_TIME))


def save_origin(producer: KVOrigin | None, groups: tuple[str, ...]) -> SavedOrigin | None:
    if producer is None:
        return None
    return SavedOrigin(producer.key, producer.start, tuple(groups[index] for index in sorted(producer.groups)))


def valid_lineage(lineage: str) -> bool:
    return _LINEAGE.fullmatch(lineage) is not None


def lineage_name(agent_id: str, lineage: str) -> str:
    """A lineage's name, unique within a model."""
    return agent_id if lineage == FIRST_LINEAGE else f"{agent_id}{_BETWEEN}{lineage}"


def agent_of(name: str) -> str:
    return name.partition(_BETWEEN)[0]


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode in the current format version."""
    fields = {
        **vars(manifest),
        "caches": list(map(_cache_fields, manifest.caches)),
        "log": vars(manifest.log),
        "format_version": str(FORMAT_VERSION),
    }
    if manifest.lineage == FIRST_LINEAGE:
        del fields["lineage"]
    return _signed(fields)


def _cache_fields(cache: SavedCache) -> dict[str, Any]:
    fields = dict(vars(cache))
    del fields["producer"], fields["snapshots"]
    if cache.producer is not None:
        fields["producer"] = vars(cache.producer)
    if cache.snapshots:
        fields["snapshots"] = list(map(vars, cache.snapshots))
    if not cache.holds:
        del fields["holds"]
    return fields


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest. Raises BlockRejected; FileUnavailable: of a newer release."""
    try:
        fields = json.loads(data)
        _check_version(fields)
        if _signed(fields) != data:
            raise BlockRejected("the manifest's checksum does not match its content")
        if unknown := sorted(_unknown_fields(fields)):
            raise FileUnavailable(f"a newer release wrote the manifest: it has fields {unknown!r:.100}")
        manifest = manifest_of(fields)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BlockRejected(f"the manifest is unreadable: {error!r:.200}") from None
    if manifest.format_version == FORMAT_VERSION and encode_manifest(manifest) != data:
        raise BlockRejected("the manifest is not the one that was written")
    return manifest


def _check_version(fields: Mapping[str, Any]) -> None:
    version = fields["format_version"]
    if not isinstance(version, str) or not re.fullmatch("[1-9][0-9]{0,3}", version):
        raise BlockRejected(f"the manifest has format version {version!r:.40}")
    if int(version) <= FORMAT_VERSION:
        return
    corrected = (_signed({**fields, "format_version": each}) for each in ("1", str(FORMAT_VERSION)))
    if any(each.startswith(f'{{\n "checksum": "{fields.get("checksum")}"'.encode()) for each in corrected):
        raise BlockRejected(f"the manifest's format version {version} is damaged")  # a flipped bit
    raise FileUnavailable(
        f"a newer release wrote the manifest: format version {version}, and {FORMAT_VERSION} is known"
    )


def _unknown_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    yield from fields.keys() - _FIELDS
    caches = fields.get("caches", ())
    for cache in caches if isinstance(caches, list) else ():
        if isinstance(cache, dict):
            yield from cache.keys() - _CACHE_FIELDS


def manifest_of(fields: Mapping[str, Any]) -> Manifest:
    """Parse without the checksum. Raises ValueError, LookupError or TypeError."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return _from_fields(_upgraded(rest) if rest["format_version"] == "1" else rest)


def _upgraded(fields: Mapping[str, Any]) -> dict[str, Any]:
    base = {"name": BASE_CACHE, "spec": fields["cache"], "groups": fields["groups"], "num_saved": fields["num_saved"]}
    if "producer" in fields:
        base["producer"] = fields["producer"]
    rest = fields.keys() - {"cache", "groups", "num_saved", "producer"}
    return {**{name: fields[name] for name in rest}, "caches": [base]}


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    caches, log = tuple(map(_cache_from, fields["caches"])), LogEnd(**fields["log"])
    version = int(fields["format_version"])
    manifest = Manifest(**{**fields, "caches": caches, "log": log, "format_version": version})
    _check_settings(manifest)
    _check_log(log)
    return manifest


def _check_settings(manifest: Manifest) -> None:
    _require(_is_text(manifest.id) and is_name(manifest.id), "id", manifest.id)
    _require(_is_text(manifest.lineage) and valid_lineage(manifest.lineage), "lineage", manifest.lineage)
    _require(_is_text(manifest.model), "model", manifest.model)
    _require(_is_text(manifest.salt), "salt", manifest.salt)
    _require(_is_time(manifest.created), "created", manifest.created)
    _require(_is_time(manifest.last_used), "last_used", manifest.last_used)
    is_adapter = manifest.adapter is None or (_is_text(manifest.adapter) and is_name(manifest.adapter))
    _require(is_adapter, "adapter", manifest.adapter)
    _require(manifest.policy in [policy.value for policy in Policy], "policy", manifest.policy)


def _check_log(log: LogEnd) -> None:
    _require(_is_count(log.generation) and log.generation > 0, "log generation", log.generation)
    _require(_is_count(log.num_bytes), "log length", log.num_bytes)
    _require(_is_text(log.checksum), "log checksum", log.checksum)


def _cache_from(fields: Mapping[str, Any]) -> SavedCache:
    if not isinstance(fields, dict):
        raise TypeError("a cache is not an object")
    producer = _producer_from(fields["producer"]) if "producer" in fields else None
    snapshots = tuple(map(_snapshot_from, fields.get("snapshots", ())))
    read = {"groups": tuple(fields["groups"]), "producer": producer, "snapshots": snapshots}
    cache = SavedCache(**{**fields, **read, "holds": tuple(map(Holds, fields.get("holds", ())))})
    _require(_is_text(cache.name) and bool(cache.name), "cache name", cache.name)
    _require(_is_text(cache.spec), "cache spec", cache.spec)
    _require(_is_count(cache.num_saved), "number of saved tokens", cache.num_saved)
    _check_groups(cache.groups)
    origin = cache.named_origin()  # ValueError for an unknown group
    _check_holds(cache, frozenset() if origin is None else origin.groups)
    return cache


def _check_holds(cache: SavedCache, adapted: frozenset[int]) -> None:
    holds = cache.holds
    is_stated = Holds.OPEN in holds and len(holds) == cache.num_block_groups
    _require(not holds or (is_stated and are_paired(holds)), "blocks in cache groups", holds)
    pairs = ((full_partner(index), index) for index, each in enumerate(holds) if each is Holds.OPEN)
    _require(all((full in adapted) == (opened in adapted) for full, opened in pairs), "producer", cache.producer)


def _check_groups(groups: tuple[str, ...]) -> None:
    are_names = all(_is_text(group) and group for group in groups)
    _require(are_names and len(set(groups)) == len(groups) <= _MAX_GROUPS, "cache groups", groups)


def _snapshot_from(fields: Mapping[str, Any]) -> SavedSnapshot:
    snapshot = SavedSnapshot(**fields)
    _require(_is_count(snapshot.num_tokens), "snapshot position", snapshot.num_tokens)
    _require(_is_text(snapshot.chain), "snapshot chain", snapshot.chain)
    return snapshot


def _producer_from(fields: Mapping[str, Any]) -> SavedOrigin:
    producer = SavedOrigin(**{**fields, "groups": tuple(fields["groups"])})
    _require(_is_text(producer.key) and bool(producer.key), "producer", producer.key)
    _require(_is_count(producer.start), "producer start", producer.start)
    _check_groups(producer.groups)
    return producer


def _require(is_valid: bool, what: str, value: object) -> None:
    if not is_valid:
        raise ValueError(f"{what} {value!r:.80}")


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_POSITION


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MAX_TIME  # type: ignore[arg-type, operator]


def _signed(fields: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    unsigned = json.dumps(rest, indent=1).encode() + b"\n"
    return f'{{\n "checksum": "{xxhash.xxh3_128_hexdigest(unsigned)}",'.encode() + unsigned[1:]

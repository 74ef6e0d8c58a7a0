"""An agent's manifest: the small file that says what of the agent is durable. It is written last, so it decides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from agentcache.blocks.keys import FORMAT_VERSION, BlockName, Producer
from agentcache.blocks.lanes import BlockSpan, NamedBlock, spans
from agentcache.blocks.transcript import Transcript
from agentcache.errors import BlockRejected
from agentcache.store.transcript_log import LogEnd

MAX_MANIFEST_BYTES = 1 << 20
FIRST_LINEAGE = "first"
_LINEAGE = re.compile(r"[a-z0-9]{1,16}")
_BETWEEN = "~"  # in no id


@dataclass(frozen=True)
class AgentRecord:
    """All that is durable of one lineage of an agent: a conversation, and what all lineages of the agent repeat.

    Args:
        id: the agent's; see `agentcache.names`.
        model: fingerprint of the model its cache belongs to.
        salt: the salt of its namespace.
        created: of the agent, in seconds since 1970.
        last_used: of the lineage.
        adapter: name of the agent's adapter.
        policy: how it may share.
        system: text of the agent's system message.
        producer: who computed the keys and values of its transcript; None for base.
        transcript: text and tokens.
        num_saved: tokens whose keys and values are on disk, at most `len(transcript.ids)`.
        blocks: the blocks of these, one for each of their `spans`.
        lineage: the lineage's short id, its own within the agent; `FIRST_LINEAGE` for the one an agent begins with.
    """

    id: str
    model: str
    salt: str
    created: float
    last_used: float
    adapter: str | None
    policy: str
    system: str | None
    producer: Producer | None
    transcript: Transcript
    num_saved: int
    blocks: tuple[NamedBlock, ...]
    lineage: str = FIRST_LINEAGE

    @property
    def name(self) -> str:
        """Names the lineage's files."""
        return lineage_name(self.id, self.lineage)

    @property
    def chains(self) -> tuple[str, ...]:
        """The chain keys of its blocks; those that two lanes share are there twice."""
        return tuple(block.chain for block in self.blocks)

    @property
    def block_names(self) -> list[BlockName]:
        """All that it needs on disk."""
        return [name for block in self.blocks for name in block.names]


@dataclass(frozen=True)
class SavedProducer:
    """A `Producer` in a manifest, whose groups are known by name."""

    key: str
    start: int
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest's fields: those of `AgentRecord` that do not grow, and where the rest is.

    Args:
        cache: digest of the cache spec that the chains were made with.
        groups: names of the cache groups; with the chains they name the agent's block files.
        log: valid end of the transcript log.
        producer: who computed the blocks; None for base.
    """

    id: str
    model: str
    cache: str
    groups: tuple[str, ...]
    salt: str
    created: float
    last_used: float
    adapter: str | None
    policy: str
    num_saved: int
    log: LogEnd
    producer: SavedProducer | None = None
    lineage: str = FIRST_LINEAGE

    @property
    def name(self) -> str:
        """Names the lineage's files."""
        return lineage_name(self.id, self.lineage)

    def named_producer(self) -> Producer | None:
        """The producer with its groups by index."""
        if self.producer is None:
            return None
        indices = frozenset(self.groups.index(name) for name in self.producer.groups)
        return Producer(self.producer.key, self.producer.start, indices)

    def spans(self) -> list[BlockSpan]:
        """The blocks that it names, in the order of the log's chains."""
        return spans(self.num_saved, self.named_producer(), len(self.groups))


def save_producer(producer: Producer | None, groups: tuple[str, ...]) -> SavedProducer | None:
    """The producer for a manifest with these names of groups."""
    if producer is None:
        return None
    return SavedProducer(producer.key, producer.start, tuple(groups[index] for index in sorted(producer.groups)))


def valid_lineage(lineage: str) -> bool:
    """Whether a lineage may have this id."""
    return _LINEAGE.fullmatch(lineage) is not None


def lineage_name(agent_id: str, lineage: str) -> str:
    """What names a lineage among all of a model: of different agents and lineages never the same."""
    return agent_id if lineage == FIRST_LINEAGE else f"{agent_id}{_BETWEEN}{lineage}"


def agent_of(name: str) -> str:
    """The id of the agent whose lineage has this name."""
    return name.partition(_BETWEEN)[0]


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a checksum over all other fields.

    Base as the producer and the first lineage go without saying.
    """
    fields = {**vars(manifest), "log": vars(manifest.log), "format_version": str(FORMAT_VERSION)}
    del fields["producer"]
    if manifest.producer is not None:
        fields["producer"] = vars(manifest.producer)
    if manifest.lineage == FIRST_LINEAGE:
        del fields["lineage"]
    return _dump({"checksum": _checksum(fields), **fields})


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in `data`.

    Raises:
        BlockRejected: it is not byte for byte what `encode_manifest` wrote, or is of another format version.
    """
    try:
        fields = json.loads(data)
        if fields["format_version"] != str(FORMAT_VERSION):
            raise BlockRejected(f"the manifest has format version {fields['format_version']!r:.40}")
        manifest = _from_fields(fields)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BlockRejected(f"the manifest is unreadable: {error!r:.100}") from None
    if encode_manifest(manifest) != data:
        raise BlockRejected("the manifest's checksum does not match its content")
    return manifest


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    names = Manifest.__dataclass_fields__.keys() - {"log", "groups", "producer", "lineage"}
    plain = {name: fields[name] for name in names}
    producer = _producer_from(fields["producer"]) if "producer" in fields else None
    groups, log, lineage = tuple(fields["groups"]), LogEnd(**fields["log"]), fields.get("lineage", FIRST_LINEAGE)
    manifest = Manifest(**plain, groups=groups, log=log, producer=producer, lineage=lineage)
    if any(type(number) is not int for number in (manifest.num_saved, manifest.log.generation, manifest.log.num_bytes)):
        raise TypeError("a number is not an integer")
    manifest.named_producer()  # a ValueError if a group is unknown
    return manifest


def _producer_from(fields: Mapping[str, Any]) -> SavedProducer:
    producer = SavedProducer(fields["key"], fields["start"], tuple(fields["groups"]))
    if type(producer.key) is not str or type(producer.start) is not int or producer.start < 0:
        raise TypeError("the producer is none")
    return producer


def _checksum(fields: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(_dump(fields)))


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1).encode() + b"\n"

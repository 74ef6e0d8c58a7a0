"""Content addresses of cache blocks.

A key is the blake2b digest of a tagged, length-prefixed encoding, so that no two different inputs share an encoding.
Keys form a chain: a block's key covers everything before it, as attention does. They never contain a name: an adapter
reloaded under the same name has another key, the same weights under a new name have the same key.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

BLOCK_SIZE = 256
FORMAT_VERSION = 2
BASE_PRODUCER = "base"
BASE_CACHE = "base"
STATE_GROUP = "recurrent"  # the last of a model's cache groups, where it has recurrent layers
_DIGEST_BYTES = 20


def _digest(tag: str, *fields: bytes) -> str:
    """Hex digest of `fields` under `tag`; every field is preceded by its length."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=tag.encode())
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.hexdigest()


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32 bytes."""
    return array("I", token_ids).tobytes()


@dataclass(frozen=True)
class Namespace:
    """What two prompts must have in common before a single token may be shared.

    Args:
        model: fingerprint of weights, config and tokenizer.
        spec: digest of the cache spec (tensors, quantisation, groups, rope).
        salt: the request's salt; requests with different salts never share a block.
        cache: `base` for the model's own keys and values; of what is kept beside them, a text that covers what it
            belongs to by its content (an adapter's digest, say). Each cache has roots and chains of its own.
    """

    model: str
    spec: str
    salt: str = ""
    cache: str = BASE_CACHE

    @cached_property
    def root(self) -> str:
        """The chain key in front of the first block."""
        parts = (str(FORMAT_VERSION), self.model, self.spec, self.salt, self.cache)
        return _digest("agentcache.root", *(part.encode() for part in parts))


def root_of_version_1(model: str, spec: str, salt: str) -> str:
    """The root in files of format version 1, which knew one cache only; for who verifies such files."""
    return _digest("agentcache.root", b"1", model.encode(), spec.encode(), salt.encode())


@dataclass(frozen=True)
class Producer:
    """Who computes a sequence's keys and values; base does so before `start` and in all other groups.

    Its blocks are of use only to a sequence with an equal producer: what it computes behind `start` attends to all that
    it has computed since, so another start gives other keys and values (Activated LoRA, arXiv 2504.12397).

    Args:
        key: names what computes by its content, an adapter's digest over weights and effective scale.
        start: first position it acts on; 0 for a plain LoRA, the invocation of an activated one.
        groups: the cache groups that hold a layer whose keys or values can differ from base's, by their index in the
            spec of the cache that this process runs with; files name them.
    """

    key: str
    start: int
    groups: frozenset[int]

    @property
    def text(self) -> str:
        """How it stands in keys and files."""
        return f"{self.key}@{self.start}"


def chain_key(parent: str, token_ids: Sequence[int], producer: str = BASE_PRODUCER) -> str:
    """Address of the tokens that follow `parent`, as `producer` computed them; 40 hex digits.

    A producer is `base` for the unadapted model, else the text of a `Producer`.
    """
    return _digest("agentcache.chain", parent.encode(), pack_token_ids(token_ids), producer.encode())


@lru_cache(maxsize=1 << 14)  # every turn names all blocks of its conversation
def block_key(chain: str, group: str) -> str:
    """Address of one cache group's layers of the block at `chain`; names its file; 40 hex digits."""
    return _digest("agentcache.block", chain.encode(), group.encode())


class BlockName(NamedTuple):
    """One cache group's layers of the block at `chain`.

    Only of this process: the group is its index in the spec of the cache that the chain belongs to. Of what is durable
    the group has its name (`block_key`), so that neither another cache nor another order of groups renumbers it.
    """

    chain: str
    group: int

"""Content addresses of cache blocks: digests of all tokens up to a block's end, and of adapter weights."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

BLOCK_SIZE = 256
FIRST_SEALED = 1  # block number; earlier full blocks stay open
FORMAT_VERSION = 2
BASE_ORIGIN = "base"
BASE_CACHE = "base"
RESIDUAL = "residual"
STATE_GROUP = "recurrent"
_DIGEST_BYTES = 20


def _digest(tag: str, *fields: bytes) -> str:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=tag.encode())
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.hexdigest()


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


@dataclass(frozen=True)
class Namespace:
    """What prompts must have in common to share blocks.

    `model`: fingerprint of weights, config and tokenizer. `spec`: digest of the `CacheSpec`. `cache`: `base`, or a
    `residual_cache`.
    """

    model: str
    spec: str
    salt: str = ""
    cache: str = BASE_CACHE

    @cached_property
    def root(self) -> str:
        parts = (str(FORMAT_VERSION), self.model, self.spec, self.salt, self.cache)
        return _digest("agentcache.root", *(part.encode() for part in parts))


def root_of_version_1(model: str, spec: str, salt: str) -> str:
    return _digest("agentcache.root", b"1", model.encode(), spec.encode(), salt.encode())


def is_sealed(position: int, num_tokens: int) -> bool:
    """Whether a block is in groups of sealed blocks, if its cache has those (`Holds`)."""
    return position >= FIRST_SEALED and num_tokens == BLOCK_SIZE


@dataclass(frozen=True)
class KVOrigin:
    """An adapter that computes `groups` from token `start` on; base computes the rest.

    Another start gives other KV. `key`: digest of weights and effective scale.
    """

    key: str
    start: int
    groups: frozenset[int]

    @property
    def text(self) -> str:
        return f"{self.key}@{self.start}"


def chain_key(parent: str, token_ids: Sequence[int], producer: str = BASE_ORIGIN) -> str:
    """Address of tokens after `parent`. `producer`: `base` or a `KVOrigin.text`."""
    return _digest("agentcache.chain", parent.encode(), pack_token_ids(token_ids), producer.encode())


@lru_cache(maxsize=1 << 14)
def block_key(chain: str, group: str) -> str:
    """Address and file name of a group's part of a block."""
    return _digest("agentcache.block", chain.encode(), group.encode())


def residual_cache(adapter_digest: str) -> str:
    return f"{RESIDUAL}.{adapter_digest}"


def kind_of(cache: str) -> str:
    return cache.partition(".")[0]


class BlockName(NamedTuple):
    chain: str
    group: int
    cache: str = BASE_CACHE

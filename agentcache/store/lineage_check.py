"""All semantic checks of a lineage's files, beyond their checksums.

Server start, import and `agentcache doctor --check` all call `decode_manifest`, `parse_log`, then `check_lineage`.
The engine relies on checked values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from agentcache.blocks.keys import BASE_CACHE, STATE_GROUP, kind_of
from agentcache.blocks.transcript import Transcript
from agentcache.errors import BlockRejected
from agentcache.kv.spec import CacheSpec
from agentcache.store.manifest import Manifest, SavedCache
from agentcache.store.transcript_log import Content

_CHAIN = re.compile(r"[0-9a-f]{40}")
_KINDS = ("prompt", "generated")


@dataclass(frozen=True)
class ServedCache:
    """The served model's cache, to validate lineages."""

    spec: CacheSpec
    num_token_ids: int | None = None


def check_lineage(manifest: Manifest, content: Content, served: ServedCache | None = None) -> None:
    """Raise BlockRejected unless manifest and log are consistent; chain keys are not compared with tokens.

    Args:
        served: None for another model's lineage.
    """
    _check_transcript(content.transcript, None if served is None else served.num_token_ids)
    for cache in manifest.caches:
        _check_cache(cache, content)
    for cache in manifest.caches[1:]:
        if kind_of(cache.name) == BASE_CACHE or cache.producer is not None or cache.has_state or not cache.groups:
            raise BlockRejected(f"the cache {cache.name!r:.80} is none that may stand beside base's")
    if strange := content.chains.keys() - {cache.name for cache in manifest.caches}:
        raise BlockRejected(f"the log has blocks of caches that the manifest does not name: {sorted(strange)!r:.100}")
    if served is not None and manifest.base.spec == served.spec.digest:
        _check_groups(manifest, served.spec)


def _check_transcript(transcript: Transcript, num_token_ids: int | None) -> None:
    ids, ends = np.frombuffer(transcript.ids, np.uint32), np.frombuffer(transcript.ends, np.uint32)
    if num_token_ids is not None and ids.size and (largest := int(ids.max())) >= num_token_ids:
        raise BlockRejected(f"token id {largest} is outside the vocabulary of {num_token_ids}")
    if (ends[1:] < ends[:-1]).any():
        raise BlockRejected("tokens end in front of those before them")
    last, length = int(ends[-1]) if ends.size else 0, len(transcript.text)
    if last > length:
        raise BlockRejected(f"the last token ends at {last} of {length} characters")
    if not all(kind in _KINDS and count > 0 for kind, count in transcript.spans):
        raise BlockRejected("a span of tokens is empty, or of an unknown kind")
    if (total := sum(count for _, count in transcript.spans)) != ids.size:
        raise BlockRejected(f"spans of {total} tokens, of which there are {ids.size}")
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
        raise BlockRejected("a chain key is none")


def _check_groups(manifest: Manifest, spec: CacheSpec) -> None:
    """Later code identifies groups by index."""
    if manifest.base.groups != tuple(group.name for group in spec.all_groups):
        raise BlockRejected("its cache groups are not those of its cache")

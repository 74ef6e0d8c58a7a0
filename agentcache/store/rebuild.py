"""Rebuild a lineage with a damaged manifest or log from its proven parts. Touches no file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from agentcache.api.policy import Policy
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, FORMAT_VERSION
from agentcache.blocks.origin_paths import chain_keys, state_chains
from agentcache.errors import BlockRejected
from agentcache.store.lineage_check import ServedCache, check_lineage
from agentcache.store.manifest import FIRST_LINEAGE, Manifest, SavedCache, agent_of, manifest_of
from agentcache.store.transcript_log import Content, SalvagedLog, salvage_log


@dataclass(frozen=True)
class Rebuilt:
    """The proven part of a lineage.

    Args:
        manifest: its log end is that of the proven part.
        lost: unproven parts, for logging; may be empty.
        is_cut: whether the log continues behind the proven part.
    """

    manifest: Manifest
    content: Content
    lost: str
    is_cut: bool


def read_hint(data: bytes, name: str, model: str) -> Manifest | None:
    """Parse a damaged manifest, unproven; None if it is not the named lineage's.

    Args:
        model: prefix of the fingerprint.
    """
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
    """Rebuild from the log that proves most; None if no log proves anything.

    Args:
        model: prefix of the fingerprint.
        hint: manifest, or result of `read_hint`.
        time: Unix time of use if no manifest has one.
        is_sound: whether the manifest is proven.

    Raises FileUnavailable for a log of a newer release.
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
    return SavedCache(BASE_CACHE, served.spec.digest, groups, 0)


def _bare_manifest(name: str, served: ServedCache, salvaged: SalvagedLog, time: float) -> Manifest:
    """Adapter, policy and salt are only in manifests: use a new agent's."""
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
    """Return caches whose chains match the tokens, base first, and their chains."""
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
        if chains is not None and cache.producer is None and not cache.has_state and cache.groups:
            proven.append((cache, chains))
    with_snapshots = tuple(_with_proven_snapshots(manifest, cache, ids) for cache, _ in proven)
    return with_snapshots, {cache.name: chains for cache, chains in proven if chains}


def _bases(
    manifest: Manifest, served: ServedCache, ids: Sequence[int], chains: tuple[str, ...]
) -> Iterator[SavedCache]:
    """Yield candidates for base's cache: as stated, then of the served spec; all tokens, then fewer."""
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
    """Return how many leading base blocks match the tokens."""
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

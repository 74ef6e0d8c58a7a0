"""Descriptions and token capacity of cache groups, for reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from agentcache.api.model import CacheGroupInfo, GroupKind
from agentcache.blocks.allocator import window_blocks
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import Holds
from agentcache.kv.spec import GroupSpec


def bytes_for(group: CacheGroupInfo, num_tokens: int) -> int:
    """Bytes of a conversation at rest, which has two open blocks; block 0 is counted in both forms."""
    blocks = -(-num_tokens // BLOCK_SIZE)
    if group.kind is GroupKind.STATE:
        return group.bytes_per_block
    if group.kind is GroupKind.OPEN:
        return group.bytes_per_block * min(blocks, FIRST_SEALED + 1)
    return group.bytes_per_block * (blocks if group.window is None else min(blocks, window_blocks(group.window)))


def tokens_within(groups: Sequence[CacheGroupInfo], num_bytes: int, most: int) -> int:
    """Tokens of a running request that fit into `num_bytes` in whole blocks, at most `most`."""
    opened = sum(group.bytes_per_block for group in groups if group.kind is GroupKind.OPEN)
    by_step = (window_blocks(1) - 1) * opened  # open blocks that a step reaches

    def needed(blocks: int) -> int:
        return sum(bytes_for(group, blocks * BLOCK_SIZE) for group in groups) + by_step

    return min(most, BLOCK_SIZE * bisect_right(range(1, -(-most // BLOCK_SIZE) + 1), num_bytes, key=needed))


def describe_group(group: GroupSpec) -> CacheGroupInfo:
    return CacheGroupInfo(
        name=group.name,
        kind=_kind_of(group),
        window=None if group.holds is Holds.OPEN else group.window,
        layers=len(group.layers),
        bytes_per_token=group.bytes_per_token,
        bytes_per_snapshot=group.bytes_of(0),
        bytes_per_block=group.bytes_per_block,
        packing=str(group.packing or ""),
    )


def _kind_of(group: GroupSpec) -> GroupKind:
    if not group.bytes_per_token:
        return GroupKind.STATE
    if group.holds is Holds.OPEN:
        return GroupKind.OPEN
    if group.window is not None:
        return GroupKind.WINDOW
    is_latent = bool(group.layers) and not any(layer.value_dim for layer in group.layers)
    return GroupKind.LATENT if is_latent else GroupKind.FULL

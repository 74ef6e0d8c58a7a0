"""How far a prompt is cached that is computed twice: by base, and by an adapter on top of base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.prefix_cache import PrefixCache


@dataclass(frozen=True)
class OverlayMatch:
    """What two caches have of a prompt. Valid until one of them is next changed.

    Args:
        base: all that base's cache has, with the windows that are read from the end of `residuals` on.
        residuals: what the adapter's cache has, as far as base's has it too: there the adapter begins to compute.
        found: tokens that the adapter's cache has, with or without base's.
    """

    base: CachedPrefix
    residuals: CachedPrefix
    found: int


def match_overlay(
    base: PrefixCache, root: str, residuals: PrefixCache, residual_root: str, token_ids: Sequence[int], limit: int
) -> OverlayMatch:
    """The longest prefixes of at most `limit` tokens that an adapter can go on from. Changes nothing.

    It goes on from the shorter one. Where base reaches further, the adapter reads base's windows from there on: base's
    prefix ends where these are missing, and the adapter's no later.
    """
    found = residuals.match_prefix(residual_root, token_ids, limit).num_tokens
    end = min(found, base.match_prefix(root, token_ids, limit).num_tokens)
    while True:
        above = residuals.match_prefix(residual_root, token_ids, end)
        below = base.match_prefix(root, token_ids, limit, read_from=above.num_tokens)
        if below.num_tokens >= above.num_tokens:
            return OverlayMatch(below, above, found)
        end = below.num_tokens

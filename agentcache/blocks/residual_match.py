from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.blocks.path_search import CachedPrefix
from agentcache.blocks.prefix_cache import PrefixCache


@dataclass(frozen=True)
class ResidualMatch:
    """Prefixes of a residual request. Valid until one of the caches changes.

    Args:
        base: base's prefix, with the windows read from the end of `residuals` on.
        residuals: the adapter's prefix, not longer than base's.
        found: tokens in the adapter's cache, even where base lacks them.
    """

    base: CachedPrefix
    residuals: CachedPrefix
    found: int


def match_residual_kv(
    base: PrefixCache, root: str, residuals: PrefixCache, residual_root: str, token_ids: Sequence[int], limit: int
) -> ResidualMatch:
    """Return the longest prefixes that an adapter can continue.

    The adapter reads base's windows from the shorter end on. Where a window lacks a block, both prefixes end.
    """
    found = residuals.match_prefix(residual_root, token_ids, limit).num_tokens
    end = min(found, base.match_prefix(root, token_ids, limit).num_tokens)
    while True:
        above = residuals.match_prefix(residual_root, token_ids, end)
        below = base.match_prefix(root, token_ids, limit, read_from=above.num_tokens)
        if below.num_tokens >= above.num_tokens:
            return ResidualMatch(below, above, found)
        end = below.num_tokens

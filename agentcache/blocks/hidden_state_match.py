from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentcache.blocks.hidden_states import HiddenStateCache, HiddenStateKey
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.path_search import CachedPrefix, PathPrefix, PathSearch
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.siblings import pack


@dataclass(frozen=True)
class HiddenStateMatch:
    """Tokens that need only the layers from `cut` on. Valid until a cache changes.

    Args:
        prefix: prefix with base's path longer than the adapter's.
        first: number of the block in which the adapter's path ends.
        names: hidden states from there to the end of base's path.
    """

    prefix: CachedPrefix
    first: int
    names: tuple[HiddenStateKey, ...]

    @property
    def cut(self) -> int:
        return self.names[0].cut

    @property
    def end(self) -> int:
        return (self.first + len(self.names)) * BLOCK_SIZE


def match_hidden_states(
    cache: PrefixCache,
    hidden_states: HiddenStateCache,
    root: str,
    token_ids: Sequence[int],
    prefix: CachedPrefix,
    cut: int,
    *,
    durable: bool = False,
) -> HiddenStateMatch | None:
    """Return the hidden states that extend `prefix`.

    Args:
        durable: whether an agent keeps all blocks, including those before a window.
    """
    base, *own = prefix.lanes
    search = PathSearch(cache.tree, cache.groups, root, pack(token_ids), base.layout)
    first = prefix.num_tokens // BLOCK_SIZE
    lane = _whole_blocks(search, len(token_ids))
    ahead: Iterable[Node] = lane.nodes[first:]
    if durable:
        groups = frozenset(base.groups)
        ahead = takewhile(lambda node: node.all_available(groups), ahead)
    count = hidden_states.match(HiddenStateKey(node.chain, cut) for node in ahead)
    lane = _whole_blocks(search, (first + count) * BLOCK_SIZE)
    names = tuple(HiddenStateKey(node.chain, cut) for node in lane.nodes[first:])
    longer = CachedPrefix(prefix.producer, (lane, *own))
    return HiddenStateMatch(longer, first, names) if names else None


def _whole_blocks(search: PathSearch, limit: int) -> PathPrefix:
    while (lane := search.longest(limit)).tail is not None:
        limit = len(lane.nodes) * BLOCK_SIZE
    return lane

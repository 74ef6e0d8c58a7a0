"""How far a prompt whose own lane is short can go on from base's blocks and the trunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.lane_search import CachedPrefix, LanePrefix, LaneSearch
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.siblings import pack
from agentcache.blocks.trunk import TrunkCache, TrunkName


@dataclass(frozen=True)
class TrunkMatch:
    """Tokens of which only the layers from a cut on have to be computed. Valid until cache or trunk is next changed.

    Args:
        prefix: of which the base lane reaches further than the own one.
        first: number of the block in which the own lane ends.
        names: the trunk's blocks from there to the end of the base lane.
    """

    prefix: CachedPrefix
    first: int
    names: tuple[TrunkName, ...]

    @property
    def cut(self) -> int:
        return self.names[0].cut

    @property
    def end(self) -> int:
        """The first token behind the trunk's blocks."""
        return (self.first + len(self.names)) * BLOCK_SIZE


def match_trunk(
    cache: PrefixCache,
    trunk: TrunkCache,
    root: str,
    token_ids: Sequence[int],
    prefix: CachedPrefix,
    cut: int,
    *,
    durable: bool = False,
) -> TrunkMatch | None:
    """What there is for `prefix` of `token_ids`, whose lanes are base's below layer `cut` and its own above; else None.

    Args:
        durable: an agent is to keep all blocks, so those in front of a window have to be there too.

    Changes nothing.
    """
    base, *own = prefix.lanes
    search = LaneSearch(cache.tree, cache.groups, root, pack(token_ids), base.layout)
    first = prefix.num_tokens // BLOCK_SIZE
    lane = _whole_blocks(search, len(token_ids))
    ahead: Iterable[Node] = lane.nodes[first:]
    if durable:
        groups = frozenset(base.groups)
        ahead = takewhile(lambda node: node.all_available(groups), ahead)
    count = trunk.match(TrunkName(node.chain, cut) for node in ahead)
    lane = _whole_blocks(search, (first + count) * BLOCK_SIZE)
    names = tuple(TrunkName(node.chain, cut) for node in lane.nodes[first:])
    longer = CachedPrefix(prefix.producer, (lane, *own))
    return TrunkMatch(longer, first, names) if names else None


def _whole_blocks(search: LaneSearch, limit: int) -> LanePrefix:
    """The longest usable prefix of at most `limit` tokens that ends with a block."""
    while (lane := search.longest(limit)).tail is not None:
        limit = len(lane.nodes) * BLOCK_SIZE
    return lane

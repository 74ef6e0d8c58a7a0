"""The longest cached prefix of a prompt, lane by lane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from agentcache.blocks.keys import BLOCK_SIZE, Producer
from agentcache.blocks.lanes import BlockKind, LaneLayout, lay_out
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.siblings import BYTES_PER_TOKEN, Nearest, pack
from agentcache.blocks.slots import Group
from agentcache.blocks.snapshots import Snapshots

MIN_TAIL_TOKENS = 16  # copying fewer tokens of another block costs more than computing them


@dataclass(frozen=True)
class LanePrefix:
    """Tokens of one lane that need not be computed.

    Args:
        nodes: full blocks, all of whose tokens are used.
        tail: a further node of which the first `tail_tokens` tokens are used, or None.
    """

    layout: LaneLayout
    nodes: tuple[Node, ...]
    tail: Node | None = None
    tail_tokens: int = 0

    @property
    def groups(self) -> tuple[int, ...]:
        return self.layout.groups

    @property
    def num_tokens(self) -> int:
        return len(self.nodes) * BLOCK_SIZE + self.tail_tokens

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        """The nodes by block number."""
        return self.nodes if self.tail is None else (*self.nodes, self.tail)

    @property
    def ends_with_a_block(self) -> bool:
        """Whether its last node is used as a whole."""
        return self.tail is None or self.tail_tokens == self.tail.num_tokens


@dataclass(frozen=True)
class CachedPrefix:
    """Tokens that need not be computed, the same in every lane. Valid until the cache is next changed.

    The base lane of a prompt that goes on from the trunk reaches further, in whole blocks (`trunk_match`).

    Args:
        snapshot: the node of whose end there is a snapshot of recurrent state, in RAM or on disk; it ends there.
            None at a sequence's start, and for models without recurrent layers.
        known_tokens: as far as every lane has the tokens, with a snapshot behind them or not; for such models only.
            Without attention there is nothing to have.
    """

    producer: Producer | None
    lanes: tuple[LanePrefix, ...]
    snapshot: Node | None = None
    known_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return min(lane.num_tokens for lane in self.lanes)

    def lane(self, group: int) -> LanePrefix:
        """The lane that has this group."""
        return next(lane for lane in self.lanes if group in lane.groups)


def match_prefix(
    tree: RadixTree,
    groups: Sequence[Group],
    root: str,
    token_ids: Sequence[int],
    limit: int,
    producer: Producer | None,
    snapshots: Snapshots | None = None,
) -> CachedPrefix:
    """The longest prefix of at most `limit` tokens that every lane has in RAM or on disk. Changes nothing.

    Args:
        snapshots: those of a model with recurrent layers; the prefix ends where there is one.
    """
    packed = pack(token_ids[:limit])
    layouts = lay_out(producer, len(groups), has_state=snapshots is not None)
    # Where a sequence may begin at few positions only, no tokens are too few to be worth a copy.
    least = MIN_TAIL_TOKENS if snapshots is None else 1
    searches = [LaneSearch(tree, groups, root, packed, layout, least) for layout in layouts]
    ends = None if snapshots is None else SnapshotSearch(tree, root, packed, layouts, snapshots)
    known = None if groups else min(limit, len(token_ids))
    while True:
        lanes = tuple(search.longest(limit) for search in searches)
        shortest = min(lane.num_tokens for lane in lanes)
        is_even = all(lane.num_tokens == shortest for lane in lanes)
        if ends is None:
            if is_even:
                return CachedPrefix(producer, lanes)
            # Cut to this a longer lane may lack something: a window's older blocks, or tokens worth a copy.
            limit = shortest
            continue
        known = shortest if known is None else known
        node = ends.longest(shortest)
        limit = 0 if node is None else node.end
        if is_even and limit == shortest:
            return CachedPrefix(producer, lanes, node, known)


class LaneSearch:
    """What the tree has of one lane of a prompt. Valid until the tree is next changed.

    Args:
        packed: the prompt's tokens (`siblings.pack`).
        least: tokens of another block that are worth a copy.
    """

    def __init__(
        self,
        tree: RadixTree,
        groups: Sequence[Group],
        root: str,
        packed: bytes,
        layout: LaneLayout,
        least: int = MIN_TAIL_TOKENS,
    ) -> None:
        self._root = tree.peek(root)
        self._least = least
        self._packed = packed
        self._layout = layout
        self._all = frozenset(layout.groups)
        self._windows = {index: groups[index] for index in layout.groups if groups[index].window is not None}
        # A block without the data of a full-attention group is a dead end: all that is behind it needs that.
        unbounded = self._all - self._windows.keys()
        usable = partial(_has, unbounded)
        self._nodes = tree.match_prefix(root, packed, usable, layout.producer_of)

    def longest(self, limit: int) -> LanePrefix:
        """The longest usable prefix of at most `limit` tokens."""
        count = min(len(self._nodes), limit // BLOCK_SIZE)
        while True:
            with_tail = self._with_tail(count, limit)
            if with_tail is not None and self._missing(with_tail) is None:
                return with_tail
            prefix = LanePrefix(self._layout, tuple(self._nodes[:count]))
            missing = self._missing(prefix)
            if missing is None:
                return prefix
            count = missing  # nothing behind that block can do without it, but what is beside it may

    def _missing(self, prefix: LanePrefix) -> int | None:
        """Number of the last block that some window needs and nobody has; None if all are there."""
        missing = (
            position
            for index, group in self._windows.items()
            for position in range(group.first_block_needed(prefix.num_tokens), len(prefix.nodes))
            if not prefix.nodes[position].available(index)
        )
        return max(missing, default=None)

    def _with_tail(self, count: int, limit: int) -> LanePrefix | None:
        """The first `count` blocks and what shares most tokens behind them; None if that is not worth a copy."""
        nearest = [self._nearest(count, limit, kind) for kind in self._layout.usable_kinds(count)]
        most = max(found.num_tokens for found in nearest)
        tails = [node for found in nearest if found.num_tokens == most for node in found.items]
        if not tails:
            return None
        tail = min(tails, key=self._loads_needed)
        return LanePrefix(self._layout, tuple(self._nodes[:count]), tail, most)

    def _nearest(self, count: int, limit: int, kind: BlockKind) -> Nearest[Node]:
        """Not for the few tokens that most prompts of a template share; but a whole tail is some agent's memory."""
        parent = self._nodes[count - 1] if count else self._root
        rest = self._packed[count * BLOCK_SIZE * BYTES_PER_TOKEN : min(limit, kind.end) * BYTES_PER_TOKEN]
        usable = partial(_has, self._all)
        nearest = parent.nearest(rest, usable, least=self._least, producer=kind.producer)
        if nearest.items:
            return nearest
        short = min(self._least - 1, len(rest) // BYTES_PER_TOKEN)
        for num_tokens in range(short, 0, -1):
            tail = parent.child(rest[: num_tokens * BYTES_PER_TOKEN], kind.producer)
            if tail is not None and usable(tail):
                return Nearest([tail], num_tokens)
        return nearest

    def _loads_needed(self, node: Node) -> int:
        return len(self._all - node.block_ids.keys())


class SnapshotSearch:
    """The positions of a prompt behind which there is a snapshot. Valid until the tree is next changed.

    Args:
        packed: the prompt's tokens.
        layouts: its lanes, of which one has the state.
    """

    def __init__(
        self, tree: RadixTree, root: str, packed: bytes, layouts: Iterable[LaneLayout], snapshots: Snapshots
    ) -> None:
        layout = next(each for each in layouts if each.has_state)
        # Of each node only that it is there: keys and values may be in another lane, or in a longer block.
        self._path = [
            tree.peek(root),
            *tree.match_prefix(root, packed, lambda node: True, layout.producer_of),
        ]
        self._packed = packed
        self._snapshots = snapshots
        self._layout = layout

    def longest(self, limit: int) -> Node | None:
        """The node that ends last, in front of or behind token `limit - 1`, and has a snapshot; None without one."""
        return next(self.ends(limit), None)

    def ends(self, limit: int) -> Iterator[Node]:
        """All nodes with a snapshot that end there or before, the last one first."""
        for node in reversed(self._path[: limit // BLOCK_SIZE + 1]):
            tails = [tail for tail in node.children if self._is_usable_tail(tail, limit)]
            yield from sorted(tails, key=lambda tail: tail.num_tokens, reverse=True)
            if node.parent is not None and self._snapshots.has(node):
                yield node

    def _is_usable_tail(self, tail: Node, limit: int) -> bool:
        if tail.is_full or tail.end > limit or not self._snapshots.has(tail):
            return False
        begin = tail.position * BLOCK_SIZE * BYTES_PER_TOKEN
        fits = self._packed[begin : begin + len(tail.packed)] == tail.packed
        return fits and tail.producer == self._layout.producer_of(tail.end)


def find_snapshots(
    tree: RadixTree,
    num_groups: int,
    root: str,
    token_ids: Sequence[int],
    producer: Producer | None,
    snapshots: Snapshots,
) -> list[Node]:
    """The nodes of all snapshots of these tokens, in RAM or on disk, in their order."""
    layouts = lay_out(producer, num_groups, has_state=True)
    search = SnapshotSearch(tree, root, pack(token_ids), layouts, snapshots)
    return list(search.ends(len(token_ids)))[::-1]


def in_ram(prefix: CachedPrefix, groups: Sequence[Group]) -> bool:
    """Whether the prefix can be used without reading a file."""
    if prefix.snapshot is not None and prefix.snapshot.state is None:
        return False
    return all(index in node.block_ids for index, node in _needed(prefix, groups))


def _needed(prefix: CachedPrefix, groups: Sequence[Group]) -> Iterable[tuple[int, Node]]:
    for lane in prefix.lanes:
        for index in lane.groups:
            for node in lane.all_nodes[groups[index].first_block_needed(lane.num_tokens) :]:
                yield index, node


def _has(groups: frozenset[int], node: Node) -> bool:
    return node.all_available(groups)

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.origin_paths import BlockKind, PathLayout, lay_out
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.siblings import BYTES_PER_TOKEN, Nearest, pack
from agentcache.blocks.slots import Group
from agentcache.blocks.snapshots import Snapshots

MIN_TAIL_TOKENS = 16  # fewer are cheaper to compute than to copy


@dataclass(frozen=True)
class PathPrefix:
    """Cached prefix of one origin path.

    Args:
        nodes: full blocks, used completely.
        tail: next node, used for its first `tail_tokens` tokens.
        read_from: first token computed with the prefix, if before its end.
    """

    layout: PathLayout
    nodes: tuple[Node, ...]
    tail: Node | None = None
    tail_tokens: int = 0
    read_from: int | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        return self.layout.groups

    @property
    def num_tokens(self) -> int:
        return len(self.nodes) * BLOCK_SIZE + self.tail_tokens

    def first_block_read(self, group: Group) -> int:
        num_tokens = self.num_tokens
        if self.read_from is not None and self.read_from < num_tokens:
            num_tokens = self.read_from
        return group.first_block_needed(num_tokens)

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        return self.nodes if self.tail is None else (*self.nodes, self.tail)

    @property
    def ends_with_a_block(self) -> bool:
        return self.tail is None or self.tail_tokens == self.tail.num_tokens


@dataclass(frozen=True)
class CachedPrefix:
    """Cached prefix, equally long on all origin paths. Valid until the cache changes.

    With `trunk_match`, base's path is longer, by whole blocks.

    Args:
        snapshot: node at its end with a checkpoint of recurrent state; None at position 0, or without such state.
        known_tokens: tokens with cached KV, even without a checkpoint after them; for recurrent models only.
    """

    producer: KVOrigin | None
    lanes: tuple[PathPrefix, ...]
    snapshot: Node | None = None
    known_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return min(lane.num_tokens for lane in self.lanes)

    def lane(self, group: int) -> PathPrefix:
        return next(lane for lane in self.lanes if group in lane.groups)


def match_prefix(
    tree: RadixTree,
    groups: Sequence[Group],
    root: str,
    token_ids: Sequence[int],
    limit: int,
    producer: KVOrigin | None,
    snapshots: Snapshots | None = None,
    read_from: int | None = None,
) -> CachedPrefix:
    """Return the longest prefix of at most `limit` tokens that every origin path has in RAM or on disk.

    Args:
        snapshots: checkpoints of a recurrent model; the prefix ends at one.
        read_from: first token computed with the prefix, if before its end.
    """
    packed = pack(token_ids[:limit])
    layouts = lay_out(producer, len(groups), has_state=snapshots is not None)
    # Recurrent models start at few positions: any tail is worth a copy.
    least = MIN_TAIL_TOKENS if snapshots is None else 1
    searches = [PathSearch(tree, groups, root, packed, layout, least, read_from) for layout in layouts]
    ends = None if snapshots is None else SnapshotSearch(tree, root, packed, layouts, snapshots)
    known = None if groups else min(limit, len(token_ids))
    while True:
        lanes = tuple(search.longest(limit) for search in searches)
        shortest = min(lane.num_tokens for lane in lanes)
        is_even = all(lane.num_tokens == shortest for lane in lanes)
        if ends is None:
            if is_even:
                return CachedPrefix(producer, lanes)
            # Cut, a path may lack older blocks of a window, or have too short a tail.
            limit = shortest
            continue
        known = shortest if known is None else known
        node = ends.longest(shortest)
        limit = 0 if node is None else node.end
        if is_even and limit == shortest:
            return CachedPrefix(producer, lanes, node, known)


class PathSearch:
    """Longest cached prefix on one origin path. Valid until the tree changes.

    Args:
        least: minimum tokens of a partly used block.
    """

    def __init__(
        self,
        tree: RadixTree,
        groups: Sequence[Group],
        root: str,
        packed: bytes,
        layout: PathLayout,
        least: int = MIN_TAIL_TOKENS,
        read_from: int | None = None,
    ) -> None:
        self._read_from = read_from
        self._root = tree.peek(root)
        self._least = least
        self._packed = packed
        self._layout = layout
        self._all = frozenset(layout.groups)
        self._windows = {index: groups[index] for index in layout.groups if groups[index].window is not None}
        # All later tokens read a full-attention group.
        unbounded = self._all - self._windows.keys()
        usable = partial(_has, unbounded)
        self._nodes = tree.match_prefix(root, packed, usable, layout.origin_of)

    def longest(self, limit: int) -> PathPrefix:
        count = min(len(self._nodes), limit // BLOCK_SIZE)
        while True:
            with_tail = self._with_tail(count, limit)
            if with_tail is not None and self._missing(with_tail) is None:
                return with_tail
            prefix = PathPrefix(self._layout, tuple(self._nodes[:count]), read_from=self._read_from)
            missing = self._missing(prefix)
            if missing is None:
                return prefix
            count = missing  # later blocks need it; a sibling may be the tail

    def _missing(self, prefix: PathPrefix) -> int | None:
        missing = (
            position
            for index, group in self._windows.items()
            for position in range(prefix.first_block_read(group), len(prefix.nodes))
            if not prefix.nodes[position].available(index)
        )
        return max(missing, default=None)

    def _with_tail(self, count: int, limit: int) -> PathPrefix | None:
        nearest = [self._nearest(count, limit, kind) for kind in self._layout.usable_kinds(count)]
        most = max(found.num_tokens for found in nearest)
        tails = [node for found in nearest if found.num_tokens == most for node in found.items]
        if not tails:
            return None
        tail = min(tails, key=self._loads_needed)
        return PathPrefix(self._layout, tuple(self._nodes[:count]), tail, most, self._read_from)

    def _nearest(self, count: int, limit: int, kind: BlockKind) -> Nearest[Node]:
        """Nodes that share at least `least` tokens; else a shorter tail that is used completely.

        Fewer tokens are usually template text; a whole tail ends some agent's context.
        """
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
    """Checkpoints along a prompt. Valid until the tree changes."""

    def __init__(
        self, tree: RadixTree, root: str, packed: bytes, layouts: Iterable[PathLayout], snapshots: Snapshots
    ) -> None:
        layout = next(each for each in layouts if each.has_state)
        # Nodes without data count: KV may be on another path, or in a longer block.
        self._path = [
            tree.peek(root),
            *tree.match_prefix(root, packed, lambda node: True, layout.origin_of),
        ]
        self._packed = packed
        self._snapshots = snapshots
        self._layout = layout

    def longest(self, limit: int) -> Node | None:
        return next(self.ends(limit), None)

    def ends(self, limit: int) -> Iterator[Node]:
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
        return fits and tail.producer == self._layout.origin_of(tail.end)


def find_snapshots(
    tree: RadixTree,
    num_groups: int,
    root: str,
    token_ids: Sequence[int],
    producer: KVOrigin | None,
    snapshots: Snapshots,
) -> list[Node]:
    layouts = lay_out(producer, num_groups, has_state=True)
    search = SnapshotSearch(tree, root, pack(token_ids), layouts, snapshots)
    return list(search.ends(len(token_ids)))[::-1]


def in_ram(prefix: CachedPrefix, groups: Sequence[Group]) -> bool:
    if prefix.snapshot is not None and prefix.snapshot.state is None:
        return False
    return all(index in node.block_ids for index, node in _needed(prefix, groups))


def _needed(prefix: CachedPrefix, groups: Sequence[Group]) -> Iterable[tuple[int, Node]]:
    for lane in prefix.lanes:
        for index in lane.groups:
            for node in lane.all_nodes[lane.first_block_read(groups[index]) :]:
                yield index, node


def _has(groups: frozenset[int], node: Node) -> bool:
    return node.all_available(groups)

"""Search for a prompt's longest cached prefix.

A finder returns an upper bound, at most `limit`, on the tokens that one kind of cached data can serve. `limit` itself
is exact. Finders and answers are valid until a cache changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from agentcache.blocks.hidden_states import HiddenStateCache, HiddenStateKey
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.origin_paths import PathLayout, lay_out, state_layout
from agentcache.blocks.pool import Group, Holds, full_partner, holds_of, window_group
from agentcache.blocks.radix_tree import BYTES_PER_TOKEN, Nearest, Node, RadixTree, pack
from agentcache.blocks.snapshots import Snapshots, whole_blocks
from agentcache.errors import BrokenInvariant

MIN_TAIL_TOKENS = 16  # fewer are cheaper to compute than to copy

Finder = Callable[[int], int]


def longest_common(limit: int, first: Finder, *others: Finder) -> int:
    """Return the most tokens that all finders can serve. Answers of `first` are exact."""
    while True:
        answers = [limit]
        for find in (first, *others):
            answers.append(find(answers[-1]))
        if answers != sorted(answers, reverse=True):
            raise BrokenInvariant(f"a finder answers with more tokens than asked for: {answers}")
        limit = answers[-1]
        if limit == answers[1]:
            return limit


@dataclass(frozen=True)
class CachedPath:
    """Cached prefix of one origin path: full blocks, then `tail_tokens` tokens of `tail`, maybe of a full block.

    `read_from`: first token computed with it, if before its end.
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

    def nodes_read(self, index: int, groups: Sequence[Group]) -> tuple[Node, ...]:
        """Full blocks with slots in group `index`."""
        first = _first_block_read(window_group(groups, index), self.num_tokens, self.read_from)
        return self.nodes[groups[index].holds.of_full_blocks(first)]

    def tail_source(self, index: int) -> int | None:
        """Group that has the tail's data for group `index`; None without a tail, or if it holds none."""
        holds = self.layout.holds_in(index)
        if self.tail is None or not holds.has(is_sealed=False):
            return None
        return full_partner(index) if self.reopens(index) else index

    def reopens(self, index: int) -> bool:
        """Whether group `index` gets the tail from a sealed block of its partner."""
        return self.layout.holds_in(index) is Holds.OPEN and self.tail is not None and self.tail.is_sealed

    def is_in_ram(self, index: int, groups: Sequence[Group]) -> bool:
        source = self.tail_source(index)
        if self.tail is not None and source is not None and source not in self.tail.block_ids:
            return False
        return all(index in node.block_ids for node in self.nodes_read(index, groups))

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        return self.nodes if self.tail is None else (*self.nodes, self.tail)

    @property
    def ends_with_a_block(self) -> bool:
        return self.tail is None or self.tail_tokens == self.tail.num_tokens


@dataclass(frozen=True)
class CachedHiddenStates:
    """Hidden states of blocks, from block number `first` on."""

    first: int
    names: tuple[HiddenStateKey, ...]

    @property
    def cut(self) -> int:
        return self.names[0].cut

    @property
    def end(self) -> int:
        return (self.first + len(self.names)) * BLOCK_SIZE


@dataclass(frozen=True)
class Cached:
    """A cached prefix, equally long on all origin paths.

    Args:
        snapshot: node at its end, with a checkpoint.
        known_tokens: those with cached KV, even without checkpoint or base's KV; 0 if unknown.
        hidden_states: after the prefix; base's path extends to their end.
        residuals: residual KV, at most as long; base is read from its end on.
    """

    producer: KVOrigin | None
    paths: tuple[CachedPath, ...]
    snapshot: Node | None = None
    known_tokens: int = 0
    hidden_states: CachedHiddenStates | None = None
    residuals: Cached | None = None

    @property
    def num_tokens(self) -> int:
        return min(path.num_tokens for path in self.paths)

    def path(self, group: int) -> CachedPath:
        return next(path for path in self.paths if group in path.groups)

    @property
    def own(self) -> Cached:
        """The prefix that the request continues."""
        return self.residuals or self


class PathFinder:
    """Cached blocks on one origin path. `least`: minimum tokens of a partly used block."""

    def __init__(
        self, tree: RadixTree, groups: Sequence[Group], root: str, packed: bytes, layout: PathLayout, least: int
    ) -> None:
        self._root = tree.peek(root)
        self._packed = packed
        self._layout = layout
        self._least = least
        self._groups = groups
        self._sealed, self._open = frozenset(layout.sealed_groups), frozenset(layout.open_groups)
        self._windows = [index for index in layout.groups if window_group(groups, index).window is not None]
        self._nodes = tree.match_prefix(root, packed, self._unwindowed(), layout.origin_of)

    def _unwindowed(self) -> Callable[[Node], bool]:
        """Whether a full block is there in groups of full attention, where later tokens read all blocks."""
        sealed, others = self._sealed.difference(self._windows), self._open.difference(self._windows)
        return lambda node: node.all_available(sealed if node.is_sealed else others)

    def longest(self, limit: int, read_from: int | None = None) -> int:
        """Longest prefix in tokens; `read_from` as in `CachedPath`."""
        windows = (partial(self._in_window, index, read_from) for index in self._windows)
        return longest_common(limit, self._in_blocks, *windows)

    def _in_blocks(self, limit: int) -> int:
        count = min(len(self._nodes), limit // BLOCK_SIZE)
        return count * BLOCK_SIZE + self._tails(count, limit).num_tokens

    def _in_window(self, index: int, read_from: int | None, limit: int) -> int:
        first = _first_block_read(window_group(self._groups, index), limit, read_from)
        full = range(min(len(self._nodes), limit // BLOCK_SIZE))
        blocks = reversed(full[self._groups[index].holds.of_full_blocks(first)])
        missing = next((at for at in blocks if not self._nodes[at].available(index)), None)
        # A sibling may have the missing block's first tokens.
        return limit if missing is None else (missing + 1) * BLOCK_SIZE - 1

    def _tails(self, count: int, limit: int) -> Nearest[Node]:
        nearest = [
            self._nearest(count, min(limit, kind.end), kind.producer) for kind in self._layout.usable_kinds(count)
        ]
        most = max(found.num_tokens for found in nearest)
        return Nearest([node for found in nearest if found.num_tokens == most for node in found.items], most)

    def _nearest(self, count: int, end: int, producer: str) -> Nearest[Node]:
        parent = self._nodes[count - 1] if count else self._root
        rest = self._packed[count * BLOCK_SIZE * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN]
        nearest = parent.nearest(rest, self._is_usable, least=self._least, producer=producer)
        if nearest.items:
            return nearest
        # A shorter tail counts if it is whole: the end of some agent's context.
        short = min(self._least - 1, len(rest) // BYTES_PER_TOKEN)
        for num_tokens in range(short, 0, -1):
            tail = parent.child(rest[: num_tokens * BYTES_PER_TOKEN], producer)
            if tail is not None and self._is_usable(tail):
                return Nearest([tail], num_tokens)
        return nearest

    def _is_usable(self, node: Node) -> bool:
        """Whether the node's first tokens can be read: of a sealed one, open groups get them from their partners."""
        return node.all_available(self._groups_of(node))

    def _groups_of(self, node: Node) -> frozenset[int]:
        return self._sealed if node.is_sealed else self._open

    def path(self, num_tokens: int, read_from: int | None = None) -> CachedPath:
        """Return the blocks of an answer of `longest`."""
        count, tail_tokens = divmod(num_tokens, BLOCK_SIZE)
        tails = self._tails(count, num_tokens).items
        tail = min(tails, key=self._cost, default=None)
        return CachedPath(self._layout, tuple(self._nodes[:count]), tail, tail_tokens, read_from)

    def _cost(self, tail: Node) -> tuple[int, bool]:
        """Files to read; whether groups are reopened."""
        missing = self._groups_of(tail) - tail.block_ids.keys()
        return len(missing), tail.is_sealed and self._sealed != self._open

    def nodes_after(self, num_tokens: int, *, durable: bool) -> Iterator[Node]:
        """Full blocks after `num_tokens`; if `durable`, up to the first without a window's block."""
        nodes = iter(self._nodes[num_tokens // BLOCK_SIZE :])
        return takewhile(self._is_usable, nodes) if durable else nodes


class CheckpointFinder:
    def __init__(self, tree: RadixTree, root: str, packed: bytes, layout: PathLayout, snapshots: Snapshots) -> None:
        # Their KV may be on another path, or in a longer block.
        self._path = [tree.peek(root), *tree.match_prefix(root, packed, lambda node: True, layout.origin_of)]
        self._packed = packed
        self._snapshots = snapshots
        self._layout = layout

    def longest(self, limit: int) -> int:
        node = self.last(limit)
        return 0 if node is None else node.end

    def last(self, limit: int) -> Node | None:
        return next(self.ends(limit), None)

    def ends(self, limit: int) -> Iterator[Node]:
        """Nodes with a checkpoint, last first."""
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


class PrefixFinder:
    """Cached prefixes of one prompt in one cache."""

    def __init__(
        self,
        tree: RadixTree,
        groups: Sequence[Group],
        root: str,
        token_ids: Sequence[int],
        producer: KVOrigin | None,
        snapshots: Snapshots | None = None,
    ) -> None:
        packed = pack(token_ids)
        layouts = lay_out(producer, len(groups), has_state=snapshots is not None, holds=holds_of(groups))
        # Recurrent models can start at few tokens: any tail is worth a copy.
        least = MIN_TAIL_TOKENS if snapshots is None else 1
        self._num_tokens = len(token_ids)
        self._has_kv = bool(groups)
        self._producer = producer
        self.paths = [PathFinder(tree, groups, root, packed, layout, least) for layout in layouts]
        self._checkpoints = None
        if snapshots is not None:
            self._checkpoints = CheckpointFinder(tree, root, packed, state_layout(producer, len(groups)), snapshots)

    def match(self, limit: int) -> Cached:
        known = limit = min(limit, self._num_tokens)
        if self._checkpoints is None:
            return self.cached(self.longest(limit))
        if self._has_kv:
            known = min(path.longest(limit) for path in self.paths)
        return self.cached(self.longest(known), known_tokens=known)

    def longest(self, limit: int, read_from: int | None = None) -> int:
        ends = () if self._checkpoints is None else (self._checkpoints.longest,)
        return longest_common(limit, *ends, *(partial(path.longest, read_from=read_from) for path in self.paths))

    def cached(self, num_tokens: int, read_from: int | None = None, known_tokens: int = 0) -> Cached:
        paths = tuple(path.path(num_tokens, read_from) for path in self.paths)
        snapshot = None if self._checkpoints is None else self._checkpoints.last(num_tokens)
        return Cached(self._producer, paths, snapshot, known_tokens)


def match_residual_kv(base: PrefixFinder, residuals: PrefixFinder, limit: int) -> Cached:
    """Return the longest prefixes that an adapter can continue, reading base after its residuals."""
    found = residuals.longest(limit)
    end = longest_common(found, residuals.longest, lambda start: min(start, base.longest(limit, start)))
    below = base.cached(base.longest(limit, end), end)
    return replace(below, residuals=residuals.cached(end, known_tokens=found))


def match_hidden_states(
    cached: Cached, finder: PrefixFinder, limit: int, states: HiddenStateCache, cut: int, *, durable: bool = False
) -> Cached:
    """Extend `cached`, found by `finder`, by hidden states. `durable`: an agent keeps blocks even before a window."""
    base, start = finder.paths[0], whole_blocks(cached.num_tokens)
    ahead = base.nodes_after(start, durable=durable)
    count = states.match(HiddenStateKey(node.chain, cut) for node in ahead)
    longer = base.path(longest_common(min(limit, start + count * BLOCK_SIZE), base.longest, whole_blocks))
    first = start // BLOCK_SIZE
    names = tuple(HiddenStateKey(node.chain, cut) for node in longer.nodes[first:])
    if not names:
        return cached
    return replace(cached, paths=(longer, *cached.paths[1:]), hidden_states=CachedHiddenStates(first, names))


def _first_block_read(group: Group, num_tokens: int, read_from: int | None) -> int:
    return group.first_block_needed(num_tokens if read_from is None else min(num_tokens, read_from))

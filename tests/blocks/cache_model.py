"""What every slot and file of a prefix cache really holds, and what may be taken from it: the rules, by brute force.

Instead of keys and values a slot holds, for each of its 256 places, the number of the prefix that was computed there
and of who computed it: two places are equal only if all tokens up to them are, and were computed by the same. So
whatever is overwritten, mixed up, read too late or shared with whom it must not be shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentcache.blocks.keys import BASE_ORIGIN, BLOCK_SIZE, KVOrigin
from agentcache.blocks.pool import BlockPool, Group, Holds
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import MIN_TAIL_TOKENS

Places = tuple[int, ...]
Groups = tuple["FakeGroup", ...]


@dataclass(frozen=True)
class FakeGroup:
    name: str
    window: int | None
    bytes_per_block: int
    holds: Holds = Holds.ALL

    def first_block_needed(self, num_tokens: int) -> int:
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // BLOCK_SIZE


def pair(name: str, window: int | None = None, full_bytes: int = 1, open_bytes: int = 1) -> Groups:
    """Groups of the full and the open blocks of the same layers."""
    return (
        FakeGroup(f"{name}.sealed", window, full_bytes, Holds.FULL),
        FakeGroup(f"{name}.open", 1, open_bytes, Holds.OPEN),
    )


def groups_of(groups: Groups, begin: int, end: int) -> list[int]:
    """Groups that hold the block of tokens `begin … end-1`: the first one stays open when it is full."""
    other = Holds.OPEN if begin > 0 and end - begin == BLOCK_SIZE else Holds.FULL
    return [index for index, group in enumerate(groups) if group.holds != other]


def first_needed(groups: Sequence[Group], index: int, num_tokens: int) -> int:
    """First block that the token at position `num_tokens` reads in any form, by the layers of a group."""
    return groups[index - (groups[index].holds is Holds.OPEN)].first_block_needed(num_tokens)


def needed_slots(groups: Sequence[Group], index: int, num_tokens: int) -> list[int]:
    """Blocks before the token at position `num_tokens` that it reads from a group: by the rule, one by one."""
    own, kept = num_tokens // BLOCK_SIZE, range(first_needed(groups, index, num_tokens), -(-num_tokens // BLOCK_SIZE))
    in_open = [position for position in kept if position in (0, own)]
    by_group = {Holds.ALL: list(kept), Holds.OPEN: in_open, Holds.FULL: [at for at in kept if at not in in_open]}
    return by_group[groups[index].holds]


def last_layers(groups: Sequence[Group]) -> int:
    """First group of the last layers."""
    return len(groups) - (2 if groups and groups[-1].holds is Holds.OPEN else 1)


@dataclass
class Arena:
    """Contents of all slots, and the numbers of prefixes.

    Args:
        pools: one a group; blocks that these have moved are moved before a slot is looked at.
    """

    pools: Sequence[BlockPool] = ()
    slots: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _numbers: dict[tuple[str | int, int, str], int] = field(default_factory=dict)
    _of_chain: dict[str, Places] = field(default_factory=dict)

    def slot(self, group: int, block_id: int) -> list[int]:
        self.follow_moves()
        return self.slots.setdefault((group, block_id), [-1] * BLOCK_SIZE)

    def follow_moves(self) -> None:
        for group, pool in enumerate(self.pools):
            for source, target in pool.take_moves():
                self.slots[group, target] = self.slots.pop((group, source), [-1] * BLOCK_SIZE)

    def numbers(self, root: str, token_ids: Sequence[int], producer: str = BASE_ORIGIN) -> Places:
        """The number of each prefix of `token_ids`, as a producer with this text has computed it."""
        start = len(token_ids) if producer == BASE_ORIGIN else int(producer.partition("@")[2])
        last: str | int = root
        result = []
        for position, token in enumerate(token_ids):
            who = producer if position >= start else BASE_ORIGIN
            last = self._numbers.setdefault((last, token, who), len(self._numbers))
            result.append(last)
        return tuple(result)

    def of_node(self, node: Node) -> Places:
        """What a slot of the node has to hold."""
        if node.chain not in self._of_chain:
            root, tokens = path_of(node)
            self._of_chain[node.chain] = self.numbers(root, tokens, node.producer)[node.position * BLOCK_SIZE :]
        return self._of_chain[node.chain]


def text_in(producer: KVOrigin | None, group: int) -> str:
    """Who computes a group's keys and values, in the end."""
    return producer.text if producer is not None and group in producer.groups else BASE_ORIGIN


def path_of(node: Node) -> tuple[str, list[int]]:
    """Root and all tokens of the node's path."""
    pieces: list[Sequence[int]] = []
    while node.parent is not None:
        pieces.append(node.token_ids)
        node = node.parent
    return node.chain, [token for piece in reversed(pieces) for token in piece]


class Reference:
    """The rules of reuse over all nodes of a tree, without any of its order.

    Args:
        files: chain key and group of each block on disk.
        has_state: whether a prefix has to end where there is a snapshot of recurrent state.
        least: tokens of a block that are worth a copy.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        groups: Groups,
        files: Iterable[tuple[str, int]],
        *,
        has_state: bool = False,
        least: int | None = None,
    ) -> None:
        self._groups = groups
        self._has_state = has_state
        self._least = least or (1 if has_state else MIN_TAIL_TOKENS)
        self._files = frozenset(files)
        self._children: dict[str, list[Node]] = {}
        for node in nodes:
            assert node.parent is not None
            self._children.setdefault(node.parent.chain, []).append(node)

    def longest(self, root: str, tokens: list[int], producer: KVOrigin | None) -> int:
        """Number of leading tokens that need not be computed."""
        lengths = {0, *self.ends(root, tokens)} | ({producer.start} if producer else set())
        return next(n for n in sorted(lengths, reverse=True) if self.can_use(root, tokens, n, producer))

    def ends(self, chain: str, tokens: list[int], position: int = 0) -> Iterator[int]:
        """Where a node stops to share tokens: no usable prefix ends elsewhere, but at the producer's start."""
        rest = tokens[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
        for node in self._children.get(chain, []):
            shared = common(node.token_ids, rest)
            yield position * BLOCK_SIZE + shared
            if shared == BLOCK_SIZE:
                yield from self.ends(node.chain, tokens, position + 1)

    def can_use(
        self,
        root: str,
        tokens: list[int],
        length: int,
        producer: KVOrigin | None = None,
        *,
        read_from: int | None = None,
    ) -> bool:
        """Whether `length` tokens need not be computed, if windows are read from `read_from` on."""
        count = len(self._groups)
        own = frozenset() if producer is None else producer.groups & frozenset(range(count))
        base, first = frozenset(range(count)) - own, length if read_from is None else min(length, read_from)
        if length > len(tokens) or self._has_state and not self._has_snapshot(root, tokens[:length], producer):
            return False
        return all(
            not groups or any(self.has(path, groups, first, length) for path in self.paths(root, tokens[:length], who))
            for groups, who in ((base, None), (own, producer))
        )

    def _has_snapshot(self, root: str, tokens: list[int], producer: KVOrigin | None) -> bool:
        index = len(self._groups)
        who = producer if producer is not None and index in producer.groups else None
        if not tokens:
            return True
        # A path of full blocks of exactly these tokens, and a node behind them that ends where they do.
        ends = (path[-1] for path in self.paths(root, tokens, who) if path[-1].end == len(tokens))
        return any(node.state is not None or index in node.stored for node in ends)

    def paths(
        self, chain: str, tokens: list[int], producer: KVOrigin | None, position: int = 0
    ) -> Iterator[list[Node]]:
        """All ways to cover the tokens with nodes that hold what this producer would compute."""
        rest = tokens[position * BLOCK_SIZE :]
        if not rest:
            yield []
        for node in self._children.get(chain, []) if rest else []:
            shared, end = common(node.token_ids, rest), min(node.end, len(tokens))
            if not self._fits(node, end, producer):
                continue
            if shared == len(rest) and shared >= min(self._least, node.num_tokens):
                yield [node]
            elif shared == BLOCK_SIZE:
                yield from ([node, *path] for path in self.paths(node.chain, tokens, producer, position + 1))

    @staticmethod
    def _fits(node: Node, end: int, producer: KVOrigin | None) -> bool:
        """Whether the node's tokens in front of `end` are what the producer would compute: base's, or its own."""
        if node.producer == BASE_ORIGIN:
            return producer is None or end <= producer.start
        return producer is not None and node.producer == producer.text

    def has(self, path: list[Node], groups: frozenset[int], first: int, length: int | None = None) -> bool:
        """Whether all groups are there for tokens from `first` on, behind `length` in all."""
        length = first if length is None else length
        return all(
            source in node.block_ids or (node.chain, source) in self._files and source in node.stored
            for index in groups
            for node, source in self.needed(path, index, first, length)
        )

    def needed(self, path: list[Node], index: int, first: int, length: int) -> list[tuple[Node, int]]:
        """Nodes that a group reads, each with its source group: the full partner of a reopened block."""
        group, count = self._groups[index], length // BLOCK_SIZE
        read = path[first_needed(self._groups, index, first) :]
        if group.holds is Holds.ALL:
            return [(node, index) for node in read]
        if group.holds is Holds.FULL:
            return [(node, index) for node in read if 0 < node.position < count]
        in_open = [node for node in path if node.position >= count or (node.position == 0 and node in read)]
        return [(node, index - 1 if node.is_full and node.position else index) for node in in_open]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))

"""Radix tree of token blocks: the prefixes cached in RAM or on disk."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentcache.blocks.keys import BASE_ORIGIN, BLOCK_SIZE, chain_key, is_sealed
from agentcache.errors import BrokenInvariant

BYTES_PER_TOKEN = 4
_NEIGHBOURS = 8  # candidates with equal prefixes

T = TypeVar("T")


def pack(token_ids: Sequence[int]) -> bytes:
    """Encode as big-endian uint32: bytes sort like tokens."""
    packed = array("I", token_ids)
    packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> array[int]:
    token_ids = array("I", packed)
    token_ids.byteswap()
    return token_ids


class Node:
    """One block of one KV origin: 256 tokens, or fewer for a tail, which is a leaf.

    Attributes:
        chain: content address of all groups.
        position: block number; -1 for a root.
        block_ids: RAM slot by group.
        stored, pending: groups whose file is on disk, or being written.
        readers: number of running requests' origin paths.
        state: RAM slot of the checkpoint at its end.
    """

    __slots__ = (
        "_families",
        "block_ids",
        "chain",
        "packed",
        "parent",
        "pending",
        "position",
        "producer",
        "readers",
        "resident_children",
        "state",
        "stored",
    )

    def __init__(self, parent: Node | None, packed: bytes, chain: str, producer: str = BASE_ORIGIN) -> None:
        self.parent = parent
        self.packed = packed
        self.chain = chain
        self.producer = producer
        self.position: int = -1 if parent is None else parent.position + 1
        self.block_ids: dict[int, int] = {}
        self.stored: set[int] = set()
        self.pending: set[int] = set()
        self.readers = 0
        self.state: int | None = None
        self.resident_children = 0
        self._families: dict[str, Siblings[Node]] = {}

    def __repr__(self) -> str:
        what = f"{self.chain[:8]}, position={self.position}, tokens={self.num_tokens}, producer={self.producer[:8]}"
        return f"Node({what}, ram={self.block_ids})"

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // BYTES_PER_TOKEN

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(unpack(self.packed))

    @property
    def is_full(self) -> bool:
        return self.num_tokens == BLOCK_SIZE

    @property
    def is_sealed(self) -> bool:
        return is_sealed(self.position, self.num_tokens)

    @property
    def end(self) -> int:
        return self.position * BLOCK_SIZE + self.num_tokens

    @property
    def children(self) -> Iterator[Node]:
        for family in self._families.values():
            yield from family

    @property
    def is_leaf(self) -> bool:
        return not self._families

    def available(self, group: int) -> bool:
        return group in self.block_ids or group in self.stored

    def all_available(self, groups: frozenset[int]) -> bool:
        return groups <= self.block_ids.keys() or groups <= self.stored or all(map(self.available, groups))

    def child(self, packed: bytes, producer: str = BASE_ORIGIN) -> Node | None:
        family = self._families.get(producer)
        return None if family is None else family.get(packed)

    def nearest(
        self, packed: bytes, usable: Callable[[Node], bool], *, least: int = 1, producer: str = BASE_ORIGIN
    ) -> Nearest[Node]:
        family = self._families.get(producer)
        return Nearest([], 0) if family is None else family.nearest(packed, usable, least)

    def _attach(self, node: Node) -> None:
        self._families.setdefault(node.producer, Siblings()).add(node.packed, node)

    def _detach(self, node: Node) -> None:
        family = self._families[node.producer]
        family.remove(node.packed)
        if not family:
            del self._families[node.producer]


class RadixTree:
    """Nodes by content; one root per namespace."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._residents: OrderedDict[Node, None] = OrderedDict()
        self._by_chain: dict[str, Node] = {}

    def root(self, chain: str) -> Node:
        if chain not in self._roots:
            self._roots[chain] = Node(None, b"", chain)
        return self._roots[chain]

    def peek(self, chain: str) -> Node:
        """Return a root without adding it."""
        return self._roots.get(chain) or Node(None, b"", chain)

    def match_prefix(
        self, root: str, packed: bytes, usable: Callable[[Node], bool], origin_of: Callable[[int], str]
    ) -> list[Node]:
        """Return the longest path of usable full blocks. `origin_of`: KV origin by block end."""
        node, nodes = self.peek(root), []
        width = BLOCK_SIZE * BYTES_PER_TOKEN
        for start in range(0, len(packed) - width + 1, width):
            following = node.child(packed[start : start + width], origin_of((start + width) // BYTES_PER_TOKEN))
            if following is None or not usable(following):
                break
            nodes.append(following)
            node = following
        return nodes

    def insert(self, parent: Node, token_ids: Sequence[int], producer: str = BASE_ORIGIN) -> Node:
        """Return the child with these tokens, created if missing."""
        if parent.position >= 0 and not parent.is_full:
            raise BrokenInvariant("a tail has no children")
        if parent.producer not in (BASE_ORIGIN, producer):
            raise BrokenInvariant(f"{producer} cannot continue {parent!r}")
        packed = pack(token_ids)
        node = parent.child(packed, producer)
        if node is None:
            node = Node(parent, packed, chain_key(parent.chain, token_ids, producer), producer)
            parent._attach(node)
            self._by_chain[node.chain] = node
        return node

    def node(self, chain: str) -> Node | None:
        return self._by_chain.get(chain)

    def remove(self, node: Node) -> None:
        """Remove a leaf and its ancestors, as far as unused."""
        if not node.is_leaf or node.block_ids:
            raise BrokenInvariant(f"{node!r} is in use and cannot be removed")
        if node.parent is not None and node.parent.child(node.packed, node.producer) is not node:
            return  # already removed
        while node.parent is not None and self._is_useless(node):
            parent = node.parent
            parent._detach(node)
            del self._by_chain[node.chain]
            node = parent
        if node.parent is None and node.is_leaf:
            self._roots.pop(node.chain, None)

    @staticmethod
    def _is_useless(node: Node) -> bool:
        if node.block_ids or node.stored or node.pending or node.readers or node.state is not None:
            return False
        return node.is_leaf

    def path(self, node: Node) -> list[Node]:
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def set_block(self, node: Node, group: int, block_id: int) -> None:
        if not node.block_ids:
            self._residents[node] = None
            if node.parent is not None:
                node.parent.resident_children += 1
        node.block_ids[group] = block_id

    def take_block(self, node: Node, group: int) -> int:
        block_id = node.block_ids.pop(group)
        if not node.block_ids:
            del self._residents[node]
            if node.parent is not None:
                node.parent.resident_children -= 1
        return block_id

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark as just used, the last node as the oldest: leaves are evicted first."""
        for node in reversed(nodes):
            if node in self._residents:
                self._residents.move_to_end(node)

    def expire(self, node: Node) -> None:
        if node in self._residents:
            self._residents.move_to_end(node, last=False)

    @property
    def residents(self) -> Iterator[Node]:
        """Nodes with slots, least recently used first."""
        return iter(self._residents)

    def walk(self) -> Iterator[Node]:
        """All nodes but roots, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children)
            if node.parent is not None:
                yield node

    def check_integrity(self) -> None:
        residents = set()
        for node in self.walk():
            parent = node.parent
            if parent is None or parent.child(node.packed, node.producer) is not node:
                raise BrokenInvariant(f"{node!r} is not its parent's child")
            if parent.producer not in (BASE_ORIGIN, node.producer):
                raise BrokenInvariant(f"{node!r} continues another KV origin")
            if not all(family.is_sorted for family in node._families.values()):
                raise BrokenInvariant(f"children of {node!r} are out of order")
            if node.chain != chain_key(parent.chain, node.token_ids, node.producer):
                raise BrokenInvariant(f"{node!r} has a wrong address")
            if node.resident_children != sum(1 for child in node.children if child.block_ids):
                raise BrokenInvariant(f"{node!r} miscounts its resident children")
            if not node.is_full and not node.is_leaf:
                raise BrokenInvariant(f"tail {node!r} has children")
            if node.block_ids:
                residents.add(node)
            if self._by_chain.get(node.chain) is not node:
                raise BrokenInvariant(f"{node!r} is not found by its address")
        if residents != set(self._residents):
            raise BrokenInvariant("the list of residents is wrong")


@dataclass(frozen=True)
class Nearest(Generic[T]):
    """Items that share `num_tokens` tokens."""

    items: list[T]
    num_tokens: int


class Siblings(Generic[T]):
    __slots__ = ("_items", "_order")

    def __init__(self) -> None:
        self._items: dict[bytes, T] = {}
        self._order: list[bytes] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    @property
    def is_sorted(self) -> bool:
        return self._order == sorted(self._items)

    def get(self, packed: bytes) -> T | None:
        return self._items.get(packed)

    def add(self, packed: bytes, item: T) -> None:
        self._items[packed] = item
        insort(self._order, packed)

    def remove(self, packed: bytes) -> None:
        del self._items[packed]
        del self._order[bisect_left(self._order, packed)]

    def nearest(self, packed: bytes, usable: Callable[[T], bool], least: int) -> Nearest[T]:
        start = bisect_left(self._order, packed)
        best: list[T] = []
        for indices in (range(start, len(self._order)), range(start - 1, -1, -1)):
            taken = 0  # common prefixes only get shorter
            for index in indices:
                item = self._items[self._order[index]]
                if not usable(item):
                    continue
                shared = _common_tokens(self._order[index], packed)
                if shared < least or taken == _NEIGHBOURS:
                    break
                if shared > least:
                    best.clear()
                    least = shared
                best.append(item)
                taken += 1
        return Nearest(best, least if best else 0)


def _common_tokens(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right)) // BYTES_PER_TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * BYTES_PER_TOKEN, middle * BYTES_PER_TOKEN)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle - 1
    return low

"""A tree of token blocks over content addresses: which prefixes are cached, in RAM or on disk.

One node is one block: 256 tokens, or fewer for the last block of some agent's context (a tail, always a leaf). A node
holds one slot per cache group where its data is in RAM, and knows for which groups its file is on disk. The tree holds
no data and counts no references; `prefix_cache` does that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentcache.blocks.keys import BLOCK_SIZE, chain_key
from agentcache.errors import BrokenInvariant

_BYTES_PER_TOKEN = 4
_NEIGHBOURS = 8  # candidates looked at when several tails share the longest prefix


def _pack(token_ids: Sequence[int]) -> bytes:
    """Big-endian, so that bytes sort as token sequences do."""
    packed = array("I", token_ids)
    packed.byteswap()
    return packed.tobytes()


def _common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens two packed sequences share."""
    low, high = 0, min(len(left), len(right)) // _BYTES_PER_TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * _BYTES_PER_TOKEN, middle * _BYTES_PER_TOKEN)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle - 1
    return low


class Node:
    """One block of tokens after `parent`.

    Attributes:
        chain: its content address, group-independent.
        position: number of the block in its sequence; -1 for a root.
        block_ids: slot in RAM per group index.
        stored: group indices whose file is on disk.
        pending: group indices whose file is being written.
        readers: running sequences that go through it; it stays in the tree for them.
    """

    __slots__ = (
        "_children",
        "_order",
        "block_ids",
        "chain",
        "packed",
        "parent",
        "pending",
        "position",
        "readers",
        "resident_children",
        "stored",
    )

    def __init__(self, parent: Node | None, packed: bytes, chain: str) -> None:
        self.parent = parent
        self.packed = packed
        self.chain = chain
        self.position: int = -1 if parent is None else parent.position + 1
        self.block_ids: dict[int, int] = {}
        self.stored: set[int] = set()
        self.pending: set[int] = set()
        self.readers = 0
        self.resident_children = 0
        self._children: dict[bytes, Node] = {}
        self._order: list[bytes] = []

    def __repr__(self) -> str:
        return f"Node({self.chain[:8]}, position={self.position}, tokens={self.num_tokens}, ram={self.block_ids})"

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // _BYTES_PER_TOKEN

    @property
    def token_ids(self) -> tuple[int, ...]:
        packed = array("I", self.packed)
        packed.byteswap()
        return tuple(packed)

    @property
    def is_full(self) -> bool:
        return self.num_tokens == BLOCK_SIZE

    @property
    def end(self) -> int:
        """Number of tokens from the sequence's start to the end of this block."""
        return self.position * BLOCK_SIZE + self.num_tokens

    @property
    def children(self) -> Iterator[Node]:
        return iter(self._children.values())

    @property
    def is_leaf(self) -> bool:
        return not self._children

    def available(self, group: int) -> bool:
        """Whether the data of `group` can be had without computing."""
        return group in self.block_ids or group in self.stored

    def child(self, packed: bytes) -> Node | None:
        return self._children.get(packed)

    def nearest(self, packed: bytes) -> list[tuple[int, Node]]:
        """The children that share the longest prefix with `packed`, as (shared tokens, child); none share 0 tokens."""
        start = bisect_left(self._order, packed)
        best: list[tuple[int, Node]] = []
        for indices in (range(start, len(self._order)), range(start - 1, -1, -1)):
            for step, index in enumerate(indices):
                shared = _common_tokens(self._order[index], packed)
                if shared == 0 or step == _NEIGHBOURS or (best and shared < best[0][0]):
                    break
                if best and shared > best[0][0]:
                    best.clear()
                best.append((shared, self._children[self._order[index]]))
        return best

    def _attach(self, node: Node) -> None:
        self._children[node.packed] = node
        insort(self._order, node.packed)

    def _detach(self, node: Node) -> None:
        del self._children[node.packed]
        del self._order[bisect_left(self._order, node.packed)]


@dataclass(frozen=True)
class Path:
    """The longest known prefix of some tokens. Valid until the tree is next changed.

    Args:
        nodes: full blocks from the start.
        tails: further nodes that share `tail_tokens` tokens beyond the full blocks, any of which will do.
    """

    nodes: list[Node]
    tails: list[Node]
    tail_tokens: int


class RadixTree:
    """Nodes by content. Roots are namespaces; residents are kept in order of last use."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._residents: dict[Node, None] = {}
        self._by_chain: dict[str, Node] = {}

    def root(self, chain: str) -> Node:
        """The root of a namespace, made on first use."""
        if chain not in self._roots:
            self._roots[chain] = Node(None, b"", chain)
        return self._roots[chain]

    def match_prefix(self, root: str, token_ids: Sequence[int]) -> Path:
        """Longest prefix of `token_ids` that the tree knows. Changes nothing."""
        packed = _pack(token_ids)
        node, nodes = self._roots.get(root, Node(None, b"", root)), []
        width = BLOCK_SIZE * _BYTES_PER_TOKEN
        for start in range(0, len(packed), width):
            following = node.child(packed[start : start + width])
            if following is None or not following.is_full:
                break
            nodes.append(following)
            node = following
        rest = packed[len(nodes) * width : (len(nodes) + 1) * width]
        nearest = node.nearest(rest)
        return Path(nodes, [child for _, child in nearest], nearest[0][0] if nearest else 0)

    def insert(self, parent: Node, token_ids: Sequence[int]) -> Node:
        """The child of `parent` for these 1 … 256 tokens, made if it is not there."""
        if parent.position >= 0 and not parent.is_full:
            raise BrokenInvariant("a tail has no children")
        packed = _pack(token_ids)
        node = parent.child(packed)
        if node is None:
            node = Node(parent, packed, chain_key(parent.chain, token_ids))
            parent._attach(node)
            self._by_chain[node.chain] = node
        return node

    def node(self, chain: str) -> Node | None:
        """The node with this content address, if the tree has it."""
        return self._by_chain.get(chain)

    def find(self, parent: Node, token_ids: Sequence[int]) -> Node | None:
        """The child of `parent` for exactly these tokens, if the tree has it."""
        return parent.child(_pack(token_ids))

    def remove(self, node: Node) -> None:
        """Forget a leaf without data, and every ancestor (the root too) that was kept only for it."""
        if not node.is_leaf or node.block_ids:
            raise BrokenInvariant(f"{node!r} is in use and cannot be removed")
        if node.parent is not None and node.parent.child(node.packed) is not node:
            return  # forgotten before
        while node.parent is not None and self._is_useless(node):
            parent = node.parent
            parent._detach(node)
            del self._by_chain[node.chain]
            node = parent
        if node.parent is None and node.is_leaf:
            self._roots.pop(node.chain, None)

    @staticmethod
    def _is_useless(node: Node) -> bool:
        return node.is_leaf and not (node.block_ids or node.stored or node.pending or node.readers)

    def set_block(self, node: Node, group: int, block_id: int) -> None:
        """Record that `group`'s data of the node lies in slot `block_id`."""
        if not node.block_ids:
            self._residents[node] = None
            if node.parent is not None:
                node.parent.resident_children += 1
        node.block_ids[group] = block_id

    def take_block(self, node: Node, group: int) -> int:
        """Forget the slot of `group` and return it."""
        block_id = node.block_ids.pop(group)
        if not node.block_ids:
            del self._residents[node]
            if node.parent is not None:
                node.parent.resident_children -= 1
        return block_id

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark a path as just used; a child counts as older than its parent, so that leaves leave first."""
        for node in reversed(nodes):
            if node in self._residents:
                del self._residents[node]
                self._residents[node] = None

    @property
    def residents(self) -> Iterator[Node]:
        """Nodes with data in RAM, least recently used first."""
        return iter(self._residents)

    def walk(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children)
            if node.parent is not None:
                yield node

    def check_integrity(self) -> None:
        """Raise BrokenInvariant if links, order, residents or addresses contradict each other."""
        residents = set()
        for node in self.walk():
            parent = node.parent
            if parent is None or parent.child(node.packed) is not node:
                raise BrokenInvariant(f"{node!r} is not its parent's child")
            if node._order != sorted(node._children):
                raise BrokenInvariant(f"children of {node!r} are out of order")
            if node.chain != chain_key(parent.chain, node.token_ids):
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

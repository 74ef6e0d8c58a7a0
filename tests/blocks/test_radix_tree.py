"""The tree against a set of token sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.keys import BLOCK_SIZE, chain_key
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant

ROOTS = ["one", "other"]
PICK = st.integers(0, 2**16)
TOKEN = st.sampled_from([0, 1, 255, 256, 2**31])  # sorted as bytes the wrong way round, these change places
BLOCKS = st.tuples(TOKEN, st.sampled_from([0, 1, 100, 255, 256]), TOKEN).map(
    lambda t: (t[0],) * t[1] + (t[2],) * (BLOCK_SIZE - t[1])
)
TAILS = st.tuples(BLOCKS, st.sampled_from([1, 2, 100, 101, 255])).map(lambda t: t[0][: t[1]])
Key = tuple[str, tuple[int, ...]]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class TreeMachine(RuleBasedStateMachine):
    """`known` maps root and all tokens from the start to the node; what is kept in RAM or on disk is the machine's."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.known: dict[Key, Node] = {}
        self.recent: list[Node] = []  # residents, least recently used first

    def pick(self, which: int) -> Node:
        return self.known[sorted(self.known)[which % len(self.known)]]

    def key(self, node: Node) -> Key:
        return next(key for key, known in self.known.items() if known is node)

    @rule(root=st.sampled_from(ROOTS), blocks=st.lists(BLOCKS, max_size=3), tail=st.none() | TAILS)
    def insert(self, root: str, blocks: list[tuple[int, ...]], tail: tuple[int, ...] | None) -> None:
        parent, tokens = self.tree.root(root), ()
        for block in [*blocks, *([tail] if tail else [])]:
            tokens += block
            found = self.tree.find(parent, block)
            node = self.tree.insert(parent, block)
            assert found is self.known.get((root, tokens))
            assert node is self.known.setdefault((root, tokens), node)
            assert (node.token_ids, node.end) == (block, len(tokens))
            assert node.is_full is (len(block) == BLOCK_SIZE)
            parent = node
            node.stored.add(0)

    @precondition(lambda self: self.known)
    @rule(which=PICK, group=st.integers(0, 1), block_id=PICK)
    def set_block(self, which: int, group: int, block_id: int) -> None:
        node = self.pick(which)
        if node not in self.recent:
            self.recent.append(node)
        self.tree.set_block(node, group, block_id)
        assert node.available(group)

    @precondition(lambda self: self.recent)
    @rule(which=PICK)
    def take_block(self, which: int) -> None:
        node = self.recent[which % len(self.recent)]
        group = min(node.block_ids)
        assert self.tree.take_block(node, group) >= 0
        if not node.block_ids:
            self.recent.remove(node)

    @precondition(lambda self: self.known)
    @rule(which=PICK)
    def touch(self, which: int) -> None:
        path = [self.pick(which)]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        self.tree.touch(path[1:])
        touched = [node for node in reversed(path) if node in self.recent]
        self.recent = [node for node in self.recent if node not in touched] + touched

    @precondition(lambda self: self.known)
    @rule(which=PICK, hold=st.sampled_from(["", "stored", "pending", "readers"]))
    def remove(self, which: int, hold: str) -> None:
        node = self.pick(which)
        node.stored = {0} if hold == "stored" else set()
        node.pending = {0} if hold == "pending" else set()
        node.readers = int(hold == "readers")
        if not node.is_leaf or node.block_ids:
            with pytest.raises(BrokenInvariant):
                self.tree.remove(node)
            return
        self.tree.remove(node)
        while node.parent is not None and not (self.is_kept(node) or self.has_children(node)):
            del self.known[self.key(node)]
            node = node.parent

    @staticmethod
    def is_kept(node: Node) -> bool:
        return bool(node.block_ids or node.stored or node.pending or node.readers)

    def has_children(self, node: Node) -> bool:
        return any(other.parent is node for other in self.known.values())

    @rule(root=st.sampled_from([*ROOTS, "unknown"]), blocks=st.lists(BLOCKS, max_size=3), tail=st.just(()) | TAILS)
    def match_prefix(self, root: str, blocks: list[tuple[int, ...]], tail: tuple[int, ...]) -> None:
        tokens = tuple(token for block in blocks for token in block) + tail
        path = self.tree.match_prefix(root, tokens)
        expected = []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            if (root, tokens[:end]) not in self.known:
                break
            expected.append(self.known[root, tokens[:end]])
        assert path.nodes == expected
        covered = len(expected) * BLOCK_SIZE
        shared = {
            node: common(known[covered:], tokens[covered : covered + BLOCK_SIZE])
            for (known_root, known), node in self.known.items()
            if known_root == root and node.position == len(expected) and known[:covered] == tokens[:covered]
        }
        most = max(shared.values(), default=0)
        assert path.tail_tokens == most
        best = {node for node, count in shared.items() if count == most > 0}
        assert set(path.tails) <= best
        assert len(path.tails) == len(set(path.tails)) >= min(len(best), 8)

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        assert set(self.tree.walk()) == set(self.known.values())
        assert list(self.tree.residents) == self.recent
        for node in self.known.values():
            assert self.tree.node(node.chain) is node
            assert node.parent is not None
            assert node.chain == chain_key(node.parent.chain, node.token_ids)

    @invariant()
    def roots_are_not_kept_for_nothing(self) -> None:
        self.tree.match_prefix("unknown", [1])
        assert "unknown" not in self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.sets(TAILS, min_size=1, max_size=30), TAILS)
def test_the_nearest_of_many_children(children: set[tuple[int, ...]], tokens: tuple[int, ...]) -> None:
    tree = RadixTree()
    for child in children:
        tree.insert(tree.root("r"), child)
    path = tree.match_prefix("r", tokens)
    most = max(common(child, tokens) for child in children)
    assert path.tail_tokens == most
    assert all(common(tail.token_ids, tokens) == most for tail in path.tails)
    assert bool(path.tails) is (most > 0)


def test_a_tail_has_no_children() -> None:
    tree = RadixTree()
    tail = tree.insert(tree.root("r"), [1] * 255)
    with pytest.raises(BrokenInvariant, match="tail"):
        tree.insert(tail, [1])


def test_removing_twice_does_no_harm() -> None:
    tree = RadixTree()
    first = tree.insert(tree.root("r"), [1])
    tree.remove(first)
    second = tree.insert(tree.root("r"), [1])
    second.stored.add(0)
    tree.remove(first)
    assert list(tree.walk()) == [second]
    assert tree.node(second.chain) is second


def test_a_root_leaves_with_its_last_block() -> None:
    tree = RadixTree()
    tree.remove(tree.insert(tree.insert(tree.root("r"), [1] * BLOCK_SIZE), [2]))
    assert tree._roots == {}


@pytest.mark.parametrize("damage", ["chain", "resident_children", "order", "residents", "by_chain"])
def test_integrity_notices(damage: str) -> None:
    tree = RadixTree()
    node = tree.insert(tree.root("r"), [1] * BLOCK_SIZE)
    for token in (1, 2):
        tree.set_block(tree.insert(node, [token]), 0, token)
    {
        "chain": lambda: setattr(node, "chain", "0" * 40),
        "resident_children": lambda: setattr(node, "resident_children", 1),
        "order": lambda: node._order.reverse(),
        "residents": lambda: tree._residents.popitem(),
        "by_chain": lambda: tree._by_chain.clear(),
    }[damage]()
    with pytest.raises(BrokenInvariant):
        tree.check_integrity()

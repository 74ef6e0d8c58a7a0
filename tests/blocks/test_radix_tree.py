"""The tree against a set of token sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.keys import BLOCK_SIZE, chain_key
from agentcache.blocks.radix_tree import Node, RadixTree, pack
from agentcache.errors import BrokenInvariant
from tests.examples import examples

ROOTS = ["one", "other"]
PICK = st.integers(0, 2**16)
TOKEN = st.sampled_from([0, 1, 255, 256, 2**31])  # sorted as bytes the wrong way round, these change places
BLOCKS = st.tuples(TOKEN, st.sampled_from([0, 1, 100, 255, 256]), TOKEN).map(
    lambda t: (t[0],) * t[1] + (t[2],) * (BLOCK_SIZE - t[1])
)
TAILS = st.tuples(BLOCKS, st.sampled_from([1, 2, 100, 101, 255])).map(lambda t: t[0][: t[1]])
ORIGINS = st.sampled_from(["base", "base", "a@0", "b@0"])
Step = tuple[tuple[int, ...], str]  # a block's tokens, and its producer
Key = tuple[str, tuple[Step, ...]]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class TreeMachine(RuleBasedStateMachine):
    """`known` maps root and path to the node; what is kept in RAM or on disk is the machine's."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.known: dict[Key, Node] = {}
        self.recent: list[Node] = []  # residents, least recently used first

    def pick(self, which: int) -> Node:
        return self.known[sorted(self.known)[which % len(self.known)]]

    def key(self, node: Node) -> Key:
        return next(key for key, known in self.known.items() if known is node)

    @rule(
        root=st.sampled_from(ROOTS),
        blocks=st.lists(BLOCKS, max_size=3),
        tail=st.none() | TAILS,
        producer=ORIGINS,
        switch=st.integers(0, 3),
    )
    def insert(
        self,
        root: str,
        blocks: list[tuple[int, ...]],
        tail: tuple[int, ...] | None,
        producer: str,
        switch: int,
    ) -> None:
        """A path whose blocks from number `switch` on are the producer's."""
        parent, path = self.tree.root(root), ()
        for position, block in enumerate([*blocks, *([tail] if tail else [])]):
            who = producer if position >= switch else "base"
            path = (*path, (block, who))
            node = self.tree.insert(parent, block, who)
            assert node is self.known.setdefault((root, path), node)
            assert (node.token_ids, node.producer) == (block, who)
            assert node.end == sum(len(tokens) for tokens, _ in path)
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
    @rule(which=PICK)
    def expire(self, which: int) -> None:
        node = self.pick(which)
        self.tree.expire(node)
        if node in self.recent:
            self.recent.remove(node)
            self.recent.insert(0, node)

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

    @rule(
        root=st.sampled_from([*ROOTS, "unknown"]),
        blocks=st.lists(BLOCKS, max_size=3),
        producer=ORIGINS,
        switch=st.integers(0, 3),
        rest=TAILS | BLOCKS,
        refused=PICK,
        least=st.sampled_from([1, 2, 100]),
    )
    def match_prefix(
        self,
        root: str,
        blocks: list[tuple[int, ...]],
        producer: str,
        switch: int,
        rest: tuple[int, ...],
        refused: int,
        least: int,
    ) -> None:
        """The path that may be used, and of what lies behind its end the nearest to `rest`."""

        def origin_of(end: int) -> str:
            return producer if end > switch * BLOCK_SIZE else "base"

        def usable(node: Node) -> bool:
            return int(node.chain[:4], 16) % 4 != refused % 5  # all of them, or three in four

        packed = pack([token for block in blocks for token in block])
        expected, path = [], ()
        for position, block in enumerate(blocks):
            path = (*path, (block, origin_of((position + 1) * BLOCK_SIZE)))
            node = self.known.get((root, path))
            if node is None or not usable(node):
                break
            expected.append(node)
        found = self.tree.match_prefix(root, packed, usable, origin_of)
        assert found == expected
        self.check_nearest(found[-1] if found else self.tree.peek(root), rest, usable, least, producer)

    def check_nearest(
        self, parent: Node, rest: tuple[int, ...], usable: Callable[[Node], bool], least: int, producer: str
    ) -> None:
        nearest = parent.nearest(pack(rest), usable, least=least, producer=producer)
        shared = {
            node: common(node.token_ids, rest)
            for node in self.known.values()
            if node.parent is parent and node.producer == producer and usable(node)
        }
        most = max((count for count in shared.values() if count >= least), default=0)
        assert nearest.num_tokens == most
        best = {node for node, count in shared.items() if count == most > 0}
        assert set(nearest.items) <= best
        assert len(nearest.items) == len(set(nearest.items)) >= min(len(best), 8)

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        assert set(self.tree.walk()) == set(self.known.values())
        assert list(self.tree.residents) == self.recent
        for node in self.known.values():
            assert self.tree.node(node.chain) is node
            assert node.parent is not None
            assert node.chain == chain_key(node.parent.chain, node.token_ids, node.producer)

    @invariant()
    def roots_are_not_kept_for_nothing(self) -> None:
        self.tree.peek("unknown")
        assert "unknown" not in self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_the_same_tokens_of_another_producer_are_another_node() -> None:
    tree = RadixTree()
    root = tree.root("r")
    nodes = [tree.insert(root, [1, 2], producer) for producer in ("base", "a@0", "a@1")]
    assert len({node.chain for node in nodes}) == 3
    for node in nodes:
        assert root.nearest(pack([1, 3]), lambda _: True, producer=node.producer).items == [node]
        assert root.child(pack([1, 2]), node.producer) is node
    tree.remove(nodes[1])
    assert set(root.children) == {nodes[0], nodes[2]}


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


def test_a_prefix_that_ends_with_a_block_has_that_block() -> None:
    tree = RadixTree()
    first = tree.insert(tree.root("r"), [1] * BLOCK_SIZE)
    second = tree.insert(first, [2] * BLOCK_SIZE)
    tokens = [1] * BLOCK_SIZE + [2] * BLOCK_SIZE
    for more in ([], [3]):
        assert tree.match_prefix("r", pack(tokens + more), lambda _: True, lambda end: "base") == [first, second]


def test_of_a_path_that_was_used_the_end_leaves_first() -> None:
    tree = RadixTree()
    first = tree.insert(tree.root("r"), [1] * BLOCK_SIZE)
    second, other = tree.insert(first, [2]), tree.insert(tree.root("r"), [3])
    for slot, node in enumerate((first, second, other)):
        tree.set_block(node, 0, slot)
    tree.touch([first, second])
    assert list(tree.residents) == [other, second, first]


def test_a_root_leaves_with_its_last_block() -> None:
    tree = RadixTree()
    tree.remove(tree.insert(tree.insert(tree.root("r"), [1] * BLOCK_SIZE), [2]))
    assert tree._roots == {}


@pytest.mark.parametrize("damage", ["chain", "producer", "resident_children", "order", "residents", "by_chain"])
def test_integrity_notices(damage: str) -> None:
    tree = RadixTree()
    node = tree.insert(tree.root("r"), [1] * BLOCK_SIZE)
    for token in (1, 2):
        tree.set_block(tree.insert(node, [token]), 0, token)
    {
        "chain": lambda: setattr(node, "chain", "0" * 40),
        "resident_children": lambda: setattr(node, "resident_children", 1),
        "producer": lambda: setattr(next(node.children), "producer", "a@0"),
        "order": lambda: node._families["base"]._order.reverse(),
        "residents": lambda: tree._residents.popitem(),
        "by_chain": lambda: tree._by_chain.clear(),
    }[damage]()
    with pytest.raises(BrokenInvariant):
        tree.check_integrity()

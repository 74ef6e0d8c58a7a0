from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, KVOrigin
from agentcache.blocks.origin_paths import NamedBlock, PathLayout
from agentcache.blocks.pool import BlockTable, Copy, full_partner
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant


@dataclass(frozen=True)
class Load:
    """A pending read of a node's first tokens. With `reopens`, of the partner's file of a sealed node, packed again."""

    node: Node
    group: int
    block_id: int
    num_tokens: int
    reopens: bool = False

    @property
    def source_group(self) -> int:
        """Group of the file."""
        return full_partner(self.group) if self.reopens else self.group


class PathBlock(NamedTuple):
    node: Node
    groups: tuple[int, ...]

    @property
    def named(self) -> NamedBlock:
        return self.named_in(BASE_CACHE)

    def named_in(self, cache: str) -> NamedBlock:
        return NamedBlock(self.node.chain, self.groups, cache)


@dataclass(eq=False)
class OriginPath:
    """A request's blocks on one path: full published `nodes`, then cached ones `ahead` of its end.

    `tail` has the unfinished block's first tokens.
    """

    layout: PathLayout
    nodes: list[Node]
    tail: Node | None = None
    ahead: list[Node] = field(default_factory=list)

    @property
    def groups(self) -> tuple[int, ...]:
        return self.layout.groups

    @property
    def read_nodes(self) -> list[Node]:
        return [*([] if self.tail is None else [self.tail]), *reversed(self.ahead), *reversed(self.nodes)]

    @property
    def has_state(self) -> bool:
        return self.layout.has_state

    def groups_of(self, node: Node) -> tuple[int, ...]:
        return self.layout.groups_of(node.position, node.num_tokens)

    def parent_of(self, position: int, root: Node) -> Node:
        return self.nodes[position - 1] if position else root


@dataclass(eq=False)
class BlockTables:
    """Block tables of a running request.

    Attributes:
        root: chain key of the namespace.
        loads, copies: due before the first step.
        state: slot of the checkpoint to start from, until the row has copied it.
        snapshots: last checkpoints started from or created.
        next_start: the one where the next prompt probably starts.
    """

    root: str
    producer: KVOrigin | None
    token_ids: array[int]
    tables: list[BlockTable]
    paths: list[OriginPath]
    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    closed: bool = False
    state: int | None = None
    snapshots: list[Node] = field(default_factory=list)
    next_start: Node | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def state_path(self) -> OriginPath:
        return next(path for path in self.paths if path.has_state)


def check_sequences(sequences: Collection[BlockTables], tree: RadixTree, *, has_state: bool) -> None:
    _check_readers(sequences, tree)
    for sequence in sequences:
        _check_paths(sequence, tree, has_state)


def _check_readers(sequences: Collection[BlockTables], tree: RadixTree) -> None:
    paths = (path for sequence in sequences for path in sequence.paths)
    readers = Counter(node for path in paths for node in path.read_nodes)
    for node in tree.walk():
        if node.readers != readers.pop(node, 0):
            raise BrokenInvariant(f"{node!r} miscounts its readers")
    if readers:
        raise BrokenInvariant(f"sequences go through {list(readers)}, which the tree has lost")


def _check_paths(sequence: BlockTables, tree: RadixTree, has_state: bool) -> None:
    if sorted(index for path in sequence.paths for index in path.groups) != list(range(len(sequence.tables))):
        raise BrokenInvariant("a sequence's paths do not have each group once")
    if [path.has_state for path in sequence.paths].count(True) != has_state:
        raise BrokenInvariant("not one path of a sequence has its state")
    for path in sequence.paths:
        if len(path.nodes) != sequence.num_tokens // BLOCK_SIZE:
            raise BrokenInvariant("a path has not published what its sequence has computed")
        parent = tree.peek(sequence.root)
        for node in path.nodes:
            if node.parent is not parent or node.producer != path.layout.origin_of(node.end):
                raise BrokenInvariant(f"{node!r} is not on its path")
            parent = node

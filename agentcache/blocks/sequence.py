"""What one running request holds of the cache: its lanes, its block tables, and what is due before its first step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from agentcache.blocks.keys import BASE_CACHE, Producer
from agentcache.blocks.lanes import LaneLayout, NamedBlock
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.radix_tree import Node


@dataclass(frozen=True)
class Load:
    """A block to bring from disk into slot `block_id`: the first `num_tokens` tokens of `node`'s data of `group`."""

    node: Node
    group: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True)
class Copy:
    """A block to copy inside RAM (copy-on-write) from slot `source` to the private slot `target` of `group`."""

    group: int
    source: int
    target: int


class LaneBlock(NamedTuple):
    """A block of a sequence's lane: the node, and the cache groups that the lane has in it."""

    node: Node
    groups: tuple[int, ...]

    @property
    def named(self) -> NamedBlock:
        return self.named_in(BASE_CACHE)

    def named_in(self, cache: str) -> NamedBlock:
        """The block of the cache of that name."""
        return NamedBlock(self.node.chain, self.groups, cache)


@dataclass(eq=False)
class Lane:
    """The path of one lane of a sequence.

    Attributes:
        nodes: its published full blocks, from the start.
        tail: the node that the first unfinished block was taken from, if any.
        ahead: further full blocks that are there already, which the sequence has still to go through.
    """

    layout: LaneLayout
    nodes: list[Node]
    tail: Node | None = None
    ahead: list[Node] = field(default_factory=list)

    @property
    def groups(self) -> tuple[int, ...]:
        return self.layout.groups

    @property
    def read_nodes(self) -> list[Node]:
        """All nodes that it keeps in the tree, the last one first."""
        return [*([] if self.tail is None else [self.tail]), *reversed(self.ahead), *reversed(self.nodes)]

    @property
    def has_state(self) -> bool:
        return self.layout.has_state

    def parent_of(self, position: int, root: Node) -> Node:
        """The node in front of its block number `position`."""
        return self.nodes[position - 1] if position else root


@dataclass(eq=False)
class CacheSequence:
    """What one running request holds of the cache.

    Attributes:
        root: chain key of its namespace.
        producer: who computes its keys and values; None for base.
        state: slot of the snapshot that it starts from, until the row has it; None without one.
        snapshots: the last nodes whose snapshots it has started from or made, in their order.
        next_start: the one of them that the conversation's next prompt is expected to start from.
        token_ids: the tokens whose keys and values are computed or cached.
        tables: one block table per group.
        lanes: one path of nodes per producer of its groups; each group is in one of them.
        loads, copies: what has to be done before the first step; emptied by whoever does it.
    """

    root: str
    producer: Producer | None
    token_ids: array[int]
    tables: list[BlockTable]
    lanes: list[Lane]
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
    def state_lane(self) -> Lane:
        """The lane to whose blocks snapshots of recurrent state belong."""
        return next(lane for lane in self.lanes if lane.has_state)

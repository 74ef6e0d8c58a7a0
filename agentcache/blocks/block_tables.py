from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from agentcache.blocks.keys import BASE_CACHE, KVOrigin
from agentcache.blocks.origin_paths import NamedBlock, PathLayout
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.radix_tree import Node


@dataclass(frozen=True)
class Load:
    """A pending read of `node`'s first tokens from disk."""

    node: Node
    group: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True)
class Copy:
    """A block copy in RAM between slots of `group`."""

    group: int
    source: int
    target: int


class PathBlock(NamedTuple):
    """A block of an origin path: its node and cache groups."""

    node: Node
    groups: tuple[int, ...]

    @property
    def named(self) -> NamedBlock:
        return self.named_in(BASE_CACHE)

    def named_in(self, cache: str) -> NamedBlock:
        return NamedBlock(self.node.chain, self.groups, cache)


@dataclass(eq=False)
class OriginPath:
    """One origin path of a request.

    Attributes:
        nodes: published full blocks, from the start.
        tail: source of the unfinished block's first tokens, if any.
        ahead: further cached full blocks, which the request has not reached.
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

    def parent_of(self, position: int, root: Node) -> Node:
        return self.nodes[position - 1] if position else root


@dataclass(eq=False)
class BlockTables:
    """Block tables of one running request.

    Attributes:
        root: chain key of its namespace.
        state: slot of its first checkpoint, until the row has copied it.
        snapshots: last nodes whose checkpoints it started from or created.
        next_start: the one where the next prompt probably starts.
        loads, copies: due before the first step, then removed.
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

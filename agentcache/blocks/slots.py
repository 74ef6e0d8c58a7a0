"""RAM slots, one block pool per cache group, and the tree nodes that list them.

A node holds one reference per listed slot. A longer node may list the same slot as the tail that it extends, so
listings are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentcache.blocks.block_tables import Copy
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant


class Group(Protocol):
    """A cache group (`kv/spec.py`)."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int | None: ...

    @property
    def bytes_per_block(self) -> int: ...

    def first_block_needed(self, num_tokens: int) -> int: ...


@dataclass(frozen=True)
class BlockCounts:
    """Slots over all groups: unreferenced, referenced by requests, by the tree only."""

    free: int
    live: int
    cached: int


class Slots:
    """RAM slots of one cache, and the nodes that list them."""

    def __init__(self, groups: Sequence[Group], tree: RadixTree) -> None:
        self.groups = tuple(groups)
        self.pools = [BlockPool() for _ in self.groups]
        self.evicted_blocks = 0
        self._tree = tree
        self._listed: list[Counter[int]] = [Counter() for _ in self.groups]  # nodes by slot

    def is_read(self, index: int, block_id: int) -> bool:
        return self.num_readers(index, block_id) > 0

    def num_readers(self, index: int, block_id: int) -> int:
        return self.pools[index].ref_cnt(block_id) - self._listed[index][block_id]

    def list_in(self, node: Node, index: int, block_id: int, *, instead_of: int | None = None) -> None:
        """List a slot, and no longer `instead_of`."""
        if instead_of is not None:
            self._listed[index][instead_of] -= 1
            self.pools[index].release(instead_of)
        self.pools[index].retain(block_id)
        self._listed[index][block_id] += 1
        self._tree.set_block(node, index, block_id)

    def take_from(self, node: Node, index: int) -> None:
        block_id = self._tree.take_block(node, index)
        self._listed[index][block_id] -= 1
        self.pools[index].release(block_id)

    def evict(self, node: Node, groups: Collection[int] | None = None) -> bool:
        """Free the node's slots (of `groups`); False if read or being written.

        A node with descendants in RAM stays: they need it.
        """
        held = [index for index in node.block_ids if groups is None or index in groups]
        if node.pending or node.resident_children or any(self.is_read(i, node.block_ids[i]) for i in held):
            return False
        self.free(node, held)
        return True

    def free(self, node: Node, groups: Collection[int]) -> None:
        """Free the node's slots, even if read."""
        for index in groups:
            self.take_from(node, index)
            self.evicted_blocks += 1
        self.prune(node)

    def drop(self, node: Node, index: int) -> None:
        """Unlist a leaf's slot even if read; remove the node if unused."""
        if index in node.block_ids:
            self.take_from(node, index)
        self.prune(node)

    def vacate_last(self, index: int, tables: Iterable[BlockTable]) -> None:
        """Move the block in the last slot to an earlier free slot, which must exist, also in `tables`."""
        pool = self.pools[index]
        last = pool.capacity - 1
        target = pool.allocate_before(last)
        if target is None:
            raise BrokenInvariant(f"group {self.groups[index].name} has no free slot before its last one")
        for node in [node for node in self._tree.residents if node.block_ids.get(index) == last]:
            self.list_in(node, index, target, instead_of=last)
        for table in tables:
            if last in table.block_ids:
                pool.retain(target)
                pool.release(last)
                table.replace(table.first_block + table.block_ids.index(last), target)
        pool.release(target)  # nodes and tables hold their own
        pool.note_move(last, target)

    def gather(self, index: int) -> list[Copy]:
        """Move blocks that only the tree lists to earlier free slots.

        Stops at a read slot, as pools shrink from the end.
        """
        pool, listing = self.pools[index], defaultdict[int, list[Node]](list)
        for node in self._tree.residents:
            if index in node.block_ids:
                listing[node.block_ids[index]].append(node)
        copies = []
        for source in range(pool.capacity - 1, -1, -1):
            if not pool.ref_cnt(source):
                continue
            if self.is_read(index, source) or (target := pool.allocate_before(source)) is None:
                break
            for node in listing[source]:
                self.list_in(node, index, target, instead_of=source)
            pool.release(target)
            copies.append(Copy(index, source, target))
        return copies

    def prune(self, node: Node) -> None:
        """Remove a node without data, and ancestors kept only for it."""
        if node.is_leaf and not node.block_ids:
            self._tree.remove(node)

    def check_integrity(self, index: int, read: Counter[int]) -> None:
        pool, name = self.pools[index], self.groups[index].name
        pool.check_integrity()
        listed = Counter(node.block_ids[index] for node in self._tree.walk() if index in node.block_ids)
        if +self._listed[index] != listed:
            raise BrokenInvariant(f"slots of group {name} that the tree lists are miscounted")
        if Counter({block_id: pool.ref_cnt(block_id) for block_id in range(pool.capacity)}) != listed + read:
            raise BrokenInvariant(f"reference counts of group {name} are wrong")

"""The slots in RAM, one block pool per cache group, and which nodes of the radix tree list them.

A node holds one reference for each slot that it lists; a longer node may list the same slot as the tail that it grew
from, so listings are counted. What the references beyond these are for, `prefix_cache` knows; how many slots there may
be, `allocator`; which one leaves first, `eviction`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.sequence import Copy
from agentcache.errors import BrokenInvariant


class Group(Protocol):
    """What this floor needs to know of a cache group (`kv/spec.py` has the rest)."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int | None: ...

    @property
    def bytes_per_block(self) -> int: ...

    def first_block_needed(self, num_tokens: int) -> int: ...


@dataclass(frozen=True)
class BlockCounts:
    """Slots over all groups: without reference, referenced by sequences, referenced by the tree only."""

    free: int
    live: int
    cached: int


class Slots:
    """All slots of one model's cache, and which nodes of `tree` list them.

    Attributes:
        evicted_blocks: counts the slots that were taken from nodes to be used anew.
    """

    def __init__(self, groups: Sequence[Group], tree: RadixTree) -> None:
        self.groups = tuple(groups)
        self.pools = [BlockPool() for _ in self.groups]
        self.evicted_blocks = 0
        self._tree = tree
        self._listed: list[Counter[int]] = [Counter() for _ in self.groups]  # nodes that list a slot

    def is_read(self, index: int, block_id: int) -> bool:
        """Whether a sequence reads the slot, beside the nodes that list it."""
        return self.num_readers(index, block_id) > 0

    def num_readers(self, index: int, block_id: int) -> int:
        """References to the slot beside those of the nodes that list it."""
        return self.pools[index].ref_cnt(block_id) - self._listed[index][block_id]

    def list_in(self, node: Node, index: int, block_id: int, *, instead_of: int | None = None) -> None:
        """The node's data of group `index` lies in this slot, and no longer in the one `instead_of` it."""
        if instead_of is not None:
            self._listed[index][instead_of] -= 1
            self.pools[index].release(instead_of)
        self.pools[index].retain(block_id)
        self._listed[index][block_id] += 1
        self._tree.set_block(node, index, block_id)

    def take_from(self, node: Node, index: int) -> None:
        """The node's data of group `index` is no longer in RAM."""
        block_id = self._tree.take_block(node, index)
        self._listed[index][block_id] -= 1
        self.pools[index].release(block_id)

    def evict(self, node: Node, groups: Collection[int] | None = None) -> bool:
        """Free the node's slots (of `groups`) if nobody reads or writes them; False if somebody does.

        What is on disk stays known. A node with blocks in RAM behind it stays: they are of no use without it.
        """
        held = [index for index in node.block_ids if groups is None or index in groups]
        if node.pending or node.resident_children or any(self.is_read(i, node.block_ids[i]) for i in held):
            return False
        self.free(node, held)
        return True

    def free(self, node: Node, groups: Collection[int]) -> None:
        """Take the node's slots of `groups`, whoever else has to do with it."""
        for index in groups:
            self.take_from(node, index)
            self.evicted_blocks += 1
        self.prune(node)

    def drop(self, node: Node, index: int) -> None:
        """Take a leaf's slot of group `index` from the tree, whoever reads it; forget the node if it holds nothing."""
        if index in node.block_ids:
            self.take_from(node, index)
        self.prune(node)

    def vacate_last(self, index: int, tables: Iterable[BlockTable]) -> None:
        """Free the last slot of a group: what lies there moves to a free one before it, of which there is one.

        Args:
            tables: the group's block tables of all sequences that may read it.
        """
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
        pool.release(target)  # the references of nodes and tables are enough
        pool.note_move(last, target)

    def gather(self, index: int) -> list[Copy]:
        """Move what only the tree lists out of a group's last slots, into free ones before them.

        It ends at a slot that is read: behind that one nothing can be given back.
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
            pool.release(target)  # the nodes' references are enough
            copies.append(Copy(index, source, target))
        return copies

    def prune(self, node: Node) -> None:
        """Forget a node that is neither in RAM nor on disk, and ancestors kept only for it."""
        if node.is_leaf and not node.block_ids:
            self._tree.remove(node)

    def check_integrity(self, index: int, read: Counter[int]) -> None:
        """Raise BrokenInvariant unless the references of group `index` are the nodes' and those in `read`."""
        pool, name = self.pools[index], self.groups[index].name
        pool.check_integrity()
        listed = Counter(node.block_ids[index] for node in self._tree.walk() if index in node.block_ids)
        if +self._listed[index] != listed:
            raise BrokenInvariant(f"slots of group {name} that the tree lists are miscounted")
        if Counter({block_id: pool.ref_cnt(block_id) for block_id in range(pool.capacity)}) != listed + read:
            raise BrokenInvariant(f"reference counts of group {name} are wrong")

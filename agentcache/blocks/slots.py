"""The slots in RAM: one block pool per cache group, under one budget, emptied least recently used first.

A node of the radix tree holds one reference for each slot that it lists; a longer node may list the same slot as the
tail that it grew from, so listings are counted. What the references beyond these are for, `prefix_cache` knows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant, OutOfBlocks

_GROWTH = 0.5
_MIN_GROWTH_BLOCKS = 4


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

    Args:
        groups: the model's cache groups.
        tree: its residents are what can be evicted.
        ram_budget: bytes that all slots together may take.

    Attributes:
        lent: bytes of the budget that somebody else has until they are needed.
    """

    def __init__(self, groups: Sequence[Group], tree: RadixTree, ram_budget: int) -> None:
        self.groups = tuple(groups)
        self.pools = [BlockPool() for _ in self.groups]
        self.ram_budget = ram_budget
        self.lent = 0
        self.evicted_blocks = 0
        self._tree = tree
        self._listed: list[Counter[int]] = [Counter() for _ in self.groups]  # nodes that list a slot
        self._loan_over: Callable[[], None] = lambda: None

    def allocate(self, index: int) -> int:
        """A slot of group `index`: a free one, a new one within the budget, or the least recently used one."""
        if not self.pools[index].num_free and not self._free_a_slot(index):
            raise OutOfBlocks(f"the RAM budget of {self.ram_budget} bytes is in use by running requests")
        return self.pools[index].allocate()

    def _free_a_slot(self, index: int) -> bool:
        return self._grow(index) or self._evict_for(index) or self._reclaim(index) or self._call_in_for(index)

    def preallocate(self, num_bytes: int) -> None:
        """Grow every attention kind in turn up to `num_bytes` in all, so that the first requests need not."""
        kinds = {group.window: index for index, group in enumerate(self.groups)}
        while self.capacity_bytes < num_bytes and sum(self._grow(index) for index in kinds.values()):
            continue

    def make_room(self, num_tokens: int) -> None:
        """See to it that a sequence of `num_tokens` tokens fits, as far as the budget and those who read allow.

        For when nobody else runs: what one attention kind has taken for many short contexts then serves a long one.
        """
        for index, group in enumerate(self.groups):
            needed = -(-num_tokens // BLOCK_SIZE)
            if group.window is not None:
                needed = min(needed, self.min_blocks(group))
            while self.pools[index].capacity < needed and self._enlarge(index):
                continue

    def _enlarge(self, index: int) -> bool:
        return self._grow(index) or self._reclaim(index) or self._call_in_for(index)

    def _reclaim(self, index: int) -> bool:
        """Grow by room that another attention kind has beyond its least need and nobody reads; False if none."""
        others = [i for i, group in enumerate(self.groups) if group.window != self.groups[index].window]
        while not self._grow(index):
            donor = next((i for i in others if self._can_give_up_a_slot(i)), None)
            if donor is None:
                return False
            self._give_up_a_slot(donor)
        return True

    def _can_give_up_a_slot(self, index: int) -> bool:
        last = self.pools[index].capacity - 1
        return last >= self.min_blocks(self.groups[index]) and not self.is_read(index, last)

    def _give_up_a_slot(self, index: int) -> None:
        """Drop the last slot of a group, with whatever is cached in it."""
        last = self.pools[index].capacity - 1
        for node in [node for node in self._tree.residents if node.block_ids.get(index) == last]:
            self.take_from(node, index)
            self.prune(node)
        self.pools[index].shrink(last)

    def _grow(self, index: int) -> bool:
        """Grow all groups of one attention kind to one size, as they fill together; False if the budget forbids it."""
        wanted = max(_MIN_GROWTH_BLOCKS, int(self.pools[index].capacity * _GROWTH))
        added = min(wanted, self._growth_within(self.ram_budget - self.lent, index))
        if added < 1:
            return False
        capacity = self.pools[index].capacity + added
        for i in self._kin(index):
            self.pools[i].grow(max(capacity, self.pools[i].capacity))
        return True

    def affordable_growth(self, index: int) -> int:
        """Slots by which group `index` may still grow within the budget, lent or not, if its attention kind follows."""
        return self._growth_within(self.ram_budget, index)

    def _growth_within(self, ram_budget: int, index: int) -> int:
        affordable = ram_budget - self.capacity_bytes - self._reserved(self.groups[index].window)
        capacity, kin = self.pools[index].capacity, self._kin(index)

        def cost(added: int) -> int:
            return sum(max(0, capacity + added - self.pools[i].capacity) * self.groups[i].bytes_per_block for i in kin)

        most = max(0, affordable // self.groups[index].bytes_per_block)
        return bisect_right(range(1, most + 1), affordable, key=cost)

    def resize(self, ram_budget: int) -> bool:
        """Keep within another budget from now on: slots that nobody reads are given up, the fullest pool's first.

        If that is not enough, what is lent is called in. False if running requests keep it from going that low even so;
        then the budget is what the slots take now.
        """
        if not self._shrink_to(ram_budget - self.lent) and self.lent:
            self._call_in()
        self.ram_budget = max(ram_budget, self.capacity_bytes + self.lent)
        return self.ram_budget == ram_budget

    def _shrink_to(self, num_bytes: int) -> bool:
        while self.capacity_bytes > num_bytes:
            donors = [index for index in range(len(self.pools)) if self._can_give_up_a_slot(index)]
            if not donors:
                return False
            self._give_up_a_slot(max(donors, key=lambda index: self.pools[index].capacity))
        return True

    # -- lending ------------------------------------------------------------------------------------------------------

    def lend(self, num_bytes: int, over: Callable[[], None]) -> None:
        """Do without up to `num_bytes` of the budget, in place of what is lent now; gives up slots that nobody reads.

        `lent` says how much it is; less than `num_bytes` only where running requests are in the way. Who needs a slot
        that can be had in no other way ends the loan: `over` is called, must let go of the bytes, and must not call the
        cache.
        """
        self._shrink_to(self.ram_budget - num_bytes)
        self.lent, self._loan_over = min(num_bytes, self.ram_budget - self.capacity_bytes), over

    def _call_in(self) -> None:
        self.lent = 0
        self._loan_over()

    def _call_in_for(self, index: int) -> bool:
        """Grow by what was lent."""
        if not self.lent:
            return False
        self._call_in()
        return self._grow(index) or self._reclaim(index)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _kin(self, index: int) -> list[int]:
        return [i for i, group in enumerate(self.groups) if group.window == self.groups[index].window]

    def _reserved(self, growing: int | None) -> int:
        """Bytes kept back so that every other attention kind can hold one sequence's window (or a little context)."""
        return sum(
            max(0, self.min_blocks(group) - self.pools[i].capacity) * group.bytes_per_block
            for i, group in enumerate(self.groups)
            if group.window != growing
        )

    @staticmethod
    def min_blocks(group: Group) -> int:
        """Slots without which a group cannot serve a single sequence."""
        return 4 if group.window is None else -(-group.window // BLOCK_SIZE) + 2

    @property
    def min_ram_budget(self) -> int:
        """Bytes below which not even one short sequence fits."""
        return sum(self.min_blocks(group) * group.bytes_per_block for group in self.groups)

    def _evict_for(self, index: int) -> bool:
        """Free a slot of group `index`, least recently used leaves first; False if every one is read."""
        while not self.pools[index].num_free:
            if (victim := self._victim(index)) is not None:
                self._evict(victim, list(victim.block_ids))
            elif (holder := self._unread_holder(index)) is not None:
                self._evict(holder, [index])
            else:
                return False
        return True

    def _victim(self, index: int) -> Node | None:
        """The node to evict for a slot of group `index`; one whose file is being written only if there is no other."""
        settled = (node for node in self._candidates(index) if self._is_idle(node) and not node.pending)
        # A write in progress has its own copy of the bytes.
        return next(settled, None) or next(filter(self._is_idle, self._candidates(index)), None)

    def _unread_holder(self, index: int) -> Node | None:
        """A node whose slot of group `index` nobody reads, though its other groups or blocks behind it are read."""
        holders = (node for node in self._tree.residents if index in node.block_ids)
        return next((node for node in holders if not self.is_read(index, node.block_ids[index])), None)

    def _candidates(self, index: int) -> Iterator[Node]:
        """Nodes with a slot of group `index`, then leaves that are in the way of such nodes."""
        holders = [node for node in self._tree.residents if index in node.block_ids]
        yield from holders
        yield from (_resident_leaf(node) for node in holders if not self.is_read(index, node.block_ids[index]))

    def _is_idle(self, node: Node) -> bool:
        return not node.resident_children and not any(self.is_read(i, slot) for i, slot in node.block_ids.items())

    def is_read(self, index: int, block_id: int) -> bool:
        """Whether a sequence reads the slot, beside the nodes that list it."""
        return self.pools[index].ref_cnt(block_id) > self._listed[index][block_id]

    def evict(self, node: Node, groups: Collection[int] | None = None) -> bool:
        """Free the node's slots (of `groups`) if nobody reads or writes them; False if somebody does.

        What is on disk stays known. A node with blocks in RAM behind it stays: they are of no use without it.
        """
        held = [index for index in node.block_ids if groups is None or index in groups]
        if node.pending or node.resident_children or any(self.is_read(i, node.block_ids[i]) for i in held):
            return False
        self._evict(node, held)
        return True

    def _evict(self, node: Node, groups: Collection[int]) -> None:
        for index in groups:
            self.take_from(node, index)
            self.evicted_blocks += 1
        self.prune(node)

    def list_in(self, node: Node, index: int, block_id: int) -> None:
        """The node's data of group `index` lies in this slot."""
        self.pools[index].retain(block_id)
        self._listed[index][block_id] += 1
        self._tree.set_block(node, index, block_id)

    def take_from(self, node: Node, index: int) -> None:
        block_id = self._tree.take_block(node, index)
        self._listed[index][block_id] -= 1
        self.pools[index].release(block_id)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(pool.capacity * group.bytes_per_block for pool, group in zip(self.pools, self.groups, strict=True))

    def max_tokens(self) -> int:
        """Tokens that a single sequence can hold within the budget (all groups unbounded by windows taken together)."""
        fixed = sum(self.min_blocks(g) * g.bytes_per_block for g in self.groups if g.window is not None)
        growing = sum(g.bytes_per_block for g in self.groups if g.window is None)
        return 2**62 if not growing else max(0, (self.ram_budget - fixed) // growing) * BLOCK_SIZE

    def drop(self, node: Node, index: int) -> None:
        """Take a leaf's slot of group `index` from the tree, whoever reads it; forget the node if it holds nothing."""
        if index in node.block_ids:
            self.take_from(node, index)
        self.prune(node)

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


def _resident_leaf(node: Node) -> Node:
    """Some descendant (or the node itself) without children in RAM."""
    while node.resident_children:
        node = next(child for child in node.children if child.block_ids)
    return node

"""RAM slots: reference counts, block tables, and the tree nodes that list slots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol, TypeVar

from agentcache.blocks.keys import FIRST_SEALED
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant, OutOfBlocks


class BlockPool:
    """Reference counts of one group's slots `0 … capacity-1`."""

    def __init__(self, capacity: int = 0) -> None:
        self._ref_cnt: list[int] = []
        self._free: list[int] = []
        self._moves: list[tuple[int, int]] = []
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        return len(self._ref_cnt)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, capacity: int) -> None:
        added = range(len(self._ref_cnt), capacity)
        self._ref_cnt.extend(0 for _ in added)
        self._free.extend(reversed(added))

    @property
    def last_in_use(self) -> int:
        """Last referenced slot, or -1."""
        return next((slot for slot in range(self.capacity - 1, -1, -1) if self._ref_cnt[slot]), -1)

    def shrink(self, capacity: int) -> None:
        if any(self._ref_cnt[capacity:]):
            raise BrokenInvariant("a slot in use cannot be dropped")
        del self._ref_cnt[capacity:]
        self._free = [block_id for block_id in self._free if block_id < capacity]

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"all {self.capacity} blocks are in use")
        block_id = self._free.pop()
        self._ref_cnt[block_id] = 1
        return block_id

    def allocate_before(self, block_id: int) -> int | None:
        """Return the first free slot; None if it is not below `block_id`."""
        first = min(self._free, default=block_id)
        if first >= block_id:
            return None
        self._free.remove(first)
        self._ref_cnt[first] = 1
        return first

    def note_move(self, source: int, target: int) -> None:
        self._moves.append((source, target))

    def take_moves(self) -> list[tuple[int, int]]:
        """Return and clear moves (source, target). Copy them before any other use of the arena."""
        moves, self._moves = self._moves, []
        return moves

    def retain(self, block_id: int) -> None:
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is free and cannot be retained")
        self._ref_cnt[block_id] += 1

    def release(self, block_id: int) -> None:
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is released once too often")
        self._ref_cnt[block_id] -= 1
        if self._ref_cnt[block_id] == 0:
            self._free.append(block_id)

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def check_integrity(self) -> None:
        free = set(self._free)
        if len(free) != len(self._free):
            raise BrokenInvariant("a block is twice in the free list")
        if free != {block_id for block_id, count in enumerate(self._ref_cnt) if count == 0}:
            raise BrokenInvariant("free list and reference counts disagree")


@dataclass
class BlockTable:
    """A request's slots in one group, from block number `first_block` on, the first in the window.

    -1 stands for a block without slot: not loaded yet, or sealed (`Holds.OPEN`).
    """

    block_ids: list[int] = field(default_factory=list)
    first_block: int = 0

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    @property
    def slots(self) -> list[int]:
        return [block_id for block_id in self.block_ids if block_id >= 0]

    def has(self, position: int) -> bool:
        return self.first_block <= position < self.end_block

    def has_slot(self, position: int) -> bool:
        return self.has(position) and self.block_id(position) >= 0

    def block_id(self, position: int) -> int:
        return self.block_ids[position - self.first_block]

    def slots_of(self, positions: Iterable[int]) -> list[int]:
        """Slots of these blocks; -1 for one without."""
        return [self.block_id(position) if self.has(position) else -1 for position in positions]

    def replace(self, position: int, block_id: int) -> None:
        self.block_ids[position - self.first_block] = block_id

    def drop_before(self, position: int) -> list[int]:
        """Remove blocks before block number `position`; return their slots."""
        count = min(max(0, position - self.first_block), len(self.block_ids))
        dropped = self.block_ids[:count]
        del self.block_ids[:count]
        self.first_block += count
        return dropped

    def clear(self, begin: int, end: int) -> list[int]:
        """Remove the slots of blocks `begin … end - 1`, which stay in the table; return them, with -1 if none."""
        first = max(begin, self.first_block)
        span = slice(first - self.first_block, max(first, end) - self.first_block)
        cleared = self.block_ids[span]
        if max(cleared, default=-1) < 0:  # for speed
            return []
        self.block_ids[span] = [-1] * len(cleared)
        return [-1] * (first - begin) + cleared


@dataclass(frozen=True)
class Copy:
    """A copy within a group. With `reopens`, `source` is a slot of the partner (`full_partner`), packed again."""

    group: int
    source: int
    target: int
    reopens: bool = False


class Holds(StrEnum):
    """Which blocks a group holds. An `OPEN` group directly follows its partner, a `FULL` one of the same layers."""

    ALL = "all"
    FULL = "full"  # sealed ones (`is_sealed`)
    OPEN = "open"  # others: partly filled ones, and block 0

    def has(self, *, is_sealed: bool) -> bool:
        return self is not (Holds.OPEN if is_sealed else Holds.FULL)

    def of_full_blocks(self, first: int) -> slice:
        """Which of a path's full blocks, from block number `first` on, the group holds."""
        if self is Holds.ALL:
            return slice(first, None)
        return slice(max(first, FIRST_SEALED), None) if self is Holds.FULL else slice(first, FIRST_SEALED)


def full_partner(index: int) -> int:
    """Group of an OPEN group's sealed blocks, from which these are reopened."""
    return index - 1


def open_partner(index: int) -> int:
    """Group of a FULL group's open blocks."""
    return index + 1


def are_paired(holds: Sequence[Holds]) -> bool:
    """Whether each FULL group is followed by an OPEN one, and no other group is."""
    neighbours = pairwise((Holds.ALL, *holds, Holds.ALL))
    return all((left is Holds.FULL) == (right is Holds.OPEN) for left, right in neighbours)


class Group(Protocol):
    """A cache group (`kv/spec.py`)."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int | None: ...

    @property
    def holds(self) -> Holds: ...

    @property
    def bytes_per_block(self) -> int: ...

    def first_block_needed(self, num_tokens: int) -> int: ...


G = TypeVar("G", bound=Group)


def window_group(groups: Sequence[G], index: int) -> G:
    """Group with the window of the layers of group `index`."""
    return groups[full_partner(index) if groups[index].holds is Holds.OPEN else index]


def holds_of(groups: Iterable[Group]) -> tuple[Holds, ...]:
    """Return what each group holds; empty if all hold all blocks."""
    holds = tuple(group.holds for group in groups)
    return holds if any(each is not Holds.ALL for each in holds) else ()


@dataclass(frozen=True)
class BlockCounts:
    """Slots of all groups: free, in block tables, only in the tree."""

    free: int
    live: int
    cached: int


class Slots:
    """RAM slots of one cache, and nodes that list them.

    A node has one reference per listed slot, a request one per slot in its tables. A node may list the slot of the tail
    that it extends: listings are counted.
    """

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
        """Free slots (of `groups`); False if they are in use, or descendants are in RAM."""
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
        """Unlist a slot, even if read."""
        if index in node.block_ids:
            self.take_from(node, index)
        self.prune(node)

    def vacate_last(self, index: int, tables: Iterable[BlockTable]) -> None:
        """Move the last slot's block to an earlier free slot, also in `tables`."""
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
        pool.release(target)
        pool.note_move(last, target)

    def gather(self, index: int) -> list[Copy]:
        """Move blocks to earlier free slots, up to the last slot that is read."""
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

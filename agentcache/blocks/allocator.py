"""Allocates and evicts block slots; resizes pools within the ledger's budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from agentcache.api.stats import BASE
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.ledger import UNBOUNDED, Account, Ledger
from agentcache.blocks.pool import Copy, Group, Holds, Slots
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.errors import BrokenInvariant, OutOfBlocks, OutOfMemory

_GROWTH = 0.5
_MIN_GROWTH_BLOCKS = 4


def window_blocks(window: int, at_once: int = BLOCK_SIZE) -> int:
    """Slots of one request's window, if a step computes `at_once` tokens."""
    return -(-window // BLOCK_SIZE) + -(-at_once // BLOCK_SIZE) + 1


def most_blocks(group: Group, at_once: int = BLOCK_SIZE) -> int | None:
    """Most slots of one request, if a step computes `at_once` tokens; None if they grow with its tokens."""
    if group.window is None:
        return None
    return window_blocks(group.window, at_once) + (FIRST_SEALED if group.holds is Holds.OPEN else 0)


def min_blocks(group: Group) -> int:
    return most_blocks(group) or 4


def blocks_of(group: Group, num_tokens: int) -> int:
    """Slots of one request with `num_tokens`."""
    blocks, most = -(-num_tokens // BLOCK_SIZE), most_blocks(group)
    if group.holds is Holds.FULL:
        blocks = max(0, blocks - FIRST_SEALED)
    return blocks if most is None else min(blocks, most)


def windows_bytes(groups: Sequence[Group], at_once: int = BLOCK_SIZE) -> int:
    return sum((most_blocks(each, at_once) or 0) * each.bytes_per_block for each in groups)


def least_bytes(groups: Sequence[Group]) -> int:
    return sum(min_blocks(group) * group.bytes_per_block for group in groups)


def _kind_name(group: Group) -> str:
    if group.holds is Holds.OPEN:
        return "open"
    return "full" if group.window is None else f"window{group.window}"


@dataclass(frozen=True)
class _Kind:
    members: tuple[int, ...]
    account: Account


class BlockAllocator:
    """Pools of one cache. Groups of one attention kind grow together and share an account; open ones have their own.

    `readers`: block tables of running requests, updated by the caller. `headroom` returns the machine's free bytes.
    `is_sparing`: evict unread blocks before growing.
    """

    def __init__(
        self,
        slots: Slots,
        eviction: EvictionOrder,
        ledger: Ledger,
        readers: Collection[BlockTables],
        headroom: Callable[[], int],
        name: str = BASE,
    ) -> None:
        self.slots = slots
        self._name = name
        self._readers = readers
        self.headroom = headroom
        self.is_sparing = False
        self._pools = slots.pools
        self._bytes = [group.bytes_per_block for group in slots.groups]
        self._eviction = eviction
        self._ledger = ledger
        self._least = [min_blocks(group) if name == BASE else 0 for group in slots.groups]
        names = [_kind_name(group) for group in slots.groups]
        kinds = {kind: self._open(kind, names) for kind in dict.fromkeys(names)}
        self._kinds = [kinds[kind] for kind in names]
        self._unbounded_bytes = sum(group.bytes_per_block for group in slots.groups if group.window is None)

    def _open(self, kind: str, names: Sequence[str]) -> _Kind:
        members = tuple(i for i, name in enumerate(names) if name == kind)
        account = self._ledger.open(
            f"{self._name}.{kind}",
            floor=sum(self._least[i] * self._bytes[i] for i in members),
            used=lambda: sum((self._pools[i].capacity - self._pools[i].num_free) * self._bytes[i] for i in members),
            give_way=self._give_way,
        )
        return _Kind(members, account)

    def allocate(self, index: int) -> int:
        """Return a slot. Raises OutOfBlocks, or OutOfMemory if the budget has room."""
        if not self._pools[index].num_free and not self._free_one(index):
            if self._growth_within(self._kinds[index].account.room, index):
                raise OutOfMemory("the machine has no memory left for what running requests need")
            budget = self._ledger.left_for(self._kinds[index].account.family)
            raise OutOfBlocks(f"the RAM budget of {budget} bytes is in use by running requests")
        return self._pools[index].allocate()

    def _free_one(self, index: int) -> bool:
        if self.is_sparing and self._eviction.free_one(index):
            return True
        if self._grow(index) or (self._has_share(index) and self._grow_at_others_expense(index)):
            return True
        return self._eviction.free_one(index) or self._grow_at_others_expense(index)

    def _has_share(self, index: int) -> bool:
        account = self._kinds[index].account
        return account.family in self._ledger.shares and account.share_left >= self._cost(index, 1)

    def preallocate(self, num_bytes: int) -> None:
        growing = (i for i, group in enumerate(self.slots.groups) if group.holds is not Holds.OPEN)
        last_of_kind = {self._kinds[index]: index for index in growing}.values()
        while self.capacity_bytes < num_bytes and sum(self._grow(index) for index in last_of_kind):
            continue

    def make_room(self, num_tokens: int) -> None:
        """Grow at other attention kinds' expense. No other request may run."""
        for index, group in enumerate(self.slots.groups):
            self.grow_to(index, blocks_of(group, num_tokens))

    def grow_to(self, index: int, capacity: int) -> bool:
        pool = self._pools[index]
        while pool.capacity < capacity and (self._grow(index) or self._grow_at_others_expense(index)):
            continue
        return pool.capacity >= capacity

    def _grow(self, index: int) -> bool:
        kind, capacity = self._kinds[index], self._pools[index].capacity
        wanted = _MIN_GROWTH_BLOCKS if self.is_sparing else max(_MIN_GROWTH_BLOCKS, int(capacity * _GROWTH))
        if kind.account.family in self._ledger.shares:
            wanted = 1  # spare slots would cost the family memory
        added = min(wanted, self._growth_within(min(kind.account.room, self._machine_room(kind)), index))
        if added < 1:
            return False
        kind.account.claim(self._cost(index, added))
        for i in kind.members:
            self._pools[i].grow(max(capacity + added, self._pools[i].capacity))
        return True

    def _grow_at_others_expense(self, index: int) -> bool:
        return self._kinds[index].account.ask(self._cost(index, 1)) and self._grow(index)

    def _cost(self, index: int, added: int) -> int:
        capacity = self._pools[index].capacity + added
        return sum(max(0, capacity - self._pools[i].capacity) * self._bytes[i] for i in self._kinds[index].members)

    def _machine_room(self, kind: _Kind) -> int:
        return max(self.headroom(), kind.account.floor - kind.account.claimed)

    def _growth_within(self, num_bytes: int, index: int) -> int:
        most = max(0, num_bytes // self._bytes[index])
        return bisect_right(range(1, most + 1), num_bytes, key=lambda added: self._cost(index, added))

    def affordable_growth(self, index: int, beside: int = 0) -> int:
        """Slots to grow by if loans return and `beside` bytes go elsewhere; negative if it must shrink."""
        kind = self._kinds[index]
        room = min(kind.account.room_without_loans - beside, self._machine_room(kind))
        return self._growth_within(room, index) if room >= 0 else room // sum(self._bytes[i] for i in kind.members)

    def note_use(self) -> None:
        """Have other caches of the share release memory first."""
        for kind in dict.fromkeys(self._kinds):
            self._ledger.note_use(kind.account)

    def _give_way(self, num_bytes: int, asker: Account) -> None:
        freed, is_own = 0, any(kind.account is asker for kind in self._kinds)
        # Only accounts with a share may move blocks being read, but not their own cache's: pending copies name slots.
        moves_read = asker.family in self._ledger.shares and not is_own
        while freed < num_bytes:
            donors = [i for i, kind in enumerate(self._kinds) if kind.account is not asker]
            if not is_own:  # shrink evenly
                donors.sort(key=lambda i: -self._pools[i].capacity)
            donor = next((i for i in donors if self._free_last(i, moves_read=moves_read)), None)
            if donor is None:
                return
            self._pools[donor].shrink(self._pools[donor].capacity - 1)
            self._kinds[donor].account.release(self._bytes[donor])
            freed += self._bytes[donor]

    def _free_last(self, index: int, *, moves_read: bool) -> bool:
        pool = self._pools[index]
        last = pool.capacity - 1
        if last < self._least[index] or (
            self.slots.is_read(index, last) and not (moves_read and self._is_still(last, index))
        ):
            return False
        if not pool.num_free and not self._eviction.free_one(index):
            return False
        if pool.ref_cnt(last):
            self.slots.vacate_last(index, [sequence.tables[index] for sequence in self._readers])
        return True

    def _is_still(self, block_id: int, index: int) -> bool:
        return not any(
            load.group == index and load.block_id == block_id for sequence in self._readers for load in sequence.loads
        )

    def gather(self) -> list[Copy]:
        """Move blocks that only the tree lists out of the last slots. Copy before `give_back` or any write."""
        return [copy for index in range(len(self._pools)) for copy in self.slots.gather(index)]

    def give_back(self) -> int:
        freed = 0
        for index, (pool, kind) in enumerate(zip(self._pools, self._kinds, strict=True)):
            capacity = max(pool.last_in_use + 1, min(self._least[index], pool.capacity))
            num_bytes = (pool.capacity - capacity) * self._bytes[index]
            pool.shrink(capacity)
            kind.account.release(num_bytes)
            freed += num_bytes
        return freed

    def close(self) -> None:
        for kind in dict.fromkeys(self._kinds):
            kind.account.release(kind.account.claimed)
            self._ledger.close(kind.account)

    @property
    def capacity_bytes(self) -> int:
        return sum(pool.capacity * size for pool, size in zip(self._pools, self._bytes, strict=True))

    def max_tokens(self) -> int:
        if not self._unbounded_bytes:
            return UNBOUNDED
        left = self._ledger.left_for(self._kinds[0].account.family)
        return max(0, (left - windows_bytes(self.slots.groups)) // self._unbounded_bytes) * BLOCK_SIZE

    def check_integrity(self) -> None:
        for kind in self._kinds:
            held = sum(self._pools[i].capacity * self._bytes[i] for i in kind.members)
            if held != kind.account.claimed:
                raise BrokenInvariant(f"{kind.account.kind} has claimed {kind.account.claimed} bytes and holds {held}")


class EvictionOrder:
    """Frees least recently used slots first, leaves before ancestors."""

    def __init__(self, slots: Slots, tree: RadixTree) -> None:
        self._slots = slots
        self._tree = tree

    def free_one(self, index: int) -> bool:
        while not self._slots.pools[index].num_free:
            if (victim := self._victim(index)) is not None:
                self._slots.free(victim, list(victim.block_ids))
            elif (holder := self._unread_holder(index)) is not None:
                self._slots.free(holder, [index])
            else:
                return False
        return True

    def _victim(self, index: int) -> Node | None:
        idle = (node for node in self._candidates(index) if self._is_idle(node) and not node.pending)
        # Last resort: pending writes have their own copy of the bytes.
        return next(idle, None) or next(filter(self._is_idle, self._candidates(index)), None)

    def _unread_holder(self, index: int) -> Node | None:
        holders = (node for node in self._tree.residents if index in node.block_ids)
        return next((node for node in holders if not self._slots.is_read(index, node.block_ids[index])), None)

    def _candidates(self, index: int) -> Iterator[Node]:
        holders = [node for node in self._tree.residents if index in node.block_ids]
        yield from holders
        yield from (_resident_leaf(node) for node in holders if not self._slots.is_read(index, node.block_ids[index]))

    def _is_idle(self, node: Node) -> bool:
        is_read = self._slots.is_read
        return not node.resident_children and not any(is_read(index, slot) for index, slot in node.block_ids.items())


def _resident_leaf(node: Node) -> Node:
    while node.resident_children:
        node = next(child for child in node.children if child.block_ids)
    return node

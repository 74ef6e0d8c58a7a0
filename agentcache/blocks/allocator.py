"""How many slots there are: they are allocated, and grow and shrink with what the ledger grants each attention kind.

Groups of one attention kind fill together and grow together; they have one account, whose floor is what a single short
sequence needs. Caches beside base's have none: they come and go, and grow at the expense of who holds their share. Who
gives way loses what was used least recently, wherever it lies: what lies in the last slots moves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from agentcache.blocks.eviction import EvictionOrder
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import BASE, Account, Ledger
from agentcache.blocks.sequence import CacheSequence, Copy
from agentcache.blocks.slots import Group, Slots
from agentcache.errors import BrokenInvariant, OutOfBlocks, OutOfMemory

_GROWTH = 0.5
_MIN_GROWTH_BLOCKS = 4
_UNBOUNDED = 2**62


def window_blocks(window: int, at_once: int = BLOCK_SIZE) -> int:
    """Slots that a sequence holds at a time where `window` tokens are read and so many are computed at once."""
    return -(-window // BLOCK_SIZE) + -(-at_once // BLOCK_SIZE) + 1


def min_blocks(group: Group) -> int:
    """Slots without which a group cannot serve a single sequence."""
    return 4 if group.window is None else window_blocks(group.window)


def windows_bytes(groups: Sequence[Group], at_once: int = BLOCK_SIZE) -> int:
    """Bytes of the windows of a long sequence of which so many tokens are computed at once."""
    return sum(window_blocks(each.window, at_once) * each.bytes_per_block for each in groups if each.window is not None)


def least_bytes(groups: Sequence[Group]) -> int:
    """Bytes without which there can be no cache: what a single short sequence needs."""
    return sum(min_blocks(group) * group.bytes_per_block for group in groups)


@dataclass(frozen=True)
class _Kind:
    """The groups of one attention kind, by index, and their account."""

    members: tuple[int, ...]
    account: Account


class BlockAllocator:
    """Slots for who asks, within the ledger's budget.

    Args:
        name: of the cache, as its accounts begin.

    Attributes:
        slots: those that there are.
        readers: the sequences that are open.
        headroom: tells how many bytes the machine can still give the cache, whatever the budget says.
        is_sparing: whether what nobody reads is evicted before anything grows, as while the machine is short of memory.
    """

    def __init__(self, slots: Slots, eviction: EvictionOrder, ledger: Ledger, name: str = BASE) -> None:
        self.slots = slots
        self._name = name
        self.readers: Collection[CacheSequence] = ()
        self.headroom: Callable[[], int] = lambda: _UNBOUNDED
        self.is_sparing = False
        self._pools = slots.pools
        self._bytes = [group.bytes_per_block for group in slots.groups]
        self._eviction = eviction
        self._ledger = ledger
        # Slots that stay whoever asks.
        self._least = [min_blocks(group) if name == BASE else 0 for group in slots.groups]
        windows = [group.window for group in slots.groups]
        kinds = {window: self._open(window) for window in dict.fromkeys(windows)}
        self._kinds = [kinds[window] for window in windows]  # of each group
        self._unbounded_bytes = sum(group.bytes_per_block for group in slots.groups if group.window is None)

    def _open(self, window: int | None) -> _Kind:
        members = tuple(i for i, group in enumerate(self.slots.groups) if group.window == window)
        account = self._ledger.open(
            f"{self._name}.full" if window is None else f"{self._name}.window{window}",
            floor=sum(self._least[i] * self._bytes[i] for i in members),
            used=lambda: sum((self._pools[i].capacity - self._pools[i].num_free) * self._bytes[i] for i in members),
            give_way=self._give_way,
        )
        return _Kind(members, account)

    # -- allocation ---------------------------------------------------------------------------------------------------

    def allocate(self, index: int) -> int:
        """A slot of group `index`: a free one, a new one within the budget, or the least recently used one.

        Raises OutOfBlocks; OutOfMemory where the budget has room and the machine has not.
        """
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
        """Whether its cache has a share of the budget, with room for one slot more; others may hold that meanwhile."""
        account = self._kinds[index].account
        return account.family in self._ledger.shares and account.share_left >= self._cost(index, 1)

    def preallocate(self, num_bytes: int) -> None:
        """Grow every attention kind in turn up to `num_bytes` in all, so that the first requests need not."""
        last_of_kind = {kind: index for index, kind in enumerate(self._kinds)}.values()
        while self.capacity_bytes < num_bytes and sum(self._grow(index) for index in last_of_kind):
            continue

    def make_room(self, num_tokens: int) -> None:
        """See to it that a sequence of `num_tokens` tokens fits, as far as the budget and those who read allow.

        For when nobody else runs: what one attention kind has taken for many short contexts then serves a long one.
        """
        for index, group in enumerate(self.slots.groups):
            needed = -(-num_tokens // BLOCK_SIZE)
            if group.window is not None:
                needed = min(needed, min_blocks(group))
            self.grow_to(index, needed)

    def grow_to(self, index: int, capacity: int) -> bool:
        """Have so many slots in group `index`, whoever has to give way; False if nobody can any more."""
        pool = self._pools[index]
        while pool.capacity < capacity and (self._grow(index) or self._grow_at_others_expense(index)):
            continue
        return pool.capacity >= capacity

    # -- growth -------------------------------------------------------------------------------------------------------

    def _grow(self, index: int) -> bool:
        """Grow all groups of one attention kind to one size, as they fill together; False if there is no room."""
        kind, capacity = self._kinds[index], self._pools[index].capacity
        wanted = _MIN_GROWTH_BLOCKS if self.is_sparing else max(_MIN_GROWTH_BLOCKS, int(capacity * _GROWTH))
        if kind.account.family in self._ledger.shares:
            wanted = 1  # what it took ahead of its needs, the others of its family would lack
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
        """Bytes by which the attention kind of group `index` grows if that group gets so many slots more."""
        capacity = self._pools[index].capacity + added
        return sum(max(0, capacity - self._pools[i].capacity) * self._bytes[i] for i in self._kinds[index].members)

    def _machine_room(self, kind: _Kind) -> int:
        """Bytes that the machine can give; what a short sequence needs was seen to at the start."""
        return max(self.headroom(), kind.account.floor - kind.account.claimed)

    def _growth_within(self, num_bytes: int, index: int) -> int:
        most = max(0, num_bytes // self._bytes[index])
        return bisect_right(range(1, most + 1), num_bytes, key=lambda added: self._cost(index, added))

    def affordable_growth(self, index: int, beside: int = 0) -> int:
        """Slots by which group `index` may grow within the budget, on loan or not, if its attention kind follows.

        Args:
            beside: bytes that others are to have meanwhile. Negative where they can have them only if it shrinks.
        """
        kind = self._kinds[index]
        room = min(kind.account.room_without_loans - beside, self._machine_room(kind))
        return self._growth_within(room, index) if room >= 0 else room // sum(self._bytes[i] for i in kind.members)

    def note_use(self) -> None:
        """Somebody uses the cache: of those that share a part of the budget, others give way first."""
        for kind in dict.fromkeys(self._kinds):
            self._ledger.note_use(kind.account)

    def _give_way(self, num_bytes: int, asker: Account) -> None:
        """Release slots beyond the floors, free ones first, and then those of what was used least recently and nobody
        reads: of the other attention kinds, for one of them.
        """
        freed, is_own = 0, any(kind.account is asker for kind in self._kinds)
        # Whoever has a share gets it, wherever those who read beyond it lie. Others take what lies in nobody's way; and
        # of an own sequence that is being opened, copies are due that name slots.
        moves_read = asker.family in self._ledger.shares and not is_own
        while freed < num_bytes:
            donors = [i for i, kind in enumerate(self._kinds) if kind.account is not asker]
            if (
                not is_own
            ):  # a kind needs room for one slot; where others need more, the groups stay as even as they can
                donors.sort(key=lambda i: -self._pools[i].capacity)
            donor = next((i for i in donors if self._free_last(i, moves_read=moves_read)), None)
            if donor is None:
                return
            self._pools[donor].shrink(self._pools[donor].capacity - 1)
            self._kinds[donor].account.release(self._bytes[donor])
            freed += self._bytes[donor]

    def _free_last(self, index: int, *, moves_read: bool) -> bool:
        """Have the last slot of a group free; what lies there moves to another one. False if it has to stay.

        Args:
            moves_read: whether it may move while sequences read it.
        """
        pool = self._pools[index]
        last = pool.capacity - 1
        if last < self._least[index] or (
            self.slots.is_read(index, last) and not (moves_read and self._is_still(last, index))
        ):
            return False
        if not pool.num_free and not self._eviction.free_one(index):
            return False
        if pool.ref_cnt(last):
            self.slots.vacate_last(index, [sequence.tables[index] for sequence in self.readers])
        return True

    def _is_still(self, block_id: int, index: int) -> bool:
        """Whether nothing is on its way from a file to the slot."""
        return not any(
            load.group == index and load.block_id == block_id for sequence in self.readers for load in sequence.loads
        )

    # -- giving memory back -------------------------------------------------------------------------------------------

    def gather(self) -> list[Copy]:
        """Move what only the tree lists out of the last slots, into free ones before them.

        The copies are due before anything else writes to a slot, and before `give_back`.
        """
        return [copy for index in range(len(self._pools)) for copy in self.slots.gather(index)]

    def give_back(self) -> int:
        """Have no slots behind the last one that is in use, but for the floors'; returns how many bytes that frees."""
        freed = 0
        for index, (pool, kind) in enumerate(zip(self._pools, self._kinds, strict=True)):
            capacity = max(pool.last_in_use + 1, min(self._least[index], pool.capacity))
            num_bytes = (pool.capacity - capacity) * self._bytes[index]
            pool.shrink(capacity)
            kind.account.release(num_bytes)
            freed += num_bytes
        return freed

    def close(self) -> None:
        """Give up everything, of a cache that nobody reads any more."""
        for kind in dict.fromkeys(self._kinds):
            kind.account.release(kind.account.claimed)
            self._ledger.close(kind.account)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(pool.capacity * size for pool, size in zip(self._pools, self._bytes, strict=True))

    def max_tokens(self) -> int:
        """Tokens that a single sequence can hold within the budget (all groups unbounded by windows taken together)."""
        if not self._unbounded_bytes:
            return _UNBOUNDED
        left = self._ledger.left_for(self._kinds[0].account.family)
        return max(0, (left - windows_bytes(self.slots.groups)) // self._unbounded_bytes) * BLOCK_SIZE

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless the slots are what the ledger says."""
        for kind in self._kinds:
            held = sum(self._pools[i].capacity * self._bytes[i] for i in kind.members)
            if held != kind.account.claimed:
                raise BrokenInvariant(f"{kind.account.kind} has claimed {kind.account.claimed} bytes and holds {held}")

"""Snapshots of recurrent state: which positions have one in RAM, and how much RAM they and running rows may take.

Recurrent layers keep one state of all tokens, not something a token. A snapshot is the state of all of them behind one
token; it belongs to the node of the radix tree that ends there. A request can go on only from a position that has a
snapshot, so that what lies behind the last one is computed again. None is ever missed: position 0 needs none.
Who holds references to a slot:

    node        one for the slot that it lists
    sequence    one for the slot that it starts from, until its row has taken the state
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from agentcache.blocks.ledger import STATE, Ledger
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.slots import Group
from agentcache.blocks.snapshot_plan import DEFAULT_INTERVAL
from agentcache.errors import BrokenInvariant, OutOfBlocks

# States that a running row holds at a time: that before the step under way, its result, and that of the step behind it.
ROW_STATES = 3
# What one request needs beside its own: the snapshot that it starts from, and the one that it leaves.
_LEAST_SLOTS = 2


def least_state_bytes(group: Group) -> int:
    """Bytes without which no request of a model with this group can run."""
    return (ROW_STATES + _LEAST_SLOTS) * group.bytes_per_block


class Snapshots:
    """Slots for snapshots under a budget of their own, in which running rows have their states too.

    Rows go first: snapshots that nobody is about to start from leave for them, least recently used first.

    Args:
        group: the state's cache group.
        index: its number, behind those of keys and values.
        budget: bytes for snapshots and rows.
        prune: forgets a node that may be of no use any more.
        every: tokens between two snapshots of a conversation (`snapshot_plan`).

    Attributes:
        evicted: counts the snapshots that left RAM for others.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        budget: int,
        ledger: Ledger,
        prune: Callable[[Node], None],
        every: int = DEFAULT_INTERVAL,
    ) -> None:
        self.group = group
        self.index = index
        self.every = every
        self.evicted = 0
        self._bytes = group.bytes_per_block
        budget = max(budget, least_state_bytes(group))
        self._most = budget // self._bytes
        self._pool = BlockPool()
        self._rows = 0
        # Nodes with a snapshot in RAM, least recently used first: those that have been replaced, and the others.
        self._spent: dict[Node, None] = {}
        self._fresh: dict[Node, None] = {}
        self._account = ledger.open(STATE, floor=budget)
        self._prune = prune

    # -- what there is ------------------------------------------------------------------------------------------------

    def has(self, node: Node) -> bool:
        """Whether there is a snapshot of the node's end, in RAM or on disk."""
        return node.state is not None or self.index in node.stored

    @property
    def nodes(self) -> Iterator[Node]:
        """Nodes with a snapshot in RAM, in the order in which they leave."""
        yield from self._spent
        yield from self._fresh

    @property
    def num_slots(self) -> int:
        """Slots that hold a snapshot, or are about to."""
        return self._pool.capacity - self._pool.num_free

    # -- rows ---------------------------------------------------------------------------------------------------------

    def enter(self, start: Node | None) -> int | None:
        """A row begins that goes on from the snapshot of a node: room for its states. Raises OutOfBlocks.

        Returns the slot that it starts from, with one reference; a new one, to be loaded, where RAM has no snapshot.
        """
        slot, is_absent = (None, False) if start is None else (start.state, start.state is None)
        if slot is not None:
            self._pool.retain(slot)  # so that it does not leave for the row that needs it
        try:
            self._make_room(ROW_STATES + is_absent)
        except OutOfBlocks:
            if slot is not None:
                self._pool.release(slot)
            raise
        self._rows += 1
        self._settle()
        return self.allocate() if is_absent else slot

    def leave(self) -> None:
        """A row has ended."""
        self._rows -= 1
        self._settle()

    # -- slots --------------------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """A slot, with one reference. Raises OutOfBlocks where rows, and who is about to start, need all there is."""
        self._make_room(1)
        if not self._pool.num_free:
            self._pool.grow(self._pool.capacity + 1)
        slot = self._pool.allocate()
        self._settle()
        return slot

    def is_free(self, slot: int) -> bool:
        """Whether nobody refers to the slot."""
        return self._pool.ref_cnt(slot) == 0

    def retain(self, slot: int) -> None:
        self._pool.retain(slot)

    def release(self, slot: int) -> None:
        self._pool.release(slot)
        self._settle()

    def list_in(self, node: Node, slot: int) -> None:
        """The caller's reference to a slot, which holds the state behind the node's last token, becomes the node's.

        Of a node that has one already, the old one stays.
        """
        if node.state is not None:
            self.release(slot)
        else:
            node.state = slot
        self.touch(node)

    def touch(self, node: Node) -> None:
        """Mark a snapshot as just used."""
        if node.state is not None:
            self._drop(node)
            self._fresh[node] = None

    def expire(self, node: Node) -> None:
        """Another snapshot has taken the place of this one, which leaves before those that none has replaced."""
        if node in self._fresh:
            self._drop(node)
            self._spent[node] = None

    def _drop(self, node: Node) -> None:
        self._spent.pop(node, None)
        self._fresh.pop(node, None)

    def evict(self, node: Node) -> bool:
        """Free the node's slot if nobody is about to start from it; False if somebody is. Files stay known."""
        if not self._is_idle(node):
            return False
        slot, node.state = node.state, None
        assert slot is not None  # it is idle
        self._drop(node)
        self.release(slot)
        self._prune(node)
        return True

    def _is_idle(self, node: Node) -> bool:
        return node.state is not None and self._pool.ref_cnt(node.state) == 1

    def _make_room(self, count: int) -> None:
        """Have snapshots leave until so many more states fit. Raises OutOfBlocks, and then none has left."""
        short = self._states + count - self._most
        idle = [node for node in self.nodes if self._is_idle(node)][: max(0, short)]
        if len(idle) < short:
            raise OutOfBlocks(f"the budget of {self._most} recurrent states is in use by running requests")
        self.evicted += sum(self.evict(node) for node in idle)

    @property
    def _states(self) -> int:
        return self._rows * ROW_STATES + self.num_slots

    def _settle(self) -> None:
        self._account.settle(self._states * self._bytes)

    def check_integrity(self, rows: int, started: Iterable[int], nodes: Iterable[Node]) -> None:
        """Raise BrokenInvariant unless all is accounted for.

        Args:
            rows: that run.
            started: slots that sequences start from.
            nodes: all of the tree.
        """
        self._pool.check_integrity()
        listed = {node: node.state for node in nodes if node.state is not None}
        if Counter(listed.keys()) != Counter(self.nodes):
            raise BrokenInvariant("the list of snapshots is wrong")
        expected = Counter(listed.values()) + Counter(started)
        if Counter({slot: self._pool.ref_cnt(slot) for slot in range(self._pool.capacity)}) != expected:
            raise BrokenInvariant("reference counts of snapshots are wrong")
        if rows != self._rows:
            raise BrokenInvariant(f"{self._rows} rows have room for their states, and {rows} run")
        if self._account.claimed != self._states * self._bytes or self._states > self._most:
            raise BrokenInvariant("recurrent states take more than they have claimed, or may")

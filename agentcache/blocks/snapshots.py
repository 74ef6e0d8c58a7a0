"""Checkpoints of recurrent state in RAM, and the budget that they share with running requests.

A checkpoint is the state of all recurrent layers after one token, and belongs to the tree node that ends there. That
node has one reference to its slot. A request has one to the slot that it starts from, until copied to its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from agentcache.api.stats import STATE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.slots import Group
from agentcache.blocks.snapshot_plan import DEFAULT_INTERVAL
from agentcache.errors import BrokenInvariant, OutOfBlocks

# The current step's input and result, and the next one's result.
ROW_STATES = 3
# One request also starts from a checkpoint and creates one.
_LEAST_SLOTS = 2


def least_state_bytes(group: Group) -> int:
    return (ROW_STATES + _LEAST_SLOTS) * group.bytes_per_block


class Snapshots:
    """Checkpoint slots under a separate budget, which also covers running requests.

    Unused checkpoints are evicted for running requests, least recently used first.

    Args:
        index: index of the state's group, after the KV groups.
        budget: bytes for checkpoints and rows.
        every: tokens between two checkpoints.
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
        # Least recently used first: superseded ones, and the rest.
        self._spent: dict[Node, None] = {}
        self._fresh: dict[Node, None] = {}
        self._account = ledger.open(STATE, floor=budget)
        self._prune = prune

    def has(self, node: Node) -> bool:
        return node.state is not None or self.index in node.stored

    @property
    def nodes(self) -> Iterator[Node]:
        yield from self._spent
        yield from self._fresh

    @property
    def num_slots(self) -> int:
        return self._pool.capacity - self._pool.num_free

    def enter(self, start: Node | None) -> int | None:
        """Reserve room for a row that starts from the node's checkpoint, if any. Raises OutOfBlocks.

        Returns its slot, with one reference; a new one to load into if RAM has none.
        """
        slot, is_absent = (None, False) if start is None else (start.state, start.state is None)
        if slot is not None:
            self._pool.retain(slot)  # against eviction below
        try:
            self._make_room(ROW_STATES + is_absent)
        except OutOfBlocks:
            if slot is not None:
                self._pool.release(slot)
            raise
        self._rows += 1
        self._update_account()
        return self.allocate() if is_absent else slot

    def leave(self) -> None:
        self._rows -= 1
        self._update_account()

    def allocate(self) -> int:
        self._make_room(1)
        if not self._pool.num_free:
            self._pool.grow(self._pool.capacity + 1)
        slot = self._pool.allocate()
        self._update_account()
        return slot

    def is_free(self, slot: int) -> bool:
        return self._pool.ref_cnt(slot) == 0

    def retain(self, slot: int) -> None:
        self._pool.retain(slot)

    def release(self, slot: int) -> None:
        self._pool.release(slot)
        self._update_account()

    def list_in(self, node: Node, slot: int) -> None:
        """List a slot; the node takes over the caller's reference. An existing checkpoint stays."""
        if node.state is not None:
            self.release(slot)
        else:
            node.state = slot
        self.touch(node)

    def touch(self, node: Node) -> None:
        if node.state is not None:
            self._drop(node)
            self._fresh[node] = None

    def expire(self, node: Node) -> None:
        if node in self._fresh:
            self._drop(node)
            self._spent[node] = None

    def _drop(self, node: Node) -> None:
        self._spent.pop(node, None)
        self._fresh.pop(node, None)

    def evict(self, node: Node) -> bool:
        """Free the node's slot; False if a request starts from it. Files stay known."""
        if not self._is_idle(node):
            return False
        slot, node.state = node.state, None
        assert slot is not None
        self._drop(node)
        self.release(slot)
        self._prune(node)
        return True

    def _is_idle(self, node: Node) -> bool:
        return node.state is not None and self._pool.ref_cnt(node.state) == 1

    def _make_room(self, count: int) -> None:
        """Raises OutOfBlocks without evicting any."""
        short = self._states + count - self._most
        idle = [node for node in self.nodes if self._is_idle(node)][: max(0, short)]
        if len(idle) < short:
            raise OutOfBlocks(f"the budget of {self._most} recurrent states is in use by running requests")
        self.evicted += sum(self.evict(node) for node in idle)

    @property
    def _states(self) -> int:
        return self._rows * ROW_STATES + self.num_slots

    def _update_account(self) -> None:
        self._account.set_bytes(self._states * self._bytes)

    def check_integrity(self, rows: int, started: Iterable[int], nodes: Iterable[Node]) -> None:
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

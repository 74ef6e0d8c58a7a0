"""Checkpoints of recurrent state: slots in RAM, where they are taken, which stay on disk.

They are as large as the KV of thousands of tokens, so few: at an interval, where prompts probably branch (Marconi,
arXiv 2411.19379), at a turn's end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from agentcache.api.stats import STATE
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import BlockPool, Group
from agentcache.blocks.radix_tree import Node
from agentcache.errors import BrokenInvariant, OutOfBlocks

# Input and result of the current step, result of the next.
ROW_STATES = 3
# A request also starts from a checkpoint and creates one.
_LEAST_SLOTS = 2
MOST_SAVED = 3
DEFAULT_INTERVAL = 2048  # also the minimum
_INTERVAL_WITHOUT_ATTENTION = 8192
# Cost on disk: twice the same tokens' KV, a fifth of it for system prompts and idle agents.
_COST = 2 / 1.25


def least_state_bytes(group: Group) -> int:
    return (ROW_STATES + _LEAST_SLOTS) * group.bytes_per_block


def interval_for(state_bytes: int, bytes_per_token: int) -> int:
    """Return the interval in tokens. `bytes_per_token` is 0 without attention."""
    if not bytes_per_token:
        return _INTERVAL_WITHOUT_ATTENTION
    tokens = math.ceil(state_bytes / (_COST * bytes_per_token))
    return max(DEFAULT_INTERVAL, whole_blocks(tokens + BLOCK_SIZE - 1))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


class Snapshots:
    """Checkpoint slots. Their budget includes states of running requests, which evict unused ones.

    A node has one reference to its slot, a request one to the slot that it starts from, until its row has copied it.
    `every`: tokens between checkpoints.
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
        """Reserve room for a row; return the slot of `start`, new if not in RAM. Raises OutOfBlocks."""
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
        """List a slot with the caller's reference; an existing checkpoint stays."""
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
        """Free the node's slot; False if a request starts from it."""
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
            raise BrokenInvariant("the list of checkpoints is wrong")
        expected = Counter(listed.values()) + Counter(started)
        if Counter({slot: self._pool.ref_cnt(slot) for slot in range(self._pool.capacity)}) != expected:
            raise BrokenInvariant("reference counts of checkpoints are wrong")
        if rows != self._rows:
            raise BrokenInvariant(f"{self._rows} rows have reserved room for their states, but {rows} run")
        if self._account.claimed != self._states * self._bytes or self._states > self._most:
            raise BrokenInvariant("recurrent states exceed their claim or their budget")


@dataclass(frozen=True)
class SnapshotPlan:
    """Where a request takes checkpoints, besides its end. `lasting`: end of the system prompt; 0 for none."""

    every: int
    borders: frozenset[int] = frozenset()
    lasting: int = 0

    @classmethod
    def of(
        cls,
        every: int,
        start: int,
        num_tokens: int,
        system_tokens: int,
        known_tokens: int,
        base_tokens: int = 0,
        repeated_tokens: int = 0,
    ) -> SnapshotPlan:
        """Return the plan of a prompt computed from `start` on; `base_tokens` precede the adapter's start.

        Other conversations probably branch after `known_tokens`, whose KV is cached. `repeated_tokens` as in
        `SubmittedRequest`.
        """
        # Cut at block borders, a prompt gives the same bits as uncut.
        lasting, branch = whole_blocks(system_tokens), whole_blocks(known_tokens)
        # A repeated prompt computes its last token.
        last = whole_blocks(max(0, num_tokens - 1))
        # Each cut costs a step, too much in a short turn.
        wanted = {branch} if last <= repeated_tokens < num_tokens else {branch, last}
        borders = {border for border in wanted if border - start >= BLOCK_SIZE}
        return cls(every, frozenset(borders | {lasting, base_tokens, repeated_tokens} - {0}), lasting)

    def next_after(self, num_tokens: int) -> int:
        regular = (num_tokens // self.every + 1) * self.every
        return min([regular, *(border for border in self.borders if border > num_tokens)])

    def wants(self, num_tokens: int) -> bool:
        return num_tokens > 0 and (num_tokens % self.every == 0 or num_tokens in self.borders)


def choose_saved(
    found: Iterable[int],
    saved: Collection[int],
    *,
    lasting: int,
    num_tokens: int,
    every: int,
    returns: Collection[int] = (),
    final: bool = False,
) -> list[int]:
    """Choose at most `MOST_SAVED` checkpoints to keep on disk, by position.

    Args:
        found: in RAM or on disk.
        saved: on disk.
        lasting: as in `SnapshotPlan`.
        every: tokens that a crash may cost, unless `final`.
        returns: other positions where the next prompt may branch.
    """
    found = sorted(found)
    ends = sorted({*returns, num_tokens})
    chosen = set(saved)
    for end in ends:  # one may serve later ends
        newest, last = _last(found, end), _last(chosen, end)
        if newest > last and (final or end - last > every):
            chosen.add(newest)
    # A short system prompt is cheaper to compute.
    if lasting in found and (lasting in saved or 2 * lasting >= every):
        chosen.add(lasting)
    there = [position for position in found if position in chosen]
    # Most valuable first.
    wanted = [_last(there, num_tokens), lasting, *(_last(there, end) for end in reversed(ends)), *reversed(there)]
    return sorted([position for position in dict.fromkeys(wanted) if position in there][:MOST_SAVED])


def _last(positions: Iterable[int], end: int) -> int:
    return max((position for position in positions if position <= end), default=0)

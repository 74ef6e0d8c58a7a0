"""Sequences in the prefix cache, while files get lost and blocks leave RAM."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from agentcache.blocks.allocator import min_blocks
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.radix_tree import Node
from tests.blocks.borrower import Borrower
from tests.blocks.sequence_machine import PICK, SequenceMachine


class CacheMachine(SequenceMachine):
    """All that can happen to a prefix cache."""

    # -- files ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.nodes())
    @rule(which=PICK)
    def save(self, which: int) -> None:
        node = self.nodes()[which % len(self.nodes())]
        self.save_blocks([PathBlock(node, tuple(node.block_ids))])

    @precondition(lambda self: self.nodes())
    @rule(which=PICK, what=st.sampled_from(["lose_file", "drop_tail", "evict", "evict", "evict_part", "evict_all"]))
    def disturb(self, which: int, what: str) -> None:
        getattr(self, what)(which)

    def lose_file(self, which: int) -> None:
        stored = [(node, index) for node in self.nodes() for index in node.stored]
        if not stored:
            return
        node, index = stored[which % len(stored)]
        del self.files[node.chain, index]
        self.cache.mark_missing(node, index)

    def drop_tail(self, which: int) -> None:
        """Of one group only, as when another agent names the others."""
        tails = [(node, index) for node in self.nodes() if not node.is_full for index in range(len(self.groups))]
        if not tails:
            return
        tail, index = tails[which % len(tails)]
        others = tail.block_ids.keys() - {index}
        if index in tail.stored:
            del self.files[tail.chain, index]
            self.cache.mark_missing(tail, index)
        self.cache.slots.drop(tail, index)
        assert tail.block_ids.keys() == others

    @precondition(lambda self: self.state is not None)
    @rule(which=PICK)
    def evict_state(self, which: int) -> None:
        snapshots = self.cache.snapshots
        assert snapshots is not None
        found = list(snapshots.nodes)
        if not found:
            return
        node = found[which % len(found)]
        is_started_from = any(running.sequence.state == node.state for running in self.running)
        assert snapshots.evict(node) is not is_started_from
        assert (node.state is None) is not is_started_from

    # -- RAM --------------------------------------------------------------------------------------------------------

    def evict(self, which: int) -> None:
        node = self.nodes()[which % len(self.nodes())]
        self.check_evict(node, None, list(node.block_ids))

    def evict_part(self, which: int) -> None:
        node = self.nodes()[which % len(self.nodes())]
        index = which % max(1, len(self.groups))
        self.check_evict(node, (index,), [index] if index in node.block_ids else [])

    def check_evict(self, node: Node, groups: tuple[int, ...] | None, held: list[int]) -> None:
        free, before = self.cache.count_blocks().free, dict(node.block_ids)
        is_kept = node.pending or any(child.block_ids for child in node.children)
        is_kept = is_kept or any(self.is_read(index, before[index]) for index in held)
        assert self.cache.slots.evict(node, groups) is not bool(is_kept)
        if is_kept:
            assert node.block_ids == before
            assert self.cache.count_blocks().free == free
        else:
            assert node.block_ids == {index: before[index] for index in before.keys() - set(held)}

    def evict_all(self, _: int) -> None:
        """Only what is read, is being written, or is in front of such a block stays."""
        evicted = 1
        while evicted:
            evicted = sum(self.cache.slots.evict(node) for node in list(self.cache.tree.residents))
        for node in self.cache.tree.residents:
            is_read = any(self.is_read(index, block_id) for index, block_id in node.block_ids.items())
            assert node.pending or is_read or any(child.block_ids for child in node.children)

    @rule(is_sparing=st.booleans())
    def give_back(self, is_sparing: bool) -> None:
        """Slots that are read stay where they are, and nothing that is cached is lost."""
        held = {node: set(node.block_ids) for node in self.nodes()}
        self.cache.allocator.is_sparing = is_sparing
        copies = self.cache.allocator.gather()
        for copy in copies:
            assert not self.is_read(copy.group, copy.target)
            self.arena.slot(copy.group, copy.target)[:] = self.arena.slot(copy.group, copy.source)
            self.arena.slot(copy.group, copy.source)[:] = [-2] * BLOCK_SIZE
        before = self.cache.allocator.capacity_bytes
        assert self.cache.allocator.give_back() == before - self.cache.allocator.capacity_bytes
        assert {node: set(node.block_ids) for node in self.nodes()} == held
        for index, pool in enumerate(self.cache.slots.pools):
            first_free = next((slot for slot in range(pool.capacity) if not pool.ref_cnt(slot)), pool.capacity)
            behind = [slot for slot in range(first_free, pool.capacity) if pool.ref_cnt(slot)]
            assert not behind or self.is_read(index, behind[-1]) or pool.capacity <= min_blocks(self.groups[index])

    @rule(part=st.sampled_from([0.0, 0.3, 1.0]))
    def lend(self, part: float) -> None:
        """All who read keep what they read; the machine's checks do not know that anything is lent."""
        Borrower(self.cache.ledger).borrow(int(part * self.cache.ledger.budget))

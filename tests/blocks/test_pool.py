"""Reference counts against a dict, and block tables against a list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant, OutOfBlocks
from tests.examples import examples

PICK = st.integers(0, 100)


class PoolMachine(RuleBasedStateMachine):
    """`counts` has the slots in use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(2)
        self.counts: dict[int, int] = {}

    @rule()
    def allocate(self) -> None:
        if len(self.counts) == self.pool.capacity:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return
        block_id = self.pool.allocate()
        assert block_id not in self.counts
        assert 0 <= block_id < self.pool.capacity
        self.counts[block_id] = 1

    @precondition(lambda self: self.counts)
    @rule(which=PICK)
    def retain(self, which: int) -> None:
        block_id = sorted(self.counts)[which % len(self.counts)]
        self.pool.retain(block_id)
        self.counts[block_id] += 1

    @precondition(lambda self: self.counts)
    @rule(which=PICK)
    def release(self, which: int) -> None:
        block_id = sorted(self.counts)[which % len(self.counts)]
        self.pool.release(block_id)
        self.counts[block_id] -= 1
        if not self.counts[block_id]:
            del self.counts[block_id]

    @precondition(lambda self: self.pool.num_free)
    @rule(which=PICK)
    def touch_a_free_one(self, which: int) -> None:
        free = [block_id for block_id in range(self.pool.capacity) if block_id not in self.counts]
        for touch in (self.pool.retain, self.pool.release):
            with pytest.raises(BrokenInvariant):
                touch(free[which % len(free)])

    @rule(more=st.integers(-3, 3))
    def grow(self, more: int) -> None:
        capacity = self.pool.capacity
        self.pool.grow(capacity + more)
        assert self.pool.capacity == max(capacity, capacity + more)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free + len(self.counts) == self.pool.capacity
        for block_id in range(self.pool.capacity):
            assert self.pool.ref_cnt(block_id) == self.counts.get(block_id, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)


def test_low_slots_are_used_first() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]


def test_the_first_free_slot_before_another_is_taken() -> None:
    pool = BlockPool(5)
    for _ in range(5):
        pool.allocate()
    for slot in (4, 0, 2):
        pool.release(slot)
    assert [pool.allocate_before(3), pool.allocate_before(3), pool.allocate_before(3)] == [0, 2, None]


def test_integrity_notices_a_wrong_free_list() -> None:
    pool = BlockPool(2)
    pool._free.append(0)
    with pytest.raises(BrokenInvariant, match="twice"):
        pool.check_integrity()
    pool._free[:] = [0]
    with pytest.raises(BrokenInvariant, match="disagree"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["append", "drop", "replace"]), st.integers(0, 12)), max_size=30))
def test_a_table_is_a_list_that_lost_its_beginning(operations: list[tuple[str, int]]) -> None:
    table, slots, start = BlockTable(), list[int](), 0
    for count, (operation, number) in enumerate(operations):
        if operation == "append":
            table.block_ids.append(count)
            slots.append(count)
        elif operation == "replace" and start <= number < len(slots):
            table.replace(number, count)
            slots[number] = count
        elif operation == "drop":
            end = min(max(number, start), len(slots))
            assert table.drop_before(number) == slots[start:end]
            start = end
        assert (table.first_block, table.end_block) == (start, len(slots))
        assert [table.block_id(position) for position in range(start, len(slots))] == slots[start:]

"""Two kinds of cache on one budget: what each may take of the other, and what is left of one that is closed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.api.stats import BASE, RESIDUAL
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import OutOfBlocks
from tests.blocks.cache_model import Arena, FakeGroup

ROOT = "root"
BUDGET, SHARE = 4000, 800
BASE_GROUPS = (FakeGroup("full", None, 100), FakeGroup("sliding", 300, 70))
RESIDUAL_GROUPS = (FakeGroup("full", None, 20), FakeGroup("sliding", 300, 7))


class Caches:
    """Base's cache and two adapters', on one ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger(BUDGET, {RESIDUAL: SHARE})
        self.base = PrefixCache(BASE_GROUPS, self.ledger)
        self.adapters = [PrefixCache(RESIDUAL_GROUPS, self.ledger, name=f"residual.{each}") for each in "xy"]

    def check(self) -> None:
        for cache in (self.base, *self.adapters):
            cache.check_integrity()


def run(cache: PrefixCache, num_blocks: int, seed: int) -> BlockTables | None:
    """A request that has computed so many blocks; None where there is no room for it."""
    ids = random.Random(seed).choices(range(1000), k=num_blocks * BLOCK_SIZE)
    try:
        sequence = cache.open(ROOT, cache.match_prefix(ROOT, ids, len(ids)))
    except OutOfBlocks:
        return None
    try:
        for begin in range(sequence.num_tokens, len(ids), BLOCK_SIZE):
            cache.reserve(sequence, BLOCK_SIZE)
            cache.advance(sequence, ids[begin : begin + BLOCK_SIZE])
            cache.leave_window(sequence)
    except OutOfBlocks:
        cache.abandon(sequence)
        return None
    return sequence


def fill(cache: PrefixCache, num_sequences: int, num_blocks: int = 6) -> None:
    for seed in range(num_sequences):
        sequence = run(cache, num_blocks, seed)
        assert sequence is not None
        cache.close(sequence)


def test_base_uses_what_residuals_do_not_and_gives_it_back() -> None:
    caches = Caches()
    fill(caches.base, 12)
    assert caches.ledger.left_for(BASE) == BUDGET and caches.base.allocator.capacity_bytes > BUDGET - SHARE
    fill(caches.adapters[0], 8)
    assert SHARE - 20 - 7 < caches.adapters[0].allocator.capacity_bytes <= SHARE, "its share, that base had"
    assert caches.base.allocator.capacity_bytes <= BUDGET - caches.adapters[0].allocator.capacity_bytes
    caches.check()


def test_pressure_on_base_takes_nothing_from_residuals() -> None:
    caches = Caches()
    fill(caches.adapters[0], 4)
    before = caches.adapters[0].count_blocks(), caches.adapters[0].allocator.capacity_bytes
    fill(caches.base, 20)
    assert caches.base.slots.evicted_blocks > 0
    assert (caches.adapters[0].count_blocks(), caches.adapters[0].allocator.capacity_bytes) == before
    caches.check()


def test_pressure_on_residuals_takes_nothing_that_is_bases() -> None:
    """Base holds what is left beside their share, and no more: all they need they take from one another."""
    caches = Caches()
    fill(caches.adapters[0], 6)
    fill(caches.base, 20)
    before = caches.base.count_blocks(), caches.base.allocator.capacity_bytes
    fill(caches.adapters[1], 8)
    assert (caches.base.count_blocks(), caches.base.allocator.capacity_bytes) == before
    assert caches.adapters[1].count_blocks().cached > 0, "the other adapter has made room"
    caches.check()


def test_residuals_evict_their_own_only_when_their_share_is_full() -> None:
    caches = Caches()
    fill(caches.base, 20)
    fill(caches.adapters[0], 4)
    assert caches.adapters[0].slots.evicted_blocks == 0


def write_all(cache: PrefixCache, arena: Arena, running: Sequence[BlockTables]) -> None:
    """What sequences have computed, into the slots that they read."""
    for sequence in running:
        places = arena.numbers(ROOT, sequence.token_ids)
        for index, table in enumerate(sequence.tables):
            for position, block_id in enumerate(table.block_ids, table.first_block):
                arena.slot(index, block_id)[:] = places[position * BLOCK_SIZE :][:BLOCK_SIZE]


def check_all(cache: PrefixCache, arena: Arena, running: Sequence[BlockTables]) -> None:
    for sequence in running:
        places = arena.numbers(ROOT, sequence.token_ids)
        for index, table in enumerate(sequence.tables):
            for position, block_id in enumerate(table.block_ids, table.first_block):
                assert arena.slot(index, block_id) == [*places[position * BLOCK_SIZE :][:BLOCK_SIZE]]


def test_who_reads_loses_nothing_and_the_other_kind_has_to_wait() -> None:
    caches = Caches()
    running = [each for seed in range(8) if (each := run(caches.base, 6, seed)) is not None]
    read = [[len(table.block_ids) for table in each.tables] for each in running]
    arena = Arena(caches.base.slots.pools)
    write_all(caches.base, arena, running)
    while run(caches.adapters[0], 1, random.randrange(1 << 30)) is not None:
        pass
    assert [[len(table.block_ids) for table in each.tables] for each in running] == read
    check_all(caches.base, arena, running)
    caches.check()


def test_who_reads_moves_out_of_the_others_share() -> None:
    """Base has all there is; who still reads lies at the end of it. What others have left is room enough."""
    caches = Caches()
    sequences = [each for seed in range(9) if (each := run(caches.base, 3, seed)) is not None]
    assert caches.base.allocator.capacity_bytes > BUDGET - SHARE
    for sequence in sequences[:-2]:
        caches.base.close(sequence)
    running = sequences[-2:]
    last_read = max(slot for each in running for slot in each.tables[0].block_ids)
    arena = Arena(caches.base.slots.pools)
    write_all(caches.base, arena, running)
    fill(caches.adapters[0], 8)
    assert caches.adapters[0].allocator.capacity_bytes > SHARE - 20 - 7
    assert caches.base.slots.pools[0].capacity <= last_read, "that slot is gone"
    check_all(caches.base, arena, running)
    caches.check()


def test_a_slot_that_a_file_is_being_read_into_stays_where_it_is() -> None:
    """The reader writes to a slot number: after a move it would overwrite the block that takes the slot."""
    caches = Caches()
    *running, last = [each for seed in range(9) if (each := run(caches.base, 3, seed)) is not None]
    assert caches.base.allocator.capacity_bytes > BUDGET - SHARE
    ids = list(last.token_ids)
    for block in caches.base.close(last):
        for index in tuple(block.node.block_ids):
            caches.base.mark_stored(block.node, index)
        caches.base.slots.evict(block.node)
    loading = caches.base.open(ROOT, caches.base.match_prefix(ROOT, ids, len(ids)))
    slots = {(load.group, load.node): load.block_id for load in loading.loads}
    assert max(slots.values()) > max(slot for each in running for slot in each.tables[0].block_ids)
    for sequence in running:
        caches.base.close(sequence)
    for seed in range(8):  # which may find too little room
        if (sequence := run(caches.adapters[0], 6, seed)) is not None:
            caches.adapters[0].close(sequence)
    for (index, node), slot in slots.items():
        assert loading.tables[index].block_id(node.position) == slot
        assert slot < caches.base.slots.pools[index].capacity
    caches.base.abandon(loading)
    caches.check()


def test_what_was_used_least_recently_makes_room_wherever_it_lies() -> None:
    caches = Caches()
    fill(caches.base, 9, 3)
    ids = [random.Random(seed).choices(range(1000), k=3 * BLOCK_SIZE) for seed in range(9)]

    def cached() -> list[bool]:
        found = [caches.base.match_prefix(ROOT, each, len(each)).num_tokens for each in ids]
        return [num_tokens == 3 * BLOCK_SIZE for num_tokens in found]

    before = cached()
    last = max(seed for seed in range(9) if before[seed])
    first = min(seed for seed in range(9) if before[seed])
    caches.base.touch(caches.base.match_prefix(ROOT, ids[first], 3 * BLOCK_SIZE))
    fill(caches.adapters[0], 8)
    after = cached()
    assert after[first] and after[last] and sum(after) < sum(before)
    assert [seed for seed in range(9) if before[seed] and not after[seed]][0] == first + 1
    caches.check()


def test_a_closed_cache_leaves_nothing() -> None:
    caches = Caches()
    fill(caches.adapters[0], 5)
    caches.adapters[0].allocator.close()
    assert not [each for each in caches.ledger.accounts if each.kind.startswith("residual.x")]
    assert caches.ledger.share_left(RESIDUAL) == SHARE
    again = PrefixCache(RESIDUAL_GROUPS, caches.ledger, name="residual.x")
    fill(again, 1)
    again.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), max_size=25))
def test_any_traffic(requests: Sequence[tuple[int, int, bool]]) -> None:
    caches = Caches()
    running: list[tuple[PrefixCache, BlockTables]] = []
    for seed, (which, num_blocks, stays) in enumerate(requests):
        cache = (caches.base, *caches.adapters)[which]
        sequence = run(cache, num_blocks, seed)
        if sequence is not None and stays:
            running.append((cache, sequence))
        elif sequence is not None:
            cache.close(sequence)
        caches.check()
    for cache, sequence in running:
        cache.close(sequence)
    caches.check()


def test_a_share_that_is_exceeded_is_noticed() -> None:
    caches = Caches()
    account = next(each for each in caches.ledger.accounts if each.kind == "residual.x.full")
    account.claimed = SHARE + 1
    with pytest.raises(Exception, match="share of residual is exceeded"):
        caches.ledger.check_integrity()


def test_adapters_fill_their_share_before_one_evicts() -> None:
    """What none of them uses is there for the others."""
    caches = Caches()
    fill(caches.adapters[0], 1, 20)
    fill(caches.adapters[1], 2, 7)
    assert [cache.slots.evicted_blocks for cache in caches.adapters] == [0, 0]
    used = sum(each.used for each in caches.ledger.accounts if each.family == RESIDUAL)
    assert used > 0.8 * SHARE


def test_of_adapters_the_one_used_least_recently_gives_way() -> None:
    caches = Caches()
    first, second = caches.adapters
    third = PrefixCache(RESIDUAL_GROUPS, caches.ledger, name="residual.z")
    fill(first, 1, 16)
    fill(second, 1, 16)
    before = second.count_blocks().cached
    fill(first, 1, 16)  # again: all of it is there
    fill(third, 1, 12)
    assert first.slots.evicted_blocks == 0
    assert second.count_blocks().cached < before
    caches.check()

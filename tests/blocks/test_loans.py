"""Bytes that the cache lends: never at the cost of those who read, and back as soon as they need them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import OutOfBlocks
from agentcache.plans.room import has_room
from tests.blocks.borrower import Borrower, leave
from tests.blocks.cache_model import FakeGroup
from tests.blocks.test_resize import GROUPS, ROOT, run

BUDGET = 4000


def lend(cache: PrefixCache, num_bytes: int) -> Borrower:
    """Somebody who borrows so many bytes, in place of what is lent now."""
    borrower = Borrower(cache.ledger)
    borrower.borrow(num_bytes)
    return borrower


def tables(sequence: BlockTables) -> list[list[int]]:
    return [list(table.block_ids) for table in sequence.tables]


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 4), st.integers(0, BUDGET), st.integers(0, 12))
def test_any_loan(idle: list[int], running: int, num_bytes: int, later: int) -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    for seed, num_blocks in enumerate(idle):
        cache.close(run(cache, num_blocks, seed))
    sequence = run(cache, running, seed=9)
    read = tables(sequence)
    loan = lend(cache, num_bytes)
    cache.check_integrity()
    lent = loan.lent
    assert tables(sequence) == read, "nobody loses what he reads"
    assert lent == num_bytes or sum(each.held for each in cache.ledger.sharing) == BUDGET
    cache.close(sequence)
    try:
        cache.close(run(cache, later, seed=10))
    except OutOfBlocks:
        assert loan.lent == 0, "first of all the loan ends"
    cache.check_integrity()
    assert loan.ended == (loan.lent == 0 < lent)


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 8), st.integers(0, BUDGET))
def test_as_much_as_can_be_given_up(idle: list[int], running: int, num_bytes: int) -> None:
    lending, shrinking = PrefixCache(GROUPS, Ledger(BUDGET)), PrefixCache(GROUPS, Ledger(BUDGET))
    for cache in (lending, shrinking):
        for seed, num_blocks in enumerate(idle):
            cache.close(run(cache, num_blocks, seed))
        run(cache, running, seed=9)
    loan = lend(lending, num_bytes)
    assert (loan.lent == num_bytes) == leave(shrinking, BUDGET - num_bytes)
    assert lending.allocator.capacity_bytes == shrinking.allocator.capacity_bytes


def test_who_runs_gets_it_back() -> None:
    """As if nothing had been lent: the same number of tokens fits, and admission counts on it."""
    plain, lending = PrefixCache(GROUPS, Ledger(BUDGET)), PrefixCache(GROUPS, Ledger(BUDGET))
    loan = lend(lending, 2000)
    assert loan.lent == 2000
    assert lending.allocator.max_tokens() == plain.allocator.max_tokens()
    blocks = plain.allocator.max_tokens() // BLOCK_SIZE
    nothing = lending.match_prefix(ROOT, [], 0)
    assert has_room(lending.allocator, [], nothing, blocks * BLOCK_SIZE) == has_room(
        plain.allocator, [], nothing, blocks * BLOCK_SIZE
    )
    sequences = [run(cache, blocks, seed=1) for cache in (plain, lending)]
    assert tables(sequences[0]) == tables(sequences[1])
    assert (loan.ended, loan.lent) == (1, 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, BUDGET))
def test_uneven_shrinking_is_made_up_for(idle: list[int], kept: int, num_bytes: int) -> None:
    """Groups of one kind give up what they can, and are equal again when the loan has ended."""
    groups = tuple(FakeGroup(f"full{i}", None, 70) for i in range(3))
    cache = PrefixCache(groups, Ledger(BUDGET))
    for seed, num_blocks in enumerate(idle):
        cache.close(run(cache, num_blocks, seed))
    for node in list(cache.tree.residents)[: kept + 1]:
        cache.slots.evict(node, [kept % 3])
    sequence = run(cache, kept, seed=9)
    lend(cache, num_bytes)
    cache.close(sequence)
    cache.close(run(cache, cache.allocator.max_tokens() // BLOCK_SIZE, seed=10))
    cache.check_integrity()


def test_what_is_only_cached_goes_first() -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    loan = lend(cache, 1500)
    for seed in range(6):
        cache.close(run(cache, 5, seed))
        cache.check_integrity()
    assert cache.slots.evicted_blocks > 0 and loan.ended == 0


def test_make_room_ends_a_loan() -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    loan = lend(cache, 2500)
    cache.allocator.make_room(cache.allocator.max_tokens())
    assert loan.ended == 1 and cache.slots.pools[0].capacity == cache.allocator.max_tokens() // BLOCK_SIZE


def test_a_lower_budget_ends_a_loan_only_if_it_must() -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    loan = lend(cache, 1000)
    cache.close(run(cache, 8, seed=1))
    assert leave(cache, 2000)
    assert loan.ended == 0 and cache.allocator.capacity_bytes + 1000 <= 2000
    assert leave(cache, cache.ledger.floors + 500)
    assert loan.ended == 1 and loan.lent == 0


@given(st.integers(0, BUDGET), st.integers(0, BUDGET), st.integers(0, 8))
def test_another_loan_in_place_of_one(first: int, second: int, running: int) -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    one = lend(cache, first)
    lent = one.lent
    run(cache, running, seed=1)
    assert one.ended == (one.lent == 0 < lent)
    before = one.lent
    other = lend(cache, second)
    cache.check_integrity()
    assert min(before, second) <= other.lent <= second


def test_repaid_is_the_caches_again() -> None:
    cache = PrefixCache(GROUPS, Ledger(BUDGET))
    loan = lend(cache, 3000)
    lend(cache, 0)
    run(cache, cache.allocator.max_tokens() // BLOCK_SIZE, seed=1)
    assert loan.ended == 0

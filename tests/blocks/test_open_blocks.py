"""Groups of sealed and of open blocks: random use, beside a model of what slots and files hold, and each case alone.

The first block is never sealed.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from agentcache.blocks.allocator import blocks_of, min_blocks, most_blocks, windows_bytes
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.origin_paths import spans
from agentcache.blocks.pool import BlockTable, Copy, Holds, are_paired, holds_of
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.search import match_residual_kv
from agentcache.errors import BrokenInvariant, OutOfBlocks
from agentcache.plans.room import Growth, slots_needed
from tests.blocks.cache_machine import CacheMachine
from tests.blocks.cache_model import FakeGroup, pair
from tests.examples import examples


class PairMachine(CacheMachine):
    groups = pair("full")
    spare_bytes = 8


class BesideOthersMachine(CacheMachine):
    """Some layers keep all blocks in one group."""

    groups = (FakeGroup("full.0", None, 1), *pair("full.1", None, 2, 3))
    spare_bytes = 14


class WindowPairsMachine(CacheMachine):
    """Two pairs, one with a window; an adapter may change the upper one only."""

    groups = (*pair("full.0", None, 1, 2), *pair("window300.0", 300, 2, 1))
    spare_bytes = 16


class WindowBelowMachine(CacheMachine):
    groups = (*pair("window300.0", 300), FakeGroup("full.0", None, 1))
    spare_bytes = 10


class ScarceMachine(CacheMachine):
    groups = (*pair("window128.0", 128), *pair("full.0"))
    spare_bytes = 2


class HybridPairMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), *pair("full.1"))
    spare_bytes = 12
    state = FakeGroup("state", None, 10)
    state_budget = 150


TestPair = PairMachine.TestCase
TestBesideOthers = BesideOthersMachine.TestCase
TestWindowPairs = WindowPairsMachine.TestCase
TestWindowBelow = WindowBelowMachine.TestCase
TestScarce = ScarceMachine.TestCase
TestHybridPair = HybridPairMachine.TestCase
SETTINGS = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPair.settings = TestBesideOthers.settings = TestWindowPairs.settings = SETTINGS
TestWindowBelow.settings = TestScarce.settings = TestHybridPair.settings = SETTINGS


# -- each case alone --------------------------------------------------------------------------------------------------

ROOT, SEALED, OPEN = "root", 0, 1
IDS = list(range(1000))


def make_cache(*groups: FakeGroup, budget: int = 1000) -> PrefixCache:
    return PrefixCache(groups or pair("full"), Ledger(budget))


def start(cache: PrefixCache, ids: list[int], producer: KVOrigin | None = None) -> BlockTables:
    return cache.open(ROOT, cache.match_prefix(ROOT, ids, len(ids), producer))


def grow(cache: PrefixCache, sequence: BlockTables, ids: list[int]) -> list[PathBlock]:
    """Compute the rest of `ids` at once."""
    missing = ids[sequence.num_tokens :]
    cache.reserve(sequence, len(missing))
    published = cache.advance(sequence, missing)
    cache.leave_window(sequence)
    cache.check_integrity()
    return published


def run(cache: PrefixCache, ids: list[int], producer: KVOrigin | None = None) -> list[PathBlock]:
    sequence = start(cache, ids, producer)
    grow(cache, sequence, ids)
    return cache.close(sequence)


def shape(table: BlockTable) -> tuple[int, list[bool]]:
    """The first block, and which blocks have a slot."""
    return table.first_block, [block_id >= 0 for block_id in table.block_ids]


def test_each_block_that_a_chunk_reaches_has_an_open_slot() -> None:
    cache = make_cache()
    sequence = start(cache, [])
    cache.reserve(sequence, 1000)
    assert shape(sequence.tables[SEALED]) == (1, [True] * 3), "also of the open block"
    assert shape(sequence.tables[OPEN]) == (0, [True] * 4), "the step reads the blocks that it fills in both forms"
    cache.advance(sequence, IDS)
    cache.leave_window(sequence)
    assert shape(sequence.tables[OPEN]) == (0, [True, False, False, True])
    cache.reserve(sequence, 600)
    assert shape(sequence.tables[OPEN]) == (0, [True, False, False, True, True, True, True])
    cache.abandon(sequence)
    cache.check_integrity()
    assert cache.count_blocks().live == 0


def test_a_smaller_step_uses_slots_of_a_larger_one() -> None:
    cache = make_cache()
    sequence = start(cache, [])
    cache.reserve(sequence, 1000)
    slots = list(sequence.tables[OPEN].slots)
    cache.reserve(sequence, 300)
    assert sequence.tables[OPEN].slots == slots
    cache.check_integrity()
    assert cache.count_blocks().live == 3 + 4


def test_a_step_behind_one_under_way_finds_its_open_block() -> None:
    cache = make_cache()
    sequence = start(cache, [])
    cache.reserve(sequence, 300)
    cache.reserve(sequence, 300 + 500)  # 300 under way
    assert shape(sequence.tables[OPEN]) == (0, [True] * 4)


def test_full_blocks_and_tails_are_found_in_their_groups() -> None:
    cache = make_cache()
    first, second, tail = run(cache, IDS[:600])
    assert [set(block.node.block_ids) for block in (first, second, tail)] == [{OPEN}, {SEALED}, {OPEN}]
    assert [block.groups for block in (first, second, tail)] == [(OPEN,), (SEALED,), (OPEN,)]
    sequence = start(cache, IDS[:600])
    assert shape(sequence.tables[SEALED]) == (1, [True]), "nothing for the tail"
    opened = [first.node.block_ids[OPEN], -1, tail.node.block_ids[OPEN]]
    assert (sequence.tables[OPEN].first_block, sequence.tables[OPEN].block_ids) == (0, opened)
    assert not sequence.copies and not sequence.loads, "it is continued in place"
    assert cache.slots.evict(tail.node) is False
    cache.abandon(sequence)
    assert cache.slots.evict(tail.node)
    assert cache.match_prefix(ROOT, IDS[:600], 600).num_tokens == 512


def test_part_of_a_sealed_block_is_reopened() -> None:
    cache = make_cache()
    blocks = run(cache, IDS[:600])
    sequence = start(cache, IDS[:400])
    source, [_, target] = blocks[1].node.block_ids[SEALED], sequence.tables[OPEN].block_ids
    assert sequence.copies == [Copy(OPEN, source, target, reopens=True)]
    assert shape(sequence.tables[SEALED]) == (1, []) and sequence.tables[OPEN].first_block == 0
    cache.reserve(sequence, 200)
    assert sequence.tables[SEALED].block_id(1) != source, "its own is sealed there"
    assert OPEN not in blocks[1].node.block_ids
    assert start(cache, [*IDS[:256], *IDS[256:271], 5]).num_tokens == 256, "too few tokens are not"
    cache.check_integrity()


def test_part_of_the_first_block_is_copied_as_it_is() -> None:
    cache = make_cache()
    first, *_ = run(cache, IDS[:600])
    sequence, other = start(cache, IDS[:100]), start(cache, [*IDS[:256], 5])
    source, [target] = first.node.block_ids[OPEN], sequence.tables[OPEN].block_ids
    assert sequence.copies == [Copy(OPEN, source, target)]
    assert other.tables[OPEN].block_ids == [source] and not other.copies, "whole, it is shared"
    grow(cache, sequence, [*IDS[:100], *[7] * 200])
    blocks = cache.close(sequence)
    assert [set(block.node.block_ids) for block in blocks] == [{OPEN}, {OPEN}]


def test_part_of_the_first_block_is_read_from_its_file() -> None:
    cache = make_cache()
    first, *_ = run(cache, IDS[:600])
    cache.mark_stored(first.node, OPEN)
    cache.slots.drop(first.node, OPEN)
    sequence = start(cache, IDS[:100])
    [load] = sequence.loads
    assert (load.source_group, load.group, load.num_tokens, load.reopens) == (OPEN, OPEN, 100, False)


def test_the_first_block_stays_open_while_it_is_in_the_window() -> None:
    cache = make_cache(*pair("window300.0", 300))
    sequence = start(cache, [])
    grow(cache, sequence, IDS[:554])
    first = sequence.paths[0].nodes[0]
    assert shape(sequence.tables[OPEN]) == (0, [True, False, True]) and first.block_ids.keys() == {OPEN}
    assert shape(sequence.tables[SEALED]) == (1, [True, True])
    grow(cache, sequence, IDS[:555])
    assert shape(sequence.tables[OPEN]) == (2, [True]) and not first.block_ids
    assert shape(sequence.tables[SEALED]) == (1, [True, True])
    grow(cache, sequence, IDS[:900])
    assert shape(sequence.tables[OPEN]) == (3, [True])
    cache.close(sequence)
    assert shape(start(cache, IDS[:900]).tables[OPEN]) == (3, [True])


def test_a_window_without_the_first_block_ends_before_it() -> None:
    cache = make_cache(*pair("window300.0", 300))
    first, second = (block.node for block in run(cache, IDS[:512]))
    assert cache.match_prefix(ROOT, IDS, 512).num_tokens == 512
    assert cache.slots.evict(second) and cache.slots.evict(first)
    assert cache.match_prefix(ROOT, IDS, 512).num_tokens == 0
    other = make_cache(*pair("window200.0", 200))
    first, second = (block.node for block in run(other, IDS[:512]))
    assert other.match_prefix(ROOT, IDS, 512).num_tokens == 512 and not first.block_ids


def test_base_keeps_its_first_block_for_an_adapter_that_reads_it() -> None:
    cache = make_cache(*pair("window300.0", 300))
    sequence = start(cache, [])
    cache.reserve(sequence, 900)
    cache.advance(sequence, IDS[:900])
    cache.leave_window(sequence, 554)
    assert shape(sequence.tables[OPEN]) == (0, [True, False, True, True])
    cache.leave_window(sequence, 555)
    assert shape(sequence.tables[OPEN]) == (2, [True, True]), "the adapter is in block 2"
    cache.leave_window(sequence, 768)
    assert shape(sequence.tables[OPEN]) == (3, [True])
    cache.check_integrity()


def test_part_of_a_sealed_block_is_reopened_from_its_file() -> None:
    cache = make_cache()
    for block in run(cache, IDS[:600]):
        for index in tuple(block.node.block_ids):
            cache.mark_stored(block.node, index)
    while any(cache.slots.evict(node) for node in list(cache.tree.residents)):
        continue
    prefix = cache.match_prefix(ROOT, IDS[:400], 400)
    assert not cache.in_ram(prefix)
    sequence = cache.open(ROOT, prefix)
    [first, second] = sequence.loads
    assert (first.source_group, first.group, first.num_tokens, first.reopens) == (OPEN, OPEN, 256, False)
    assert (second.source_group, second.group, second.num_tokens, second.reopens) == (SEALED, OPEN, 144, True)
    for load in (first, second):
        cache.loaded(sequence, load)
    assert [set(load.node.block_ids) for load in (first, second)] == [{OPEN}, set()], "a part is listed nowhere"
    cache.check_integrity()


def test_a_sealed_block_stays_until_it_is_reopened() -> None:
    """Though the slot of a block before it is wanted."""
    groups = pair("full")
    cache = make_cache(*groups, budget=sum(min_blocks(group) for group in groups))
    first, second, third = (block.node for block in run(cache, IDS[:768]))
    cache.mark_stored(first, OPEN)
    cache.mark_stored(second, SEALED)
    cache.slots.drop(second, SEALED)
    reader = start(cache, [5] * 1024)
    for end in (512, 768, 1024):
        grow(cache, reader, [5] * end)
    with pytest.raises(OutOfBlocks):
        start(cache, IDS[:700])
    assert third.block_ids
    cache.check_integrity()


def test_a_tail_serves_before_a_full_block_that_would_be_reopened() -> None:
    cache = make_cache()
    tail = run(cache, [*IDS[:286], 9000])[-1].node  # behind the full block in the tree's order
    full = run(cache, IDS[:512])[-1].node
    assert full.is_full and not tail.is_full
    path = cache.match_prefix(ROOT, [*IDS[:286], 7], 300).paths[0]
    assert path.tail is tail and not path.reopens(OPEN)
    cache.slots.evict(tail)
    path = cache.match_prefix(ROOT, [*IDS[:286], 7], 300).paths[0]
    assert path.tail is full and path.reopens(OPEN)


def test_an_open_slot_is_written_behind_its_tail_though_the_block_was_sealed() -> None:
    """Other groups must copy: there the full block is in the same slot."""
    cache = make_cache(FakeGroup("full.0", None, 1), *pair("full.1"))
    tail = run(cache, IDS[:300])[-1].node
    run(cache, IDS[:512])
    sequence = start(cache, [*IDS[:300], 5])
    assert [copy.group for copy in sequence.copies] == [0]
    assert sequence.tables[2].block_ids[1:] == [tail.block_ids[2]]
    other = start(cache, [*IDS[:300], 6])
    assert [copy.group for copy in other.copies] == [0, 2], "while it is read, in no group"
    assert not any(copy.reopens for copy in other.copies)


def test_what_ends_in_a_sealed_block_is_not_kept() -> None:
    cache = make_cache()
    sequence = start(cache, IDS[:520])
    grow(cache, sequence, IDS[:520])
    keepable = [cache.open_blocks.keepable(sequence, count) for count in (520, 513, 512, 511, 300, 256, 255, 1, 0)]
    assert keepable == [520, 513, 512, 256, 256, 256, 255, 1, 0], "a part of the first block is there"
    with pytest.raises(BrokenInvariant, match="sealed"):
        cache.close(sequence, 511)
    assert [block.node.end for block in cache.close(sequence, 256)] == [256]
    assert cache.match_prefix(ROOT, IDS[:511], 511).num_tokens == 511, "the full block is there"
    alike = make_cache(FakeGroup("full", None, 1))
    whole = start(alike, IDS[:520])
    grow(alike, whole, IDS[:520])
    assert alike.open_blocks.keepable(whole, 511) == 511


def test_part_of_the_first_block_is_kept() -> None:
    cache = make_cache()
    sequence = start(cache, IDS[:520])
    grow(cache, sequence, IDS[:520])
    slot = sequence.tables[OPEN].block_ids[0]
    [tail] = cache.close(sequence, 100)
    assert (tail.node.end, tail.groups, tail.node.block_ids) == (100, (OPEN,), {OPEN: slot})
    cache.check_integrity()


def test_a_tail_is_shared_while_its_block_is_open() -> None:
    cache = make_cache()
    sequence = start(cache, IDS[:300])
    grow(cache, sequence, IDS[:300])
    cache.share_tail(sequence, 299)
    tail = next(node for node in cache.tree.walk() if not node.is_full)
    assert tail.block_ids == {OPEN: sequence.tables[OPEN].block_ids[1]}
    grow(cache, sequence, IDS[:512])
    cache.share_tail(sequence, 511)
    assert [node.end for node in cache.tree.walk() if not node.is_full] == [299], "nothing of the sealed block"
    cache.share_tail(sequence, 99)
    assert {node.end for node in cache.tree.walk() if not node.is_full} == {299, 99}
    other = start(cache, IDS[:511])
    assert other.num_tokens == 511 and [copy.reopens for copy in other.copies] == [True]


@pytest.mark.parametrize("chunks", [[300, 301, 600], [512, 600], [600], [200, 600], [290, 600]])
def test_base_tail_is_published_from_the_open_block(chunks: list[int]) -> None:
    cache, origin = make_cache(), KVOrigin("a", 300, frozenset({SEALED, OPEN}))
    sequence = start(cache, [], origin)
    published = [block for end in chunks for block in grow(cache, sequence, IDS[:end])]
    [tail] = [block for block in published if not block.node.is_full]
    assert (tail.node.end, tail.groups, set(tail.node.block_ids)) == (300, (OPEN,), {OPEN})
    blocks = cache.close(sequence)
    assert [block.groups for block in blocks] == [(OPEN,), (SEALED,), (OPEN,), (OPEN,)]
    layout = spans(600, origin, 2, holds=cache.holds)
    assert [block.groups for block in blocks] == [span.groups for span in layout]
    assert cache.match_prefix(ROOT, IDS, 1000).num_tokens == 300


@pytest.mark.parametrize("chunks", [[100, 600], [600], [256, 600], [101, 300, 600]])
def test_base_tail_in_the_first_block_is_in_its_slot(chunks: list[int]) -> None:
    cache, origin = make_cache(), KVOrigin("a", 100, frozenset({SEALED, OPEN}))
    sequence = start(cache, [], origin)
    for end in chunks:
        grow(cache, sequence, IDS[:end])
    first, *_, tail = cache.close(sequence)
    assert (tail.node.end, tail.groups) == (100, (OPEN,))
    assert first.node.block_ids == tail.node.block_ids == {OPEN: first.node.block_ids[OPEN]}
    sequence = start(cache, IDS, origin)
    assert sequence.num_tokens == 600 and start(cache, IDS).num_tokens == 100
    cache.check_integrity()


def test_base_tail_of_a_block_sealed_in_one_chunk_stays_when_the_request_ends() -> None:
    cache, origin = make_cache(), KVOrigin("a", 300, frozenset({SEALED, OPEN}))
    sequence = start(cache, [], origin)
    cache.reserve(sequence, 600)
    slots = list(sequence.tables[OPEN].block_ids)
    *_, tail = cache.advance(sequence, IDS[:600])
    cache.leave_window(sequence)
    assert tail.node.block_ids == {OPEN: slots[1]}
    assert shape(sequence.tables[OPEN]) == (0, [True, False, True]), "the tree alone has the slot now"
    cache.abandon(sequence)
    cache.check_integrity()
    assert cache.match_prefix(ROOT, IDS, 1000).num_tokens == 300
    assert cache.match_prefix(ROOT, IDS, 1000, origin).num_tokens == 512
    assert cache.slots.evict(tail.node)
    cache.check_integrity()


def test_a_published_block_is_appended_without_an_open_slot() -> None:
    cache = make_cache()
    first, second = start(cache, []), start(cache, [])
    cache.reserve(second, 300)
    grow(cache, first, IDS[:600])
    cache.catch_up(second, IDS, 1000)
    cache.leave_window(second)
    assert second.num_tokens == 512
    assert second.tables[SEALED].block_ids == first.tables[SEALED].block_ids[:1]
    assert second.tables[OPEN].block_ids == [first.tables[OPEN].block_ids[0], -1]
    grow(cache, second, IDS[:700])
    for sequence in (first, second):
        cache.close(sequence)
    cache.check_integrity()
    assert cache.count_blocks().live == 0


def test_base_ahead_of_residuals_keeps_the_open_blocks_that_it_has_computed() -> None:
    """Until the adapter has passed; of blocks that were cached it has the sealed form only."""
    base, residuals = make_cache(), PrefixCache((FakeGroup("full", None, 1),), Ledger(100), name="residual.x")
    run(base, IDS[:700])
    run(residuals, IDS[:300])
    prefix = match_residual_kv(base.finder(ROOT, IDS), residuals.finder(ROOT, IDS), 1000)
    assert (prefix.num_tokens, prefix.own.num_tokens) == (700, 300)
    sequence = base.open(ROOT, prefix)
    assert shape(sequence.tables[SEALED]) == (1, [True])
    assert shape(sequence.tables[OPEN]) == (0, [True, False, True]), "though the adapter begins before it"
    base.reserve(sequence, 300)
    base.advance(sequence, IDS[700:])
    for read_from, kept in ((300, [2, 3]), (600, [2, 3]), (768, [3]), (1000, [3])):
        base.leave_window(sequence, read_from)
        assert shape(sequence.tables[OPEN]) == (0, [position in (0, *kept) for position in range(4)])
        base.check_integrity()
    base.close(sequence)
    base.check_integrity()


def test_open_blocks_have_an_account_of_their_own_and_a_bounded_need() -> None:
    groups = (FakeGroup("full.0", None, 3), *pair("full.1", None, 5, 7), *pair("window300.0", 300, 11, 13))
    cache = make_cache(*groups, budget=10_000)
    assert [account.kind for account in cache.ledger.accounts] == ["base.full", "base.open", "base.window300"]
    assert [min_blocks(group) for group in groups] == [4, 4, 4, 4, 4]
    for at_once in (256, 4096):
        windows = [windows_bytes(groups[index : index + 1], at_once) for index in (2, 3)]
        assert windows == [(1 + at_once // 256 + 1 + 1) * 7, (2 + at_once // 256 + 1) * 11]
    assert [blocks_of(group, 5000) for group in groups] == [20, 19, 4, 4, 4]
    assert [[blocks_of(group, count) for group in groups[1:3]] for count in (0, 1, 256, 257)] == [
        [0, 0],
        [0, 1],
        [0, 1],
        [1, 2],
    ]
    assert cache.allocator.max_tokens() == (10_000 - 4 * 11 - 4 * (7 + 13)) // (3 + 5) * BLOCK_SIZE
    cache.allocator.preallocate(1000)
    assert [pool.capacity > 0 for pool in cache.slots.pools] == [True, True, False, True, False]


def test_room_counts_the_open_slots_of_a_step() -> None:
    cache = make_cache()
    sequence = start(cache, [])
    grow(cache, sequence, IDS[:600])
    cache.reserve(sequence, 300)
    running = [Growth(sequence.tables, 5000)]
    prefix = cache.match_prefix(ROOT, IDS, 1000)
    assert slots_needed(cache.allocator, SEALED, running) == 19
    assert slots_needed(cache.allocator, SEALED, running, prefix, 5000) == 19 + 18
    assert slots_needed(cache.allocator, OPEN, running) == most_blocks(cache.groups[OPEN]) == 4
    assert slots_needed(cache.allocator, OPEN, running, prefix, 5000) == 4 + 3, "they share the first block"
    assert cache.count_blocks().live == 3 + 3


@pytest.mark.parametrize("at_once", [1, 100, 255, 256, 257, 1024])
def test_a_chunk_takes_no_more_open_slots_than_its_bytes_are_counted_with(at_once: int) -> None:
    """Wherever chunks begin, and with the token that is decoded ahead of the last one's end."""
    cache, most, bound = make_cache(), 0, most_blocks(pair("full")[OPEN], at_once)
    for begin in (0, 1, 100, 255, 511):
        sequence = start(cache, [])
        for step in (begin, *[at_once] * (2 + 600 // at_once)):
            cache.reserve(sequence, step + (step > 0))
            most = max(most, len(sequence.tables[OPEN].slots))
            cache.advance(sequence, [begin] * step)
            cache.leave_window(sequence)
        cache.abandon(sequence)
    assert bound is not None and bound - 1 <= most <= bound


def test_a_request_goes_on_where_only_the_floor_of_open_slots_is_left() -> None:
    """Tails of others give way, also to a tail that is copied."""
    groups = pair("full")
    cache = make_cache(*groups, budget=sum(min_blocks(group) for group in groups))
    for first in range(3):
        run(cache, [first, *IDS[:300]])
    sequence = start(cache, [0, *IDS[:100], 7])
    for end in range(200, 1000, 77):
        grow(cache, sequence, [0, *IDS[:100], 7, *IDS[: end - 102]])
    assert sequence.num_tokens == 970


def test_groups_come_in_pairs() -> None:
    all_alike = (Holds.ALL, Holds.ALL)
    assert holds_of([FakeGroup("a", None, 1)]) == ()
    assert are_paired(()) and are_paired(all_alike) and are_paired((Holds.FULL, Holds.OPEN, Holds.ALL))
    for wrong in [(Holds.FULL,), (Holds.OPEN,), (Holds.OPEN, Holds.FULL), (Holds.FULL, Holds.ALL, Holds.OPEN)]:
        assert not are_paired(wrong)
        with pytest.raises(BrokenInvariant, match="pairs"):
            make_cache(*[FakeGroup(str(index), None, 1, holds) for index, holds in enumerate(wrong)])

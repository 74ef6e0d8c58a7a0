"""Matching, sharing, copy-on-write, windows and eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings

from agentcache.blocks.allocator import min_blocks
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.search import MIN_TAIL_TOKENS
from agentcache.errors import BrokenInvariant, OutOfBlocks
from tests.blocks.cache_machine import CacheMachine
from tests.blocks.cache_model import FakeGroup
from tests.examples import examples


class FullMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), FakeGroup("full.1", None, 2))
    spare_bytes = 12


class MixedMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), FakeGroup("window300.0", 300, 1))
    spare_bytes = 9


class WindowMachine(CacheMachine):
    groups = (FakeGroup("window512.0", 512, 1),)


class WindowBelowMachine(CacheMachine):
    """Adapters change the full-attention group only."""

    groups = (FakeGroup("window300.0", 300, 1), FakeGroup("full.0", None, 1))
    spare_bytes = 9


class NarrowMachine(CacheMachine):
    """A window narrower than a block: only the last block or two of a sequence are in RAM."""

    groups = (FakeGroup("window128.0", 128, 1), FakeGroup("window128.1", 128, 3))


TestFull = FullMachine.TestCase
TestMixed = MixedMachine.TestCase
TestWindow = WindowMachine.TestCase
TestWindowBelow = WindowBelowMachine.TestCase
TestNarrow = NarrowMachine.TestCase
SETTINGS = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestFull.settings = TestMixed.settings = TestWindow.settings = TestWindowBelow.settings = TestNarrow.settings = SETTINGS

FULL = FakeGroup("full.0", None, 1)
WINDOW = FakeGroup("window512.0", 512, 1)
ROOT = "root"


def grow(cache: PrefixCache, sequence: BlockTables, token_ids: list[int]) -> None:
    cache.reserve(sequence, len(token_ids))
    cache.advance(sequence, token_ids)
    cache.leave_window(sequence)


def start(cache: PrefixCache, token_ids: list[int]) -> BlockTables:
    return cache.open(ROOT, cache.match_prefix(ROOT, token_ids, len(token_ids)))


def run(cache: PrefixCache, token_ids: list[int]) -> BlockTables:
    """A sequence that has computed all of `token_ids`, block by block."""
    sequence = start(cache, token_ids)
    while sequence.num_tokens < len(token_ids):
        end = (sequence.num_tokens // BLOCK_SIZE + 1) * BLOCK_SIZE
        grow(cache, sequence, token_ids[sequence.num_tokens : end])
    cache.check_integrity()
    return sequence


def test_slots_that_a_sequence_leaves_are_used_in_the_same_order_again() -> None:
    """Those of a warm-up, say: blocks from files are put into ascending slots at once."""
    cache, used = PrefixCache([FULL, WINDOW], Ledger(40)), []
    for _ in range(3):
        sequence = start(cache, [])
        cache.reserve(sequence, 4 * BLOCK_SIZE)
        used.append([list(table.block_ids) for table in sequence.tables])
        cache.abandon(sequence)
    assert used == [[[0, 1, 2, 3], [0, 1, 2, 3]]] * 3


def test_a_tail_that_nobody_goes_on_from_is_continued_in_place() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    cache.close(run(cache, [1] * 300))
    first = start(cache, [1] * 300 + [2])
    second = start(cache, [1] * 300 + [3])
    assert (first.num_tokens, second.num_tokens) == (300, 300)
    assert first.copies == []
    assert [copy.source for copy in second.copies] == [first.tables[0].block_ids[1]]
    assert second.tables[0].block_ids[1] != first.tables[0].block_ids[1]


def test_a_conversation_stays_in_one_slot_turn_after_turn() -> None:
    cache, length = PrefixCache([FULL], Ledger(20)), 20
    cache.close(run(cache, [1] * length))
    slots = set()
    while length + 40 < BLOCK_SIZE:
        sequence = start(cache, [1] * length)
        assert (sequence.num_tokens, sequence.copies) == (length, [])
        slots.update(sequence.tables[0].block_ids)
        grow(cache, sequence, [1] * 40)
        cache.close(sequence)
        length += 40
    assert len(slots) == 1
    branch = start(cache, [*[1] * 60, 2])
    assert branch.num_tokens == 60 and len(branch.copies) == 1, "what is behind it there is another's"
    cache.abandon(branch)
    cache.check_integrity()


def test_part_of_a_tail_is_copied() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    cache.close(run(cache, [1] * 300))
    assert len(start(cache, [1] * 290 + [2] * 10).copies) == 1


def test_a_tail_that_cannot_be_copied_keeps_no_reader() -> None:
    cache = PrefixCache([FULL], Ledger(2))
    cache.close(run(cache, [1] * 300))
    reader = start(cache, [1] * 300)
    with pytest.raises(OutOfBlocks):
        start(cache, [1] * 290 + [2] * 10)
    cache.check_integrity()
    cache.abandon(reader)
    cache.check_integrity()
    assert cache.count_blocks().live == 0


@pytest.mark.parametrize(("shared", "used"), [(MIN_TAIL_TOKENS - 1, 0), (MIN_TAIL_TOKENS, MIN_TAIL_TOKENS)])
def test_a_few_shared_tokens_are_not_worth_a_copy(shared: int, used: int) -> None:
    cache = PrefixCache([FULL], Ledger(20))
    cache.close(run(cache, [1] * 200))
    assert cache.match_prefix(ROOT, [1] * shared + [2] * 50, 1000).num_tokens == used


def test_a_chat_without_agent_leaves_nothing_that_cannot_be_evicted() -> None:
    """Each turn goes on in the slot of the tail before, so several tails share it."""
    cache = PrefixCache([FULL], Ledger(8))
    history: list[int] = []
    for turn in range(40):
        history += [turn] * 40
        cache.close(run(cache, history))
    while any(cache.slots.evict(node) for node in list(cache.tree.residents)):
        cache.check_integrity()
    assert cache.count_blocks().cached == cache.count_blocks().live == 0
    assert list(cache.tree.walk()) == []


def test_tokens_that_end_inside_a_published_block_are_found_again() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    sequence = run(cache, [1] * 256 + [2] * 10)
    [tail] = cache.close(sequence, keep=250)
    assert tail.node.block_ids == sequence.paths[0].nodes[0].block_ids
    assert cache.in_ram(cache.match_prefix(ROOT, [1] * 250, 250))


@pytest.mark.parametrize("is_in_ram", [True, False])
def test_a_block_with_a_file_is_read_as_computed(is_in_ram: bool) -> None:
    """So that eviction changes no answer; later requests read the file's data."""
    cache, tokens = PrefixCache([FULL], Ledger(20)), [1] * 512
    first, second = (block.node for block in cache.close(run(cache, tokens)))
    for node in (first, second):
        cache.mark_stored(node, 0)
    if not is_in_ram:
        assert cache.slots.evict(second)
    published = dict(second.block_ids)
    sequence = cache.open(ROOT, cache.match_prefix(ROOT, tokens, 511))
    [_, own] = sequence.tables[0].block_ids
    grow(cache, sequence, [1])
    assert sequence.paths[0].nodes == [first, second]
    assert sequence.tables[0].block_ids == [first.block_ids[0], own] and second.block_ids == published
    cache.close(sequence)
    cache.check_integrity()


def test_a_block_without_a_file_is_shared_by_those_who_compute_it() -> None:
    cache, tokens = PrefixCache([FULL], Ledger(20)), [1] * 256
    one, other = start(cache, tokens), start(cache, tokens)
    for sequence in (one, other):
        grow(cache, sequence, tokens)
    assert one.tables[0].block_ids == other.tables[0].block_ids
    cache.check_integrity()


def test_only_the_end_of_a_prefix_is_needed_behind_a_window() -> None:
    cache = PrefixCache([WINDOW], Ledger(20))
    sequence = run(cache, [1] * 2000)
    assert len(sequence.tables[0].block_ids) == 3
    cache.close(sequence)
    assert start(cache, [1] * 2000).num_tokens == 2000
    assert start(cache, [1] * 1000).num_tokens == 0


def test_a_window_stays_for_a_reader_that_is_further_back() -> None:
    cache, tokens = PrefixCache([WINDOW], Ledger(20)), [1] * 1500
    sequence = start(cache, tokens)
    cache.reserve(sequence, len(tokens))
    cache.advance(sequence, tokens)
    cache.leave_window(sequence, 900)
    assert sequence.tables[0].first_block == WINDOW.first_block_needed(900) < WINDOW.first_block_needed(1500)
    cache.leave_window(sequence)
    assert sequence.tables[0].first_block == WINDOW.first_block_needed(1500)


def test_blocks_lost_from_the_window_shorten_a_prefix() -> None:
    """The first 1024 tokens are all there in the full group; the window's blocks of their end are gone."""
    cache = PrefixCache([FULL, WINDOW], Ledger(40))
    cache.close(run(cache, [1] * 2048))
    assert cache.match_prefix(ROOT, [1] * 2048, 2048).num_tokens == 2048
    assert cache.match_prefix(ROOT, [1] * 1024, 1024).num_tokens == 0


def test_a_failed_load_of_one_reader_does_not_pull_the_node_from_under_another() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    node = cache.tree.insert(cache.tree.root(ROOT), [1] * 256)
    cache.mark_stored(node, 0)
    first, second = start(cache, [1] * 256), start(cache, [1] * 256)
    cache.mark_missing(node, 0)
    cache.abandon(first)
    cache.loaded(second, second.loads[0])
    cache.check_integrity()
    grow(cache, second, [2] * 256)
    cache.close(second)
    assert cache.match_prefix(ROOT, [1] * 256 + [2] * 256, 512).num_tokens == 512
    assert all(cache.slots.evict(node) for node in reversed(list(cache.tree.walk())))
    cache.check_integrity()


def test_a_load_that_comes_after_the_end_is_not_believed() -> None:
    """The slot may hold another's tokens by then."""
    cache = PrefixCache([FULL], Ledger(20))
    node = cache.tree.insert(cache.tree.root(ROOT), [1] * 256)
    cache.mark_stored(node, 0)
    sequence = start(cache, [1] * 256)
    cache.abandon(sequence)
    cache.loaded(sequence, sequence.loads[0])
    assert not node.block_ids
    cache.check_integrity()


def test_a_window_moves_on_without_taking_blocks_from_another_reader() -> None:
    cache = PrefixCache([WINDOW], Ledger(20))
    slow = run(cache, [1] * 512)
    fast = start(cache, [1] * 512)
    grow(cache, fast, [2] * 256)
    grow(cache, fast, [2] * 256)
    assert cache.match_prefix(ROOT, [1] * 512, 512).num_tokens == 512
    grow(cache, slow, [3] * 256)
    grow(cache, slow, [3] * 256)
    assert cache.match_prefix(ROOT, [1] * 512, 512).num_tokens == 0


def test_every_attention_kind_has_room_for_one_sequence() -> None:
    """However much the others have taken before."""
    cache = PrefixCache([FULL, WINDOW], Ledger(30))
    greedy = start(cache, [1])
    with pytest.raises(OutOfBlocks):
        while True:
            greedy.tables[0].block_ids.append(cache.allocator.allocate(0))
    for _ in range(min_blocks(WINDOW)):
        greedy.tables[1].block_ids.append(cache.allocator.allocate(1))
    cache.check_integrity()


def test_a_block_stays_known_to_be_on_disk_when_it_is_computed_again() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    node = cache.tree.insert(cache.tree.root(ROOT), [1] * 256)
    cache.mark_stored(node, 0)
    sequence = cache.open(ROOT, cache.match_prefix(ROOT, [1] * 256, 0))
    grow(cache, sequence, [1] * 256)
    cache.close(sequence)
    assert cache.slots.evict(node)
    assert cache.match_prefix(ROOT, [1] * 256, 256).num_tokens == 256


def test_a_block_being_written_is_not_listed_when_it_is_computed_again() -> None:
    """What is in RAM is what the file will hold, bit for bit."""
    cache = PrefixCache([FULL], Ledger(20))
    node = cache.tree.insert(cache.tree.root(ROOT), [1] * 256)
    node.pending.add(0)
    sequence = start(cache, [1] * 256)
    grow(cache, sequence, [1] * 256)
    assert not node.block_ids
    cache.mark_stored(node, 0)
    cache.close(sequence)
    assert cache.match_prefix(ROOT, [1] * 256, 256).num_tokens == 256
    cache.check_integrity()


def test_blocks_being_written_are_evicted_last() -> None:
    cache = PrefixCache([FULL], Ledger(4))
    for token in (1, 2, 3, 4):
        cache.close(run(cache, [token] * 256))
    oldest, second, *_ = cache.tree.residents
    for node in list(cache.tree.residents):
        node.pending.add(0)
    second.pending.clear()
    assert not cache.slots.evict(oldest)
    sequence = run(cache, [5] * 256)
    assert (bool(oldest.block_ids), bool(second.block_ids)) == (True, False)
    grow(cache, sequence, [6] * 256)  # nothing else is left: the write has its own copy of the bytes
    assert not oldest.block_ids
    cache.mark_stored(oldest, 0)
    assert cache.match_prefix(ROOT, [1] * 256, 256).num_tokens == 256
    cache.check_integrity()


def test_want_of_one_group_does_not_cost_the_blocks_of_another() -> None:
    cache = PrefixCache([FULL, WINDOW], Ledger(4 + min_blocks(WINDOW)))
    sequence = run(cache, [1] * 512)
    cache.close(sequence)
    for node in sequence.paths[0].nodes:
        cache.slots.take_from(node, 1)
    greedy = start(cache, [2])
    with pytest.raises(OutOfBlocks):
        while True:
            greedy.tables[1].block_ids.append(cache.allocator.allocate(1))
    assert cache.match_prefix(ROOT, [1] * 512, 512).num_tokens == 0
    assert [node.block_ids.keys() for node in sequence.paths[0].nodes] == [{0}, {0}]
    cache.check_integrity()


def test_least_recently_used_leaves_first() -> None:
    cache = PrefixCache([FULL], Ledger(4))
    for token in (1, 2, 3, 4):
        cache.close(run(cache, [token] * 256))
    cache.close(start(cache, [1] * 256))
    run(cache, [5] * 256)
    lengths = [cache.match_prefix(ROOT, [token] * 256, 256).num_tokens for token in (1, 2, 3, 4)]
    assert lengths == [256, 0, 256, 256]


def test_a_single_sequence_can_use_the_whole_budget() -> None:
    cache = PrefixCache([FULL, WINDOW], Ledger(30))
    tokens = [1] * cache.allocator.max_tokens()
    assert len(run(cache, tokens).tables[0].block_ids) * BLOCK_SIZE == len(tokens)
    assert cache.allocator.capacity_bytes <= cache.ledger.budget


def test_out_of_blocks_when_everything_is_read() -> None:
    cache = PrefixCache([FULL], Ledger(4))
    sequence = run(cache, [1] * 4 * BLOCK_SIZE)
    with pytest.raises(OutOfBlocks):
        cache.reserve(sequence, 1)
    cache.abandon(sequence)
    cache.abandon(sequence)
    assert cache.count_blocks().live == 0
    run(cache, [2] * 4 * BLOCK_SIZE)


def test_salts_leave_no_trace() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    cache.match_prefix("salt", [1] * 256, 256)
    sequence = cache.open("salt", cache.match_prefix("salt", [1] * 256, 256))
    grow(cache, sequence, [1] * 256)
    cache.close(sequence)
    assert cache.slots.evict(sequence.paths[0].nodes[0])
    assert cache.tree._roots == {}


def test_integrity_notices_what_is_wrong() -> None:
    cache = PrefixCache([FULL], Ledger(20))
    sequence = run(cache, [1] * 300)
    sequence.paths[0].nodes[0].readers += 1
    with pytest.raises(BrokenInvariant, match="readers"):
        cache.check_integrity()
    sequence.paths[0].nodes[0].readers -= 1
    cache.slots.pools[0].retain(sequence.tables[0].block_ids[0])
    with pytest.raises(BrokenInvariant, match="reference counts"):
        cache.check_integrity()


def test_a_group_keeps_its_least_blocks_whoever_asks() -> None:
    cache = PrefixCache([FULL, WINDOW], Ledger(40))
    assert cache.allocator.grow_to(1, 20)
    cache.allocator.grow_to(0, 1000)
    assert cache.slots.pools[1].capacity == min_blocks(WINDOW)
    cache.check_integrity()

"""Whether one more request fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from agentcache.blocks.allocator import window_blocks
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.plans.room import Growth, has_room


@dataclass(frozen=True)
class Group:
    window: int | None = None
    name: str = "group"
    bytes_per_block: int = 1
    holds: Holds = Holds.ALL

    def first_block_needed(self, num_tokens: int) -> int:
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // BLOCK_SIZE


def begin(cache: PrefixCache, token: int, num_blocks: int) -> BlockTables:
    """A running sequence that holds some blocks."""
    ids = [token] * (num_blocks * BLOCK_SIZE)
    sequence = cache.open("root", cache.match_prefix("root", ids, len(ids)))
    missing = ids[sequence.num_tokens :]
    cache.reserve(sequence, len(missing))
    cache.advance(sequence, missing)
    cache.leave_window(sequence)
    return sequence


def fits(cache: PrefixCache, running: list[tuple[BlockTables, int]], token: int, num_blocks: int) -> bool:
    ids = [token] * (num_blocks * BLOCK_SIZE)
    growth = [Growth(sequence.tables, blocks * BLOCK_SIZE) for sequence, blocks in running]
    return has_room(cache.allocator, growth, cache.match_prefix("root", ids, len(ids)), len(ids))


@pytest.mark.parametrize(("blocks", "expected"), [(5, True), (6, False)])
def test_running_requests_keep_what_they_are_known_to_need(blocks: int, expected: bool) -> None:
    cache = PrefixCache([Group()], Ledger(12))
    running = begin(cache, 1, 3)
    assert fits(cache, [(running, 7)], 2, blocks) is expected


def test_what_only_caches_hold_is_room_and_what_is_shared_costs_nothing() -> None:
    cache = PrefixCache([Group()], Ledger(12))
    cache.close(begin(cache, 1, 8))
    assert fits(cache, [], 2, 12)
    running = begin(cache, 1, 8)
    assert fits(cache, [(running, 8)], 2, 4)
    assert not fits(cache, [(running, 8)], 2, 5)
    assert fits(cache, [(running, 8)], 1, 12), "eight of them are read already"


def test_a_window_takes_no_more_than_its_blocks() -> None:
    cache = PrefixCache([Group(window=300)], Ledger(12))
    running = begin(cache, 1, 3)
    assert fits(cache, [(running, 100)], 2, 100)
    assert not fits(PrefixCache([Group()], Ledger(12)), [], 2, 100)


@pytest.mark.parametrize("at_once", [100, 255, BLOCK_SIZE, 257, 1024])
@pytest.mark.parametrize("window", [1, 2, 300, 512])
def test_what_a_window_takes_beside_a_chunk_is_what_it_takes_at_worst(window: int, at_once: int) -> None:
    """Wherever chunks begin, and with the token that is decoded ahead of the last one's end."""
    cache, most = PrefixCache([Group(window=window)], Ledger(1000)), 0
    for start in (0, 1, 3, 100, 255):
        sequence = cache.open("root", cache.match_prefix("root", (), 0))
        for step in (start, *[at_once] * (2 + 600 // at_once)):
            cache.reserve(sequence, step + (step > 0))
            most = max(most, len(sequence.tables[0].block_ids))
            cache.advance(sequence, [start] * step)
            cache.leave_window(sequence)
        cache.abandon(sequence)
    assert window_blocks(window, at_once) - 1 <= most <= window_blocks(window, at_once)


def test_what_others_are_to_have_is_no_room() -> None:
    cache = PrefixCache([Group()], Ledger(12))
    running = begin(cache, 1, 3)
    ids = [2] * (5 * BLOCK_SIZE)
    prefix, growth = cache.match_prefix("root", ids, len(ids)), [Growth(running.tables, 3 * BLOCK_SIZE)]
    for evicts in (True, False):
        room = [has_room(cache.allocator, growth, prefix, len(ids), evicts=evicts, beside=beside) for beside in (4, 5)]
        assert room == [True, False]


def test_others_may_need_what_it_has_taken() -> None:
    """Slots that nobody reads count for who is to have their bytes."""
    cache = PrefixCache([Group()], Ledger(12))
    cache.close(begin(cache, 1, 12))
    ids = [2] * (5 * BLOCK_SIZE)
    prefix = cache.match_prefix("root", ids, len(ids))
    assert [has_room(cache.allocator, [], prefix, len(ids), beside=beside) for beside in (7, 8)] == [True, False]
    assert not has_room(cache.allocator, [], prefix, len(ids), evicts=False)

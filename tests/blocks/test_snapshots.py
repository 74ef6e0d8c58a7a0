"""Snapshots of recurrent state: which positions a prompt can go on from, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import settings

from agentcache.api.stats import STATE
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.origin_paths import state_chains
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import ROW_STATES
from agentcache.errors import BrokenInvariant, OutOfBlocks
from tests.blocks.cache_machine import CacheMachine
from tests.blocks.cache_model import FakeGroup
from tests.examples import examples

STATE_GROUP = FakeGroup("state", None, 10)
ROOT = "root"


class HybridMachine(CacheMachine):
    groups = (FakeGroup("full.0", None, 1), FakeGroup("full.1", None, 2))
    spare_bytes = 12
    state = STATE_GROUP
    state_budget = 10 * (4 * ROW_STATES + 3)


class ScarceHybridMachine(CacheMachine):
    """Little room for states, and a window."""

    groups = (FakeGroup("full.0", None, 1), FakeGroup("window300.0", 300, 1))
    spare_bytes = 9
    state = STATE_GROUP
    state_budget = 10 * (2 * ROW_STATES + 1)


class RecurrentMachine(CacheMachine):
    """No attention at all: blocks are positions, and nothing else."""

    groups = ()
    spare_bytes = 0
    state = STATE_GROUP
    state_budget = 10 * (4 * ROW_STATES + 4)


TestHybrid = HybridMachine.TestCase
TestScarceHybrid = ScarceHybridMachine.TestCase
TestRecurrent = RecurrentMachine.TestCase
SETTINGS = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestHybrid.settings = TestScarceHybrid.settings = TestRecurrent.settings = SETTINGS

FULL = FakeGroup("full.0", None, 1)


def make_cache(num_states: int = 4 * ROW_STATES) -> PrefixCache:
    return PrefixCache((FULL,), Ledger(1000), state=STATE_GROUP, state_budget=10 * num_states)


def start(cache: PrefixCache, token_ids: list[int], producer: KVOrigin | None = None) -> BlockTables:
    sequence = cache.open(ROOT, cache.match_prefix(ROOT, token_ids, len(token_ids), producer))
    cache.checkpoints.release_start(sequence)
    return sequence


def grow(cache: PrefixCache, sequence: BlockTables, token_ids: list[int], *at: int) -> None:
    """Compute the rest of `token_ids`, with snapshots behind these numbers of tokens."""
    for end in (*at, len(token_ids)):
        cache.reserve(sequence, end - sequence.num_tokens)
        cache.advance(sequence, token_ids[sequence.num_tokens : end])
        if end in at:
            assert cache.checkpoints.keep(sequence, end) is not None
    cache.check_integrity()


def snapshots_of(cache: PrefixCache) -> list[Node]:
    assert cache.snapshots is not None
    return list(cache.snapshots.nodes)


def matched(cache: PrefixCache, token_ids: list[int], producer: KVOrigin | None = None) -> int:
    return cache.match_prefix(ROOT, token_ids, len(token_ids), producer).num_tokens


def test_of_two_snapshots_of_one_position_one_slot_is_free_again() -> None:
    cache, tokens = make_cache(), list(range(300))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256)
    assert cache.snapshots is not None
    [node], held = snapshots_of(cache), cache.snapshots.num_slots
    first = node.state
    cache.snapshots.list_in(node, cache.snapshots.allocate())
    assert (node.state, cache.snapshots.num_slots) == (first, held)
    cache.check_integrity()


def test_a_prompt_goes_on_from_the_last_position_that_has_a_snapshot() -> None:
    cache, tokens = make_cache(), list(range(1000))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256, 700)
    cache.close(sequence)
    prefix = cache.match_prefix(ROOT, tokens, 1000)
    assert (prefix.num_tokens, prefix.known_tokens) == (700, 1000)
    assert prefix.snapshot is not None
    assert prefix.snapshot.end == 700
    assert matched(cache, tokens[:699]) == 256
    assert matched(cache, [*tokens[:698], -1 % 2**32, *tokens[699:]]) == 256, "a state of other tokens"
    assert matched(cache, tokens[:255]) == 0


def test_a_snapshot_behind_blocks_that_are_gone_is_of_no_use() -> None:
    cache, tokens = make_cache(), list(range(701))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256, 700)
    *_, tail = cache.close(sequence)
    cache.slots.evict(tail.node)
    assert [node.end for node in snapshots_of(cache)] == [256, 700]
    assert matched(cache, tokens) == 256


def test_a_tail_of_few_tokens_is_worth_its_snapshot() -> None:
    cache, tokens = make_cache(), list(range(600))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 259)
    cache.close(sequence)
    assert matched(cache, tokens) == 259


def test_the_last_snapshots_of_a_conversation_stay_longest() -> None:
    cache, tokens = make_cache(ROW_STATES + 3), list(range(1024))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256, 512, 768, 1000)
    cache.close(sequence)
    assert [node.end for node in snapshots_of(cache)] == [512, 768, 1000]
    other = start(cache, [7] * 300)
    grow(cache, other, [7] * 300, 256)
    assert sorted(node.end for node in snapshots_of(cache)) == [256, 768, 1000], "the older one left"


def test_where_others_begin_too_a_snapshot_lasts() -> None:
    cache, tokens = make_cache(ROW_STATES + 3), list(range(1024))
    sequence = start(cache, tokens)
    cache.reserve(sequence, 256)
    cache.advance(sequence, tokens[:256])
    assert cache.checkpoints.keep(sequence, 256, lasts=True) is not None
    grow(cache, sequence, tokens, 512, 768, 1000)
    assert sorted(node.end for node in snapshots_of(cache)) == [256, 768, 1000]


def test_what_the_next_prompt_starts_from_stays_behind_a_long_reply() -> None:
    cache, tokens = make_cache(ROW_STATES + 3), list(range(1024))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens[:256], 200)
    cache.reserve(sequence, 44)
    cache.advance(sequence, tokens[256:300])
    assert cache.checkpoints.keep(sequence, 300, starts_next=True) is not None
    grow(cache, sequence, tokens, 512, 768, 1000)
    assert sorted(node.end for node in snapshots_of(cache)) == [300, 768, 1000]
    assert [node.end for node in snapshots_of(cache)][0] == 768, "it leaves first"
    cache.checkpoints.expect_no_start(sequence)
    cache.close(sequence)
    cache.check_integrity()
    other = start(cache, [7] * 300)
    grow(cache, other, [7] * 300, 100, 256)
    assert sorted(node.end for node in snapshots_of(cache)) == [100, 256, 1000]


def test_rows_go_before_snapshots_and_wait_for_other_rows() -> None:
    cache, tokens = make_cache(2 * ROW_STATES + 1), list(range(600))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256, 512)
    cache.close(sequence)
    first, second = start(cache, [1] * 10), start(cache, [2] * 10)
    assert len(snapshots_of(cache)) == 1
    cache.check_integrity()
    with pytest.raises(OutOfBlocks):
        start(cache, [3] * 10)
    cache.check_integrity()
    cache.abandon(first)
    cache.abandon(second)
    assert cache.checkpoints.keep(start(cache, [3] * 10), 0) is None, "nothing is computed, and nothing is kept"


def test_the_snapshot_that_a_row_is_about_to_start_from_is_not_given_to_it_as_room() -> None:
    cache, tokens = make_cache(2 * ROW_STATES), list(range(600))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 512)
    cache.close(sequence)
    first = start(cache, [1] * 10)
    prefix = cache.match_prefix(ROOT, tokens, 600)
    with pytest.raises(OutOfBlocks):
        cache.open(ROOT, prefix)
    cache.check_integrity()
    cache.abandon(first)
    assert matched(cache, tokens) == 512


def test_an_adapter_has_snapshots_of_its_own_behind_its_start() -> None:
    cache, tokens = make_cache(), list(range(1000))
    adapter = KVOrigin("a", 600, frozenset({1}))  # the state's group
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 512, 768)
    cache.close(sequence)
    assert matched(cache, tokens, adapter) == 512, "what base has computed before the start"
    own = start(cache, tokens, adapter)
    grow(cache, own, tokens, 768, 900)
    cache.close(own)
    assert (matched(cache, tokens, adapter), matched(cache, tokens)) == (900, 768)
    [chain] = state_chains(ROOT, tokens, [900], adapter, 1)
    node = cache.tree.node(chain)
    assert node is not None
    assert node.state is not None


def test_without_attention_positions_are_all_there_is() -> None:
    cache, tokens = PrefixCache((), Ledger(1000), state=STATE_GROUP, state_budget=200), list(range(601))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 512, 600)
    cache.close(sequence)
    assert (matched(cache, tokens), matched(cache, tokens[:599])) == (600, 512)
    node = cache.match_prefix(ROOT, tokens, 600).snapshot
    assert node is not None
    assert cache.snapshots is not None
    assert cache.snapshots.evict(node)
    assert matched(cache, tokens) == 512


def test_the_ledger_knows_what_states_take() -> None:
    cache, tokens = make_cache(), list(range(600))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256, 512)
    [account] = [each for each in cache.ledger.statement() if each.kind == STATE]
    assert (account.used_bytes, account.floor_bytes) == (10 * (ROW_STATES + 2), 40 * ROW_STATES)
    cache.close(sequence)
    [account] = [each for each in cache.ledger.statement() if each.kind == STATE]
    assert account.used_bytes == 20


def test_a_forgotten_snapshot_shows() -> None:
    cache, tokens = make_cache(), list(range(600))
    sequence = start(cache, tokens)
    grow(cache, sequence, tokens, 256)
    node = snapshots_of(cache)[0]
    node.state = None
    with pytest.raises(BrokenInvariant, match="checkpoints"):
        cache.check_integrity()

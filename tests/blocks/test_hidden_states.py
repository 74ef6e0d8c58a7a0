"""The trunk beside the prefix cache: what its slots really hold, who keeps them, and what goes when there are too many.

As in `cache_model`, a slot holds for each place the number of the prefix that was computed there, here always by base.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.hidden_states import (
    HiddenStateCache,
    HiddenStateKey,
    HiddenStateReader,
    HiddenStateWriter,
    Piece,
)
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import Cached, CachedHiddenStates, match_hidden_states
from agentcache.errors import BrokenInvariant
from tests.blocks.cache_machine import CacheMachine
from tests.blocks.cache_model import FakeGroup, Places, last_layers, pair
from tests.blocks.sequence_machine import PICK
from tests.blocks.watched_cache import Running
from tests.examples import examples

CUT = 3


@dataclass
class Use:
    """A running sequence's use of the trunk, and the prompt that it has to go through."""

    tokens: list[int]
    filler: HiddenStateWriter
    reader: HiddenStateReader | None = None


@dataclass
class Contents:
    """What lies in the trunk's slots, and what has to lie in them by name."""

    slots: dict[int, list[int]] = field(default_factory=dict)
    named: dict[HiddenStateKey, Places] = field(default_factory=dict)


class HiddenStateMachine(CacheMachine):
    """Sequences that fill the trunk and go on from it, in any interleaving, while blocks leave RAM."""

    groups = (FakeGroup("full.0", None, 1), FakeGroup("full.1", None, 2))
    spare_bytes = 12
    num_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states = HiddenStateCache(self.num_slots, 1, self.cache.ledger)
        self.contents = Contents()
        self.uses: dict[BlockTables, Use] = {}
        self.ahead: CachedHiddenStates | None = None

    # -- a sequence's life ------------------------------------------------------------------------------------------

    def match(self, root: str, tokens: list[int], limit: int, producer: KVOrigin | None) -> Cached:
        prefix = super().match(root, tokens, limit, producer)
        self.ahead = None
        if len(prefix.paths) == 1:
            return prefix
        cached = match_hidden_states(prefix, self.cache.finder(root, tokens, producer), limit, self.hidden_states, CUT)
        self.ahead = cached.hidden_states
        if self.ahead is not None:
            self.was_in_ram = self.cache.in_ram(cached)
            assert cached.num_tokens == prefix.num_tokens
            assert prefix.num_tokens < cached.paths[0].num_tokens == self.ahead.end <= limit
        return cached

    def start(self, tokens: list[int], root: str, producer: KVOrigin | None) -> Running | None:
        running = super().start(tokens, root, producer)
        if running is not None:
            use = self.uses[running.sequence] = Use(tokens, HiddenStateWriter(self.hidden_states, CUT))
            if self.ahead is not None:
                use.reader = HiddenStateReader(self.ahead.first, self.hidden_states.lock(self.ahead.names))
        return running

    def advance(self, running: Running, tokens: list[int], save: bool) -> bool:
        sequence, use = running.sequence, self.uses[running.sequence]
        if use.reader is not None:
            stop = min(sequence.num_tokens + len(tokens), use.reader.end)
            tokens = use.tokens[sequence.num_tokens : stop]
        done = super().advance(running, tokens, save)
        if done:
            use.filler.publish(self.name_blocks(sequence))
        if use.reader is not None and sequence.num_tokens == use.reader.end:
            self.hidden_states.release(use.reader.slots)
            use.reader = None
        return done

    def name_blocks(self, sequence: BlockTables) -> list[Node]:
        """The nodes of the first path, with the expected hidden states of base's nodes."""
        nodes, places = sequence.paths[0].nodes, self.arena.numbers(sequence.root, list(sequence.token_ids))
        for node in nodes:
            self.contents.named[HiddenStateKey(node.chain, CUT)] = places[node.position * BLOCK_SIZE : node.end]
        return nodes

    def compute(self, sequence: BlockTables, tokens: list[int]) -> None:
        use, start = self.uses[sequence], sequence.num_tokens
        base = self.arena.numbers(sequence.root, [*sequence.token_ids, *tokens])[start:]
        if use.reader is None:
            super().compute(sequence, tokens)
            self.fill(use.filler.pieces(start, self.base_end(sequence, start + len(tokens))), base)
            return
        assert self.read(use.reader.pieces(start, start + len(tokens))) == base
        super().compute(sequence, tokens)

    def computed_groups(self, sequence: BlockTables) -> range:
        """Without the lower layers, if it reads hidden states."""
        reader = self.uses[sequence].reader
        return range(0 if reader is None else last_layers(self.groups), len(self.groups))

    def base_end(self, sequence: BlockTables, end: int) -> int:
        everywhere = sequence.producer is not None and len(sequence.producer.groups) == len(self.groups)
        start = sequence.producer.start if everywhere and sequence.producer else end
        return max(sequence.num_tokens, min(start, end))

    def fill(self, pieces: list[Piece], places: Places) -> None:
        for piece in pieces:
            slot = self.contents.slots.setdefault(piece.slot, [-1] * BLOCK_SIZE)
            slot[piece.offset : piece.offset + piece.stop - piece.start] = places[piece.start : piece.stop]

    def read(self, pieces: list[Piece]) -> Places:
        parts = [self.contents.slots[p.slot][p.offset : p.offset + p.stop - p.start] for p in pieces]
        return tuple(place for part in parts for place in part)

    def end(self, running: Running) -> None:
        super().end(running)
        use = self.uses.pop(running.sequence)
        self.hidden_states.release([*use.filler.slots, *(use.reader.slots if use.reader else ())])

    def next_computed(self, running: Running, index: int) -> int:
        reader = self.uses[running.sequence].reader
        is_passed_by = reader is not None and index < last_layers(self.groups)
        return reader.end if reader is not None and is_passed_by else running.sequence.num_tokens

    # -- what happens to the trunk ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.hidden_states))
    @rule(count=PICK)
    def evict_trunk(self, count: int) -> None:
        taken = []
        for _ in range(count % self.num_slots):
            slot = self.hidden_states.allocate()
            if slot is not None:
                self.contents.slots[slot] = [-1] * BLOCK_SIZE
                taken.append(slot)
        self.hidden_states.release(taken)

    # -- what has to hold -------------------------------------------------------------------------------------------

    @invariant()
    def trunk_is_sound(self) -> None:
        readers = [use.reader for use in self.uses.values() if use.reader is not None]
        held = [slot for reader in readers for slot in reader.slots]
        self.hidden_states.check_integrity([*held, *(slot for use in self.uses.values() for slot in use.filler.slots)])
        assert len(self.hidden_states) <= self.num_slots

    @invariant()
    def trunk_holds_what_it_names(self) -> None:
        for name, slot in self.hidden_states._slots.items():
            assert tuple(self.contents.slots[slot]) == self.contents.named[name]


class WindowedTrunkMachine(HiddenStateMachine):
    """Below the cut a window, so that most of base's blocks have left RAM."""

    groups = (FakeGroup("window300.0", 300, 1), FakeGroup("full.0", None, 1))
    spare_bytes = 16


class PairedTrunkMachine(HiddenStateMachine):
    """Full and open blocks apart, on both sides of the cut."""

    groups = (*pair("full.0"), *pair("full.1"))
    spare_bytes = 16


TestTrunk = HiddenStateMachine.TestCase
TestWindowedTrunk = WindowedTrunkMachine.TestCase
TestPairedTrunk = PairedTrunkMachine.TestCase
TestTrunk.settings = TestWindowedTrunk.settings = TestPairedTrunk.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)


def fill(cache: HiddenStateCache, *names: HiddenStateKey) -> None:
    for name in names:
        slot = cache.allocate()
        assert slot is not None
        cache.publish(name, slot)


A, B, C, D = (HiddenStateKey(letter, CUT) for letter in "abcd")


def test_the_least_recently_used_goes_first_and_the_end_of_a_path_before_its_beginning() -> None:
    cache = HiddenStateCache(3, 1, Ledger(0))
    fill(cache, A, B, C)
    cache.touch([A, B])
    fill(cache, D)
    assert [cache.match([name]) for name in (A, B, C, D)] == [1, 1, 0, 1]
    fill(cache, C)
    assert cache.match([A, B]) == 1
    assert cache.match([B, A]) == 0, "without a gap"


def test_what_is_read_or_needed_by_the_new_one_stays() -> None:
    cache = HiddenStateCache(2, 1, Ledger(0))
    fill(cache, A, B)
    locked = cache.lock([A])
    assert cache.allocate(spare=[B]) is None
    fill(cache, C)
    assert (cache.match([A, C]), cache.match([B])) == (2, 0)
    cache.check_integrity(locked)
    with pytest.raises(BrokenInvariant):
        cache.check_integrity([])
    cache.clear()
    assert len(cache) == 1
    cache.release(locked)
    cache.clear()
    assert len(cache) == 0
    cache.check_integrity([])


def test_a_block_that_is_there_already_is_not_kept_twice() -> None:
    cache = HiddenStateCache(2, 1, Ledger(0))
    fill(cache, A)
    fill(cache, A)
    cache.check_integrity([])
    fill(cache, B)
    assert cache.match([A, B]) == 2


def test_a_filler_keeps_whole_blocks_only() -> None:
    """What it has no beginning of, or no continuation, goes nowhere."""
    cache = HiddenStateCache(9, 1, Ledger(0))
    filler = HiddenStateWriter(cache, CUT)
    assert filler.pieces(300, 400) == []
    assert [(p.offset, p.start, p.stop) for p in filler.pieces(400, 600)] == [(0, 112, 200)]
    first = filler.slots
    assert filler.pieces(601, 700) == [], "token 600 is missing"
    assert filler.slots == []
    assert [(p.slot, p.offset, p.start, p.stop) for p in filler.pieces(700, 800)] == [(first[0], 0, 68, 100)]
    cache.check_integrity(filler.slots)


@given(st.integers(0, 600), st.integers(1, 600))
def test_pieces_cover_a_step(start: int, count: int) -> None:
    first = start // BLOCK_SIZE
    reader = HiddenStateReader(first, range(100, 106))
    assert reader.end == (first + 6) * BLOCK_SIZE
    covered = [
        (piece.slot - 100 + first) * BLOCK_SIZE + piece.offset + place
        for piece in reader.pieces(start, start + count)
        for place in range(piece.stop - piece.start)
    ]
    assert covered == list(range(start, start + count))

"""A prefix cache beside a model of what every slot and file really holds (`cache_model`), and what has to be true."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, invariant

from agentcache.blocks.block_tables import BlockTables, Load
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from tests.blocks.cache_model import (
    Arena,
    FakeGroup,
    Groups,
    Places,
    first_needed,
    groups_of,
    last_layers,
    needed_slots,
    text_in,
)


@dataclass(eq=False)
class Running:
    """A sequence of the cache, with what has still to be loaded for it: the load and the bytes that were read.

    Attributes:
        state: the recurrent state that its row has: the number of its last token's prefix, or nothing.
    """

    sequence: BlockTables
    state: Places
    loads: list[tuple[Load, Places]]
    failed: list[Load] = field(default_factory=list)
    reserve_failed: bool = False


@dataclass(frozen=True)
class Write:
    node: Node
    group: int
    places: Places


class TracedCache(RuleBasedStateMachine):
    """The cache, its running sequences and files. What happens to them is for subclasses to say."""

    groups: Groups
    spare_bytes = 6
    state: FakeGroup | None = None
    state_budget = 0

    def __init__(self) -> None:
        super().__init__()
        budget = self.make_cache(0).ledger.floors + self.spare_bytes
        self.cache = self.make_cache(budget)
        self.arena = Arena(self.cache.slots.pools)
        self.running: list[Running] = []
        self.writes: list[Write] = []
        self.files: dict[tuple[str, int], Places] = {}

    def make_cache(self, budget: int) -> PrefixCache:
        return PrefixCache(self.groups, Ledger(budget), state=self.state, state_budget=self.state_budget)

    @property
    def num_groups(self) -> int:
        """Groups of which a producer may have some: the state's is the last."""
        return len(self.groups) + (self.state is not None)

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()
        counts = self.cache.count_blocks()
        assert counts.free + counts.live + counts.cached == sum(pool.capacity for pool in self.cache.slots.pools)
        assert min(counts.free, counts.live, counts.cached) >= 0
        for node in self.nodes():
            is_of_use = node.block_ids or node.stored or node.pending or node.readers or node.state is not None
            assert not node.is_leaf or is_of_use

    @invariant()
    def nodes_hold_what_they_name(self) -> None:
        for node in self.nodes():
            for index, block_id in node.block_ids.items():
                assert tuple(self.arena.slot(index, block_id)[: node.num_tokens]) == self.arena.of_node(node)
            assert node.pending <= {write.group for write in self.writes if write.node is node}
            for index in node.stored:
                assert self.files[node.chain, index] == self.held_by(node, index)
            if node.state is not None:
                held = self.arena.slots[len(self.groups), node.state]
                assert tuple(held) == self.held_by(node, len(self.groups))

    @invariant()
    def groups_hold_their_kind_of_blocks(self) -> None:
        for node in self.nodes():
            held = {*node.block_ids, *node.stored, *node.pending} - {len(self.groups)}
            assert held <= set(groups_of(self.groups, node.position * BLOCK_SIZE, node.end))

    @invariant()
    def groups_below_an_adapter_hold_nothing_of_its_own(self) -> None:
        for node in self.nodes():
            if node.producer.startswith(("a@", "b@")):
                assert min([*node.block_ids, *node.stored, *node.pending], default=99) >= last_layers(self.groups)

    @invariant()
    def sequences_hold_their_tokens(self) -> None:
        for running in self.running:
            sequence = running.sequence
            absent = {(load.group, load.block_id) for load in (*running.failed, *(load for load, _ in running.loads))}
            for index, table in enumerate(sequence.tables):
                places = self.places(sequence, index)
                self.check_coverage(sequence, index, max(sequence.num_tokens, self.next_computed(running, index)))
                for position, block_id in enumerate(table.block_ids, start=table.first_block):
                    expected = places[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
                    is_sealed = len(expected) == BLOCK_SIZE or self.groups[index].holds is not Holds.FULL
                    if block_id >= 0 and is_sealed and (index, block_id) not in absent:
                        assert tuple(self.arena.slot(index, block_id)[: len(expected)]) == expected

    def check_coverage(self, sequence: BlockTables, index: int, end: int) -> None:
        """The table has a slot for each block that is read, and no other one before `end`, but of wider windows."""
        table, needed = sequence.tables[index], needed_slots(self.groups, index, end)
        assert all(map(table.has_slot, needed))
        first = first_needed(self.groups, index, end)
        held = [position for position in range(first, -(-end // BLOCK_SIZE)) if table.has_slot(position)]
        is_reserved = self.groups[index].holds is Holds.FULL and end % BLOCK_SIZE  # to be sealed there
        assert [position for position in held if not is_reserved or position < end // BLOCK_SIZE] == needed
        if self.groups[index].holds is not Holds.OPEN:
            assert all(map(table.has_slot, range(table.first_block, end // BLOCK_SIZE)))
        if self.groups[index].holds is Holds.FULL:
            assert table.first_block >= 1, "the first block is never sealed"

    def held_by(self, node: Node, index: int) -> Places:
        """What a file of the node, or its snapshot, has to hold."""
        places = self.arena.of_node(node)
        return places[-1:] if index == len(self.groups) else places

    def state_of(self, running: Running) -> Places:
        """The recurrent state behind the sequence's last token."""
        return self.places(running.sequence, len(self.groups))[-1:]

    @invariant()
    def rows_have_their_own_states(self) -> None:
        for running in self.running if self.state is not None else []:
            if not running.loads:
                assert running.state == self.state_of(running)

    def next_computed(self, running: Running, index: int) -> int:
        """First token whose keys and values of group `index` the sequence is to compute."""
        return running.sequence.num_tokens

    def places(self, sequence: BlockTables, group: int, more: list[int] | None = None) -> Places:
        """What the group's slots of a sequence hold, and would hold with `more` tokens."""
        tokens = [*sequence.token_ids, *(more or [])]
        return self.arena.numbers(sequence.root, tokens, text_in(sequence.producer, group))

    def nodes(self) -> list[Node]:
        return list(self.cache.tree.walk())

    def snapshot(self) -> object:
        """What an operation that fails must leave alone."""
        tables = [[(t.first_block, tuple(t.block_ids)) for t in r.sequence.tables] for r in self.running]
        return tables, [r.sequence.num_tokens for r in self.running], self.cache.count_blocks().live

    def is_read(self, index: int, block_id: int) -> bool:
        return any(block_id in running.sequence.tables[index].block_ids for running in self.running)

    def is_exhausted(self, index: int) -> bool:
        """Whether group `index` has no slot to give: each one is read."""
        read = {block_id for running in self.running for block_id in running.sequence.tables[index].slots}
        return len(read) == self.cache.slots.pools[index].capacity

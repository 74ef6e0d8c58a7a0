"""What happens to sequences in a watched prefix cache: they are opened, loaded, computed, saved and closed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from agentcache.blocks.allocator import most_blocks
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin, Namespace
from agentcache.blocks.origin_paths import chain_keys, spans
from agentcache.blocks.pool import Holds, holds_of
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import Cached
from agentcache.errors import OutOfBlocks
from tests.blocks.cache_model import Places, Reference, first_needed, groups_of, last_layers
from tests.blocks.watched_cache import Running, TracedCache, Write

ROOTS = [Namespace("model", "cache", salt).root for salt in ("", "other")]
MAX_TOKENS = 6 * BLOCK_SIZE


@dataclass(frozen=True)
class Adapter:
    """A key of producers; it changes the last group only, or all; of a model with recurrent layers, these too."""

    key: str
    everywhere: bool

    def producer(self, start: int, num_groups: int, has_state: bool, last: int = -1) -> KVOrigin:
        """`last`: first group of the last layers, if not the last group."""
        last = num_groups - 1 if last < 0 else last
        first = 0 if self.everywhere else last if self.key == "a" or not has_state else num_groups
        return KVOrigin(self.key, start, frozenset(range(first, num_groups + has_state)))


def repeated(pieces: list[tuple[int, int]]) -> list[int]:
    return [token for token, count in pieces for _ in range(count)]


PIECES = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([1, 5, 16, 60, 200, 255, 256, 256, 512])), min_size=1, max_size=3
).map(repeated)
PICK = st.integers(0, 2**16)
SHARES = st.sampled_from([0.3, 0.9, 1, 1, 1])
ADAPTERS = st.sampled_from([None, None, Adapter("a", False), Adapter("b", False), Adapter("c", True)])
STARTS = st.sampled_from([0, 1, 5, 60, 255, 256, 260, 300, 300, 511, 512, 700, "last"])


class SequenceMachine(TracedCache):
    """Several sequences in any interleaving, as the engine and the persistence use the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[list[int]] = []

    # -- a sequence's life ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < 4)
    @rule(history=PICK, share=SHARES, more=PIECES, other_root=st.integers(0, 9), adapter=ADAPTERS, start=STARTS)
    def open(
        self, history: int, share: float, more: list[int], other_root: int, adapter: Adapter | None, start: int | str
    ) -> None:
        tokens = (self.recall(history, share) + more)[:MAX_TOKENS]
        self.start(tokens, ROOTS[other_root == 0], self.producer(adapter, start, tokens))

    @precondition(lambda self: len(self.running) < 4)
    @rule(history=PICK, share=SHARES, more=PIECES, save=st.booleans(), adapter=ADAPTERS, start=STARTS)
    def turn(
        self, history: int, share: float, more: list[int], save: bool, adapter: Adapter | None, start: int | str
    ) -> None:
        """A whole turn, as far as there are blocks for it."""
        tokens = (self.recall(history, share) + more)[:MAX_TOKENS]
        running = self.start(tokens, ROOTS[0], self.producer(adapter, start, tokens))
        while running in self.running and running.loads:
            self.settle(running, 0, succeeds=True)
        if running in self.running and self.advance(running, more, save):
            self.finish(running, 0, save)
            if save:
                self.settle_writes(len(self.writes), succeeds=True)

    def producer(self, adapter: Adapter | None, start: int | str, tokens: list[int]) -> KVOrigin | None:
        start = len(tokens) - 1 if isinstance(start, str) else start
        has_state, last = self.state is not None, last_layers(self.groups)
        return None if adapter is None else adapter.producer(start, len(self.groups), has_state, last)

    def recall(self, history: int, share: float) -> list[int]:
        """The beginning of what some sequence held or holds."""
        known = [*self.histories[-8:], *(list(running.sequence.token_ids) for running in self.running)]
        tokens = known[history % len(known)] if known else []
        return tokens[: int(len(tokens) * share)]

    def start(self, tokens: list[int], root: str, producer: KVOrigin | None) -> Running | None:
        prefix = self.match(root, tokens, len(tokens) - 1, producer)
        before = self.snapshot()
        try:
            sequence = self.cache.open(root, prefix)
        except OutOfBlocks:
            assert self.snapshot() == before
            return None
        for copy in sequence.copies:
            assert not copy.reopens or self.groups[copy.group].holds is Holds.OPEN
            source = self.arena.slot(copy.group - copy.reopens, copy.source)
            self.arena.slot(copy.group, copy.target)[:] = source
        assert list(sequence.token_ids) == tokens[: prefix.num_tokens]
        loads = [(load, self.files[load.node.chain, load.source_group][: load.num_tokens]) for load in sequence.loads]
        assert bool(loads) is not self.was_in_ram
        self.running.append(Running(sequence, (), loads))
        self.take_state(self.running[-1])
        return self.running[-1]

    def take_state(self, running: Running) -> None:
        """Once all is loaded the row has the state that it starts from."""
        sequence = running.sequence
        if sequence.state is not None and not running.loads:
            running.state = tuple(self.arena.slots[len(self.groups), sequence.state])
            self.cache.checkpoints.release_start(sequence)

    def match(self, root: str, tokens: list[int], limit: int, producer: KVOrigin | None) -> Cached:
        prefix = self.cache.match_prefix(root, tokens, limit, producer)
        reference = Reference(self.nodes(), self.groups, self.files, has_state=self.state is not None)
        assert prefix.num_tokens == reference.longest(root, tokens[:limit], producer)
        for path in prefix.paths:
            tail = path.tail.token_ids[: path.tail_tokens] if path.tail else ()
            held = [*chain.from_iterable(node.token_ids for node in path.nodes), *tail]
            assert held == tokens[: prefix.num_tokens]
        self.was_in_ram = self.cache.in_ram(prefix)
        return prefix

    def loading(self) -> list[Running]:
        return [r for r in self.running if r.loads]

    def ready(self) -> list[Running]:
        return [r for r in self.running if not r.loads]

    @precondition(lambda self: self.loading())
    @rule(which=PICK, load=PICK, succeeds=st.sampled_from([True, True, True, False]))
    def settle_load(self, which: int, load: int, succeeds: bool) -> None:
        self.settle(self.loading()[which % len(self.loading())], load, succeeds)

    def settle(self, running: Running, load: int, succeeds: bool) -> None:
        done, places = running.loads.pop(load % len(running.loads))
        if succeeds and done.group == len(self.groups):
            self.arena.slots[done.group, done.block_id] = list(places)
            self.cache.loaded(running.sequence, done)
        elif succeeds:
            self.arena.slot(done.group, done.block_id)[: done.num_tokens] = places
            self.cache.loaded(running.sequence, done)
        else:
            running.failed.append(done)
            self.files.pop((done.node.chain, done.source_group), None)
            self.cache.mark_missing(done.node, done.source_group)
        if running.failed and not running.loads:
            self.end(running)
            self.cache.abandon(running.sequence)
        else:
            self.take_state(running)

    @precondition(lambda self: self.ready())
    @rule(which=PICK, more=PIECES, aligned=st.booleans(), save=st.booleans())
    def step(self, which: int, more: list[int], aligned: bool, save: bool) -> None:
        running = self.ready()[which % len(self.ready())]
        end = running.sequence.num_tokens + len(more)
        beyond = end % BLOCK_SIZE if aligned and end % BLOCK_SIZE < len(more) else 0
        self.advance(running, more[: len(more) - beyond], save)

    def advance(self, running: Running, tokens: list[int], save: bool) -> bool:
        sequence = running.sequence
        tokens = tokens[: MAX_TOKENS - sequence.num_tokens]
        if not self.reserve(running, len(tokens)):
            return False
        self.compute(sequence, tokens)
        running.state = self.places(sequence, len(self.groups), tokens)[-1:]
        before = [dict(enumerate(table.block_ids, table.first_block)) for table in sequence.tables]
        published = self.cache.advance(sequence, tokens)
        self.check_published(sequence, len(tokens), published)
        self.check_read(sequence, before, published)
        if save:
            self.save_blocks(published)
        self.cache.leave_window(sequence)
        self.check_window(running)
        return True

    def check_published(self, sequence: BlockTables, added: int, published: list[PathBlock]) -> None:
        """Each group's part of every block that was filled, once; and the base tail with the producer's first token."""
        end, producer = sequence.num_tokens, sequence.producer
        filled = [n for n in range(BLOCK_SIZE, end + 1, BLOCK_SIZE) if n > end - added]
        expected = Counter((n, index) for n in filled for index in groups_of(self.groups, n - BLOCK_SIZE, n))
        if producer and producer.start % BLOCK_SIZE and end - added <= producer.start < end:
            expected.update((producer.start, index) for index in groups_of(self.groups, 0, 1))
            tail, computed = published[-1], self.computed_groups(sequence)
            assert all(
                tail.node.available(index) or index in tail.node.pending for index in tail.groups if index in computed
            )
        assert Counter((block.node.end, index) for block in published for index in block.groups) == expected

    def check_read(self, sequence: BlockTables, before: list[dict[int, int]], published: list[PathBlock]) -> None:
        """Blocks with a file are read as the request has computed them, whether they are in RAM or not."""
        for node, index in ((block.node, index) for block in published for index in block.groups):
            slot, table = before[index].get(node.position, -1), sequence.tables[index]
            if node.is_full and index in node.stored and slot >= 0:
                assert table.block_id(node.position) == slot

    @precondition(lambda self: self.ready())
    @rule(which=PICK, back=st.sampled_from([0, 1, 1, 9]))
    def share_tail(self, which: int, back: int) -> None:
        """What it has computed of its unfinished block is there for others, and it goes on behind that."""
        sequence = self.ready()[which % len(self.ready())].sequence
        end = sequence.num_tokens - back
        if end > 0:
            self.cache.share_tail(sequence, end)

    def reserve(self, running: Running, num_tokens: int) -> bool:
        before = list(running.sequence.token_ids)
        try:
            self.cache.reserve(running.sequence, num_tokens)
            self.check_open_slots(running, num_tokens)
            return True
        except OutOfBlocks:
            running.reserve_failed = True
            assert list(running.sequence.token_ids) == before
            assert any(self.is_exhausted(index) for index in range(len(self.groups)))
            return False

    def check_open_slots(self, running: Running, num_tokens: int) -> None:
        """The first block and each that the step reaches have one; others only from a reservation that failed."""
        sequence = running.sequence
        end = -(-(sequence.num_tokens + num_tokens) // BLOCK_SIZE)
        for index in self.computed_groups(sequence):
            table = sequence.tables[index]
            if self.groups[index].holds is Holds.OPEN:
                first = first_needed(self.groups, index, sequence.num_tokens)
                own = sequence.num_tokens // BLOCK_SIZE
                expected = [at for at in range(first, end) if at == 0 or at >= own]
                held = [position for position in range(table.first_block, table.end_block) if table.has_slot(position)]
                assert held == expected or (running.reserve_failed and set(held) >= set(expected))
                assert running.reserve_failed or len(held) <= (most_blocks(self.groups[index], num_tokens) or 0)

    def compute(self, sequence: BlockTables, tokens: list[int]) -> None:
        start = sequence.num_tokens
        for index in self.computed_groups(sequence):
            table, places = sequence.tables[index], self.places(sequence, index, tokens)
            if self.groups[index].holds is not Holds.ALL:
                continue
            for position in range(start, len(places)):
                slot = self.arena.slot(index, table.block_id(position // BLOCK_SIZE))
                slot[position % BLOCK_SIZE] = places[position]
        for index in self.computed_groups(sequence):
            if self.groups[index].holds is Holds.OPEN and tokens:
                self.compute_open(sequence, index, self.places(sequence, index, tokens))

    def computed_groups(self, sequence: BlockTables) -> range:
        """Groups of the layers that a step computes."""
        return range(len(self.groups))

    def compute_open(self, sequence: BlockTables, index: int, places: Places) -> None:
        """Write into the open slots, and seal filled blocks from there, but for the first one."""
        full, opened, start = sequence.tables[index - 1], sequence.tables[index], sequence.num_tokens
        first, last = start // BLOCK_SIZE, (len(places) - 1) // BLOCK_SIZE
        assert all(map(opened.has_slot, range(first, last + 1)))
        for block in range(first, last + 1):
            begin, end = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, len(places))
            known, content = max(0, start - begin), self.arena.slot(index, opened.block_id(block))
            content[known : end - begin] = places[begin + known : end]
            if end - begin == BLOCK_SIZE and block > 0:
                self.arena.slot(index - 1, full.block_id(block))[:] = content

    @precondition(lambda self: self.state is not None and self.ready())
    @rule(which=PICK, lasts=st.booleans())
    def keep_state(self, which: int, lasts: bool) -> None:
        self.snap(self.ready()[which % len(self.ready())], lasts)

    def snap(self, running: Running, lasts: bool = False) -> None:
        before = {node for node in self.nodes() if node.state is not None}
        slot = self.cache.checkpoints.keep(running.sequence, running.sequence.num_tokens, lasts=lasts)
        if slot is not None:
            self.arena.slots[len(self.groups), slot] = list(running.state)
        made = {node for node in self.nodes() if node.state is not None} - before
        assert len(made) == (slot is not None)

    def check_window(self, running: Running) -> None:
        for group, table in zip(self.groups, running.sequence.tables, strict=True):
            if group.window is not None and not running.reserve_failed:
                kept = table.slots if group.holds is Holds.OPEN else table.block_ids
                assert len(kept) <= -(-group.window // BLOCK_SIZE) + 1

    @precondition(lambda self: self.ready())
    @rule(which=PICK, back=st.sampled_from([0, 0, 0, 1, 7, 300]), save=st.booleans())
    def close(self, which: int, back: int, save: bool) -> None:
        self.finish(self.ready()[which % len(self.ready())], back, save)

    def finish(self, running: Running, back: int, save: bool) -> None:
        sequence = running.sequence
        wanted = max(0, sequence.num_tokens - back)
        keep = self.cache.open_blocks.keepable(sequence, wanted)
        holds = holds_of(self.groups)
        is_sealed = 0 < wanted // BLOCK_SIZE < sequence.num_tokens // BLOCK_SIZE
        assert keep == (wanted - wanted % BLOCK_SIZE if holds and is_sealed else wanted)
        if self.state is not None and not back:
            self.snap(running)
        self.end(running)
        self.histories.append(list(sequence.token_ids[:keep]))
        blocks = self.cache.close(sequence, keep)
        layout = spans(keep, sequence.producer, len(self.groups), has_state=self.state is not None, holds=holds)
        assert [block.node.chain for block in blocks] == chain_keys(sequence.root, sequence.token_ids, layout)
        assert [block.groups for block in blocks] == [span.groups for span in layout]
        for span, block in zip(layout, blocks, strict=True):
            assert set(block.groups) <= set(groups_of(self.groups, span.begin, span.end))
        assert sequence.closed
        if save:
            self.save_blocks(blocks)

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def abandon(self, which: int) -> None:
        running = self.running[which % len(self.running)]
        self.end(running)
        self.cache.abandon(running.sequence)

    def end(self, running: Running) -> None:
        self.running.remove(running)

    # -- files ------------------------------------------------------------------------------------------------------

    def save_blocks(self, blocks: list[PathBlock]) -> None:
        for block in blocks:
            for index in block.node.block_ids.keys() & set(block.groups):
                self.save_one(block.node, index)
            if block.node.state is not None:
                self.save_state(block.node)

    def save_state(self, node: Node) -> None:
        index = len(self.groups)
        if index not in node.stored and index not in node.pending:
            node.pending.add(index)
            self.writes.append(Write(node, index, tuple(self.arena.slots[index, node.state or 0])))

    def save_one(self, node: Node, index: int) -> None:
        if index not in node.stored and index not in node.pending:
            node.pending.add(index)
            slot = self.arena.slot(index, node.block_ids[index])
            self.writes.append(Write(node, index, tuple(slot[: node.num_tokens])))

    @precondition(lambda self: self.writes)
    @rule(count=st.integers(1, 9), succeeds=st.sampled_from([True, True, True, False]))
    def settle_writes(self, count: int, succeeds: bool) -> None:
        for write in self.writes[:count]:
            if succeeds:
                assert write.places == self.held_by(write.node, write.group)
                self.files[write.node.chain, write.group] = write.places
                self.cache.mark_stored(write.node, write.group)
            else:
                self.cache.mark_unwritten(write.node, write.group)
        del self.writes[:count]

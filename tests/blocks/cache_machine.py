"""The prefix cache beside a model of what every slot and file really holds.

Instead of keys and values a slot holds, for each of its 256 places, the number of the prefix that was computed there:
two places are equal only if all tokens up to them are. So whatever is overwritten, mixed up or read too late shows.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from itertools import chain

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.keys import BLOCK_SIZE, Namespace
from agentcache.blocks.prefix_cache import MIN_TAIL_TOKENS, CachedPrefix, Load, PrefixCache, Sequence
from agentcache.blocks.radix_tree import Node
from agentcache.errors import OutOfBlocks

ROOTS = [Namespace("model", "cache", salt).root for salt in ("", "other")]
MAX_TOKENS = 6 * BLOCK_SIZE
Places = tuple[int, ...]


@dataclass(frozen=True)
class FakeGroup:
    name: str
    window: int | None
    bytes_per_block: int

    def first_block_needed(self, num_tokens: int) -> int:
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // BLOCK_SIZE


@dataclass(eq=False)
class Running:
    """A sequence of the cache, with what has still to be loaded for it: the load and the bytes that were read."""

    sequence: Sequence
    loads: list[tuple[Load, Places]]
    failed: list[Load] = field(default_factory=list)
    reserve_failed: bool = False


@dataclass(frozen=True)
class Write:
    node: Node
    group: int
    places: Places


@dataclass
class Arena:
    """Contents of all slots, and the numbers of prefixes."""

    slots: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _numbers: dict[tuple[str | int, int], int] = field(default_factory=dict)
    _of_chain: dict[str, Places] = field(default_factory=dict)

    def slot(self, group: int, block_id: int) -> list[int]:
        return self.slots.setdefault((group, block_id), [-1] * BLOCK_SIZE)

    def numbers(self, root: str, token_ids: TokenIds[int]) -> Places:
        """The number of each prefix of `token_ids`."""
        last: str | int = root
        result = []
        for token in token_ids:
            last = self._numbers.setdefault((last, token), len(self._numbers))
            result.append(last)
        return tuple(result)

    def of_node(self, node: Node) -> Places:
        """What a slot of the node has to hold."""
        if node.chain not in self._of_chain:
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            tokens = list(chain.from_iterable(n.token_ids for n in reversed(path)))
            self._of_chain[node.chain] = self.numbers(path[-1].chain, tokens)[node.position * BLOCK_SIZE :]
        return self._of_chain[node.chain]


def repeated(pieces: list[tuple[int, int]]) -> list[int]:
    return [token for token, count in pieces for _ in range(count)]


PIECES = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([1, 5, 16, 60, 200, 255, 256, 256, 512])), min_size=1, max_size=3
).map(repeated)
PICK = st.integers(0, 2**16)
SHARES = st.sampled_from([0.3, 0.9, 1, 1, 1])


class CacheMachine(RuleBasedStateMachine):
    """Several sequences in any interleaving, as the engine and the persistence use the cache."""

    groups: tuple[FakeGroup, ...]
    spare_bytes = 6

    def __init__(self) -> None:
        super().__init__()
        budget = PrefixCache(self.groups, 0).slots.min_ram_budget + self.spare_bytes
        self.cache = PrefixCache(self.groups, budget)
        self.arena = Arena()
        self.running: list[Running] = []
        self.writes: list[Write] = []
        self.files: dict[tuple[str, int], Places] = {}
        self.histories: list[list[int]] = []

    # -- a sequence's life ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < 4)
    @rule(history=PICK, share=SHARES, more=PIECES, other_root=st.integers(0, 9))
    def open(self, history: int, share: float, more: list[int], other_root: int) -> None:
        self.start(self.recall(history, share) + more, ROOTS[other_root == 0])

    @precondition(lambda self: len(self.running) < 4)
    @rule(history=PICK, share=SHARES, more=PIECES, save=st.booleans())
    def turn(self, history: int, share: float, more: list[int], save: bool) -> None:
        """A whole turn, as far as there are blocks for it."""
        running = self.start(self.recall(history, share) + more, ROOTS[0])
        while running in self.running and running.loads:
            self.settle(running, 0, succeeds=True)
        if running in self.running and self.advance(running, more, save):
            self.finish(running, 0, save)
            if save:
                self.settle_writes(len(self.writes), succeeds=True)

    def recall(self, history: int, share: float) -> list[int]:
        """The beginning of what some sequence held or holds."""
        known = [*self.histories[-8:], *(running.sequence.token_ids for running in self.running)]
        tokens = known[history % len(known)] if known else []
        return tokens[: int(len(tokens) * share)]

    def start(self, tokens: list[int], root: str) -> Running | None:
        tokens = tokens[:MAX_TOKENS]
        prefix = self.match(root, tokens, len(tokens) - 1)
        before = self.snapshot()
        try:
            sequence = self.cache.open(root, prefix)
        except OutOfBlocks:
            assert self.snapshot() == before
            return None
        for copy in sequence.copies:
            self.arena.slot(copy.group, copy.target)[:] = self.arena.slot(copy.group, copy.source)
        assert sequence.token_ids == tokens[: prefix.num_tokens]
        loads = [(load, self.files[load.node.chain, load.group][: load.num_tokens]) for load in sequence.loads]
        assert bool(loads) is not self.was_in_ram
        self.running.append(Running(sequence, loads))
        return self.running[-1]

    def match(self, root: str, tokens: list[int], limit: int) -> CachedPrefix:
        prefix = self.cache.match_prefix(root, tokens, limit)
        assert prefix.num_tokens <= limit
        assert tokens[: prefix.num_tokens] == self.tokens_of(prefix)
        assert self.is_available(prefix)
        assert prefix.num_tokens == self.longest(root, tokens[:limit])
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
        if succeeds:
            self.arena.slot(done.group, done.block_id)[: done.num_tokens] = places
            self.cache.loaded(running.sequence, done)
        else:
            running.failed.append(done)
            self.files.pop((done.node.chain, done.group), None)
            self.cache.mark_missing(done.node, done.group)
        if running.failed and not running.loads:
            self.end(running)
            self.cache.abandon(running.sequence)

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
        end = sequence.num_tokens + len(tokens)
        self.compute(sequence, tokens)
        published = self.cache.advance(sequence, tokens)
        assert [node.end for node in published] == [n for n in range(256, end + 1, 256) if n > end - len(tokens)]
        if save:
            for node in published:
                self.save_node(node)
        self.cache.leave_window(sequence)
        self.check_window(running)
        return True

    def reserve(self, running: Running, num_tokens: int) -> bool:
        before = list(running.sequence.token_ids)
        try:
            self.cache.reserve(running.sequence, num_tokens)
            return True
        except OutOfBlocks:
            running.reserve_failed = True
            assert running.sequence.token_ids == before
            assert any(self.is_exhausted(index) for index in range(len(self.groups)))
            return False

    def compute(self, sequence: Sequence, tokens: list[int]) -> None:
        start = sequence.num_tokens
        places = self.arena.numbers(sequence.root, [*sequence.token_ids, *tokens])
        for index, table in enumerate(sequence.tables):
            for position in range(start, len(places)):
                slot = self.arena.slot(index, table.block_id(position // BLOCK_SIZE))
                slot[position % BLOCK_SIZE] = places[position]

    def check_window(self, running: Running) -> None:
        for group, table in zip(self.groups, running.sequence.tables, strict=True):
            if group.window is not None and not running.reserve_failed:
                assert len(table.block_ids) <= -(-group.window // BLOCK_SIZE) + 1

    @precondition(lambda self: self.ready())
    @rule(which=PICK, back=st.sampled_from([0, 0, 0, 1, 7, 300]), save=st.booleans())
    def close(self, which: int, back: int, save: bool) -> None:
        self.finish(self.ready()[which % len(self.ready())], back, save)

    def finish(self, running: Running, back: int, save: bool) -> None:
        keep = max(0, running.sequence.num_tokens - back)
        self.end(running)
        self.histories.append(running.sequence.token_ids[:keep])
        tail = self.cache.close(running.sequence, keep)
        assert (tail is not None) == (keep % BLOCK_SIZE > 0)
        assert running.sequence.closed
        if tail is not None:
            assert tail.end == keep
            if save:
                self.save_node(tail)

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def abandon(self, which: int) -> None:
        running = self.running[which % len(self.running)]
        self.end(running)
        self.cache.abandon(running.sequence)

    def end(self, running: Running) -> None:
        self.running.remove(running)

    # -- files ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.nodes())
    @rule(which=PICK)
    def save(self, which: int) -> None:
        self.save_node(self.nodes()[which % len(self.nodes())])

    def save_node(self, node: Node) -> None:
        for index, block_id in node.block_ids.items():
            if index not in node.stored and index not in node.pending:
                node.pending.add(index)
                self.writes.append(Write(node, index, tuple(self.arena.slot(index, block_id)[: node.num_tokens])))

    @precondition(lambda self: self.writes)
    @rule(count=st.integers(1, 9), succeeds=st.sampled_from([True, True, True, False]))
    def settle_writes(self, count: int, succeeds: bool) -> None:
        for write in self.writes[:count]:
            if succeeds:
                assert write.places == self.arena.of_node(write.node)
                self.files[write.node.chain, write.group] = write.places
                self.cache.mark_stored(write.node, write.group)
            else:
                self.cache.mark_unwritten(write.node, write.group)
        del self.writes[:count]

    @precondition(lambda self: self.nodes())
    @rule(which=PICK, what=st.sampled_from(["lose_file", "drop_tail", "evict", "evict", "evict_all"]))
    def disturb(self, which: int, what: str) -> None:
        getattr(self, what)(which)

    def lose_file(self, which: int) -> None:
        stored = [(node, index) for node in self.nodes() for index in node.stored]
        if not stored:
            return
        node, index = stored[which % len(stored)]
        del self.files[node.chain, index]
        self.cache.mark_missing(node, index)

    def drop_tail(self, which: int) -> None:
        tails = [node for node in self.nodes() if not node.is_full]
        if not tails:
            return
        tail = tails[which % len(tails)]
        for index in list(tail.stored):
            del self.files[tail.chain, index]
            self.cache.mark_missing(tail, index)
        self.cache.slots.drop(tail)
        assert not tail.block_ids

    # -- RAM --------------------------------------------------------------------------------------------------------

    def evict(self, which: int) -> None:
        node = self.nodes()[which % len(self.nodes())]
        free = self.cache.count_blocks().free
        before = dict(node.block_ids)
        held = node.pending or self.is_read(node) or any(child.block_ids for child in node.children)
        assert self.cache.slots.evict(node) is not bool(held)
        if not held:
            assert not node.block_ids
        else:
            assert node.block_ids == before
            assert self.cache.count_blocks().free == free

    def evict_all(self, _: int) -> None:
        """Only what is read, is being written, or is in front of such a block stays."""
        evicted = 1
        while evicted:
            evicted = sum(self.cache.slots.evict(node) for node in list(self.cache.tree.residents))
        for node in self.cache.tree.residents:
            assert node.pending or self.is_read(node) or any(child.block_ids for child in node.children)

    # -- what has to hold -------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()
        counts = self.cache.count_blocks()
        assert counts.free + counts.live + counts.cached == sum(pool.capacity for pool in self.cache.slots.pools)
        assert min(counts.free, counts.live, counts.cached) >= 0
        for node in self.nodes():
            assert not node.is_leaf or node.block_ids or node.stored or node.pending or node.readers, "useless"

    @invariant()
    def nodes_hold_what_they_name(self) -> None:
        for node in self.nodes():
            for index, block_id in node.block_ids.items():
                assert tuple(self.arena.slot(index, block_id)[: node.num_tokens]) == self.arena.of_node(node)
            assert node.pending <= {write.group for write in self.writes if write.node is node}
            for index in node.stored:
                assert self.files[node.chain, index] == self.arena.of_node(node)

    @invariant()
    def sequences_hold_their_tokens(self) -> None:
        for running in self.running:
            sequence = running.sequence
            absent = {(load.group, load.block_id) for load in (*running.failed, *(load for load, _ in running.loads))}
            places = self.arena.numbers(sequence.root, sequence.token_ids)
            for index, table in enumerate(sequence.tables):
                assert table.first_block <= self.groups[index].first_block_needed(sequence.num_tokens)
                assert table.end_block * BLOCK_SIZE >= sequence.num_tokens
                for position, block_id in enumerate(table.block_ids, start=table.first_block):
                    expected = places[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
                    if (index, block_id) not in absent:
                        assert tuple(self.arena.slot(index, block_id)[: len(expected)]) == expected

    def nodes(self) -> list[Node]:
        return list(self.cache.tree.walk())

    def snapshot(self) -> object:
        """What an operation that fails must leave alone."""
        tables = [[(t.first_block, tuple(t.block_ids)) for t in r.sequence.tables] for r in self.running]
        return tables, [r.sequence.num_tokens for r in self.running], self.cache.count_blocks().live

    @staticmethod
    def tokens_of(prefix: CachedPrefix) -> list[int]:
        tail = prefix.tail.token_ids[: prefix.tail_tokens] if prefix.tail else ()
        return [*chain.from_iterable(node.token_ids for node in prefix.nodes), *tail]

    def is_available(self, prefix: CachedPrefix) -> bool:
        return all(
            index in node.block_ids or (node.chain, index) in self.files and index in node.stored
            for index, group in enumerate(self.groups)
            for node in prefix.all_nodes
            if node.position >= group.first_block_needed(prefix.num_tokens)
        )

    def longest(self, root: str, tokens: list[int]) -> int:
        """Number of tokens, by looking at all nodes: full blocks along the path, then what shares most behind it."""
        path: list[Node] = []
        while True:
            rest = tokens[len(path) * BLOCK_SIZE :]
            shared = {child: common(child.token_ids, rest) for child in self.behind(path, root)}
            following = next((child for child, k in shared.items() if k == BLOCK_SIZE), None)
            if following is None:
                break
            path.append(following)
        most = max(shared.values(), default=0)
        prefixes = [CachedPrefix(tuple(path[:count]), None, 0) for count in range(len(path) + 1)]
        tails = [child for child, k in shared.items() if k == most and k >= min(MIN_TAIL_TOKENS, child.num_tokens)]
        prefixes += [CachedPrefix(tuple(path), tail, most) for tail in tails]
        return max(prefix.num_tokens for prefix in prefixes if self.is_available(prefix))

    def behind(self, path: list[Node], root: str) -> list[Node]:
        chain_key = path[-1].chain if path else root
        return [node for node in self.nodes() if node.parent is not None and node.parent.chain == chain_key]

    def is_read(self, node: Node) -> bool:
        return any(
            block_id in running.sequence.tables[index].block_ids
            for index, block_id in node.block_ids.items()
            for running in self.running
        )

    def is_exhausted(self, index: int) -> bool:
        """Whether group `index` has no slot to give: each one is read, or listed by a node that is stuck."""
        stuck = {node for node in self.nodes() if self.is_stuck(node)}
        kept = {node.block_ids[index] for node in stuck if index in node.block_ids}
        kept.update(chain.from_iterable(running.sequence.tables[index].block_ids for running in self.running))
        return len(kept) == self.cache.slots.pools[index].capacity

    def is_stuck(self, node: Node) -> bool:
        return self.is_read(node) or any(self.is_stuck(child) for child in node.children if child.block_ids)


def common(left: TokenIds[int], right: TokenIds[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))

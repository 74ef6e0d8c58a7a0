"""Which cached blocks a prompt may use, and where its new tokens go.

Joins the radix tree (what is known) with the slots of the cache groups (what is in RAM).
Who holds references to a slot:

    tree        one for each node that lists the slot
    sequence    one for each slot in its block tables, shared or private

Tokens in the tree are immutable. A sequence writes only behind its own tokens, in slots of its own or behind a tail
that nobody else goes on from; a full block is published into the tree as soon as it is computed, the partly filled last
one when the sequence is closed. Then a longer node may list the same slot as the tail that it grew from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.slots import BlockCounts, Group, Slots
from agentcache.errors import BrokenInvariant, OutOfBlocks

MIN_TAIL_TOKENS = 16  # copying fewer tokens of another block costs more than computing them


@dataclass(frozen=True)
class CachedPrefix:
    """Tokens that need not be computed. Valid until the cache is next changed.

    Args:
        nodes: full blocks, all of whose tokens are used.
        tail: a further node of which the first `tail_tokens` tokens are used, or None.
        num_tokens: tokens covered by both.
    """

    nodes: tuple[Node, ...]
    tail: Node | None
    tail_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.nodes) * BLOCK_SIZE + self.tail_tokens

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        return self.nodes if self.tail is None else (*self.nodes, self.tail)


@dataclass(frozen=True)
class Load:
    """A block to bring from disk into slot `block_id`: the first `num_tokens` tokens of `node`'s data of `group`."""

    node: Node
    group: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True)
class Copy:
    """A block to copy inside RAM (copy-on-write) from slot `source` to the private slot `target` of `group`."""

    group: int
    source: int
    target: int


@dataclass(eq=False)
class Sequence:
    """One running request's place in the cache.

    Attributes:
        root: chain key of its namespace.
        token_ids: the tokens whose keys and values are computed or cached.
        tables: one block table per group.
        nodes: the published full blocks, from the start.
        tail: the node that its first unfinished block was taken from, if any.
        loads, copies: what has to be done before the first step; emptied by whoever does it.
    """

    root: str
    token_ids: list[int]
    tables: list[BlockTable]
    nodes: list[Node]
    tail: Node | None = None
    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class PrefixCache:
    """All cached blocks of one model.

    Args:
        groups: the model's cache groups.
        ram_budget: bytes that all slots together may take.
    """

    def __init__(self, groups: TokenIds[Group], ram_budget: int) -> None:
        self.groups = tuple(groups)
        self._windowed = [(index, group) for index, group in enumerate(self.groups) if group.window is not None]
        self.tree = RadixTree()
        self.slots = Slots(self.groups, self.tree, ram_budget)
        self._sequences: set[Sequence] = set()

    # -- matching ---------------------------------------------------------------------------------------------------

    def match_prefix(self, root: str, token_ids: TokenIds[int], limit: int) -> CachedPrefix:
        """The longest prefix of at most `limit` tokens of which every group's needed blocks are in RAM or on disk.

        Follows the longest known path; where a block on it is lost, shorter ones beside that block are not looked at.
        Changes nothing.
        """
        path = self.tree.match_prefix(root, token_ids[:limit])
        for tail in sorted(path.tails, key=self._loads_needed):
            prefix = CachedPrefix(tuple(path.nodes), tail, path.tail_tokens)
            if self._is_worth_it(prefix) and self._missing(prefix) is None:
                return prefix
        prefix = CachedPrefix(tuple(path.nodes), None, 0)
        while (position := self._missing(prefix)) is not None:
            prefix = CachedPrefix(prefix.nodes[:position], None, 0)
        return prefix

    @staticmethod
    def _is_worth_it(prefix: CachedPrefix) -> bool:
        """Not for the few tokens that most prompts of a template share; but a whole tail is some agent's memory."""
        assert prefix.tail is not None
        return prefix.tail_tokens >= min(MIN_TAIL_TOKENS, prefix.tail.num_tokens)

    def _loads_needed(self, node: Node) -> int:
        return len(self.groups) - len(node.block_ids)

    def _missing(self, prefix: CachedPrefix) -> int | None:
        """Number of the last block that some group needs and nobody has; None if all are there."""
        firsts = self._first_blocks_needed(prefix)
        for node in reversed(prefix.all_nodes):
            for index, first in enumerate(firsts):
                if node.position >= first and not node.available(index):
                    return node.position
        return None

    def in_ram(self, prefix: CachedPrefix) -> bool:
        """Whether the prefix can be used without reading a file."""
        firsts = self._first_blocks_needed(prefix)
        return all(
            index in node.block_ids
            for node in prefix.all_nodes
            for index, first in enumerate(firsts)
            if node.position >= first
        )

    def _first_blocks_needed(self, prefix: CachedPrefix) -> list[int]:
        """By group, the number of the first block that what follows the prefix attends to."""
        num_tokens = prefix.num_tokens
        return [group.first_block_needed(num_tokens) for group in self.groups]

    # -- a sequence's life ------------------------------------------------------------------------------------------

    def open(self, root: str, prefix: CachedPrefix) -> Sequence:
        """A sequence that starts with `prefix`; its `loads` and `copies` are then due.

        Raises OutOfBlocks; then no more has happened than that idle blocks were evicted.
        """
        sequence = self._enter(root, prefix)
        # Everything that is there is retained before anything is allocated: allocation may evict.
        sources = self._share(sequence, prefix)
        try:
            self._allocate_absent(sequence, prefix)
        except OutOfBlocks:
            self._discard(sequence)
            raise
        finally:
            # The engine copies before it allocates again, so the sources need no reference until then.
            for index, block_id in sources:
                self.slots.pools[index].release(block_id)
        self.tree.touch(prefix.all_nodes)
        return sequence

    def _enter(self, root: str, prefix: CachedPrefix) -> Sequence:
        """The sequence without slots; from here on the prefix's nodes stay in the tree."""
        token_ids = [token for node in prefix.nodes for token in node.token_ids]
        if prefix.tail is not None:
            token_ids.extend(prefix.tail.token_ids[: prefix.tail_tokens])
        tables = [BlockTable() for _ in self.groups]
        sequence = Sequence(root, token_ids, tables, list(prefix.nodes), prefix.tail)
        self._sequences.add(sequence)
        for node in prefix.all_nodes:
            node.readers += 1
        return sequence

    def _share(self, sequence: Sequence, prefix: CachedPrefix) -> list[tuple[int, int]]:
        """Fill the tables with the slots that are in RAM (-1 for the others); retains and returns the tail's slots."""
        for index, group in enumerate(self.groups):
            table = sequence.tables[index]
            table.first_block = min(group.first_block_needed(prefix.num_tokens), len(prefix.nodes))
            for node in prefix.nodes[table.first_block :]:
                block_id = node.block_ids.get(index, -1)
                if block_id >= 0:
                    self.slots.pools[index].retain(block_id)
                table.block_ids.append(block_id)
        sources = list(prefix.tail.block_ids.items()) if prefix.tail else []
        for index, block_id in sources:
            self.slots.pools[index].retain(block_id)
        return sources

    def _allocate_absent(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        for index, table in enumerate(sequence.tables):
            for node in prefix.nodes[table.first_block :]:
                if table.block_id(node.position) < 0:
                    table.replace(node.position, self.slots.allocate(index))
                    sequence.loads.append(Load(node, index, table.block_id(node.position), BLOCK_SIZE))
            if prefix.tail is None:
                continue
            source = prefix.tail.block_ids.get(index)
            if source is not None and self._may_append(prefix, index, source):
                self.slots.pools[index].retain(source)
                table.block_ids.append(source)
                continue
            target = self.slots.allocate(index)
            table.block_ids.append(target)
            if source is None:
                sequence.loads.append(Load(prefix.tail, index, target, prefix.tail_tokens))
            else:
                sequence.copies.append(Copy(index, source, target))

    def _may_append(self, prefix: CachedPrefix, index: int, source: int) -> bool:
        """Whether a sequence may go on in the tail's own slot: all its tokens are used and nobody else reads it.

        The node covers only the tokens before, which stay as they are. (One reference is the tree's, one is `open`'s.)
        """
        assert prefix.tail is not None
        return prefix.tail_tokens == prefix.tail.num_tokens and self.slots.pools[index].ref_cnt(source) == 2

    def loaded(self, sequence: Sequence, load: Load) -> None:
        """A load is done: a whole block becomes the tree's too, so that others find it."""
        node = load.node
        if load.num_tokens == node.num_tokens and load.group not in node.block_ids and not sequence.closed:
            self.slots.list_in(node, load.group, load.block_id)

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Make room for `num_tokens` further tokens in every group. Raises OutOfBlocks; what was reserved stays."""
        end = -(-(sequence.num_tokens + num_tokens) // BLOCK_SIZE)
        if end == -(-sequence.num_tokens // BLOCK_SIZE):
            return  # in the block that is begun
        for index, table in enumerate(sequence.tables):
            while table.end_block < end:
                table.block_ids.append(self.slots.allocate(index))

    def advance(self, sequence: Sequence, token_ids: TokenIds[int]) -> list[Node]:
        """`token_ids` have been computed: publish the blocks they filled and return these, in order.

        Slots that fell out of a window stay until `leave_window`, so that their bytes can be taken first.
        """
        sequence.token_ids.extend(token_ids)
        published = []
        while (len(sequence.nodes) + 1) * BLOCK_SIZE <= sequence.num_tokens:
            position = len(sequence.nodes)
            parent = sequence.nodes[-1] if sequence.nodes else self.tree.root(sequence.root)
            tokens = sequence.token_ids[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
            node = self.tree.insert(parent, tokens)
            self._publish(sequence, node)
            node.readers += 1
            sequence.nodes.append(node)
            published.append(node)
        return published

    def _publish(self, sequence: Sequence, node: Node) -> None:
        """Give the sequence's slots to the node, or take the node's where it has some already.

        Where the node's data is on disk and not in RAM, it stays so: what this sequence computed could differ from the
        file in a rounding, and RAM and disk hold the same, bit for bit.
        """
        for index, table in enumerate(sequence.tables):
            if not table.first_block <= node.position < table.end_block:
                continue
            mine = table.block_id(node.position)
            theirs = node.block_ids.get(index)
            if theirs is None:
                if index not in node.stored and index not in node.pending:
                    self.slots.list_in(node, index, mine)
            elif theirs != mine:
                self.slots.pools[index].retain(theirs)
                self.slots.pools[index].release(mine)
                table.replace(node.position, theirs)

    def leave_window(self, sequence: Sequence) -> None:
        """Drop the slots that no later token of the sequence attends to; from the tree too if nobody reads them."""
        for index, group in self._windowed:
            table = sequence.tables[index]
            start = table.first_block
            for offset, block_id in enumerate(table.drop_before(group.first_block_needed(sequence.num_tokens))):
                self.slots.pools[index].release(block_id)
                node = sequence.nodes[start + offset]
                if node.block_ids.get(index) == block_id and not self.slots.is_read(index, block_id):
                    self.slots.take_from(node, index)

    def close(self, sequence: Sequence, keep: int | None = None) -> Node | None:
        """End a sequence, keeping its first `keep` tokens (default: all); returns the tail node, if there is one.

        Where `keep` lies inside an already published block, the tail lists that block's slots.
        """
        keep = sequence.num_tokens if keep is None else keep
        tail = self._publish_tail(sequence, keep) if keep % BLOCK_SIZE else None
        self._discard(sequence)
        if tail is not None:
            self.slots.prune(tail)
        return tail

    def _publish_tail(self, sequence: Sequence, keep: int) -> Node:
        position = keep // BLOCK_SIZE
        parent = sequence.nodes[position - 1] if position else self.tree.root(sequence.root)
        tail = self.tree.insert(parent, sequence.token_ids[position * BLOCK_SIZE : keep])
        self._publish(sequence, tail)
        return tail

    def abandon(self, sequence: Sequence) -> None:
        """End a sequence whose unfinished block is worth nothing; published blocks stay cached."""
        self._discard(sequence)

    def _discard(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        sequence.closed = True
        self._sequences.discard(sequence)
        for index, table in enumerate(sequence.tables):
            for block_id in table.block_ids:
                if block_id >= 0:
                    self.slots.pools[index].release(block_id)
            table.block_ids.clear()
        for node in [sequence.tail, *reversed(sequence.nodes)]:
            if node is not None:
                node.readers -= 1
                self.slots.prune(node)

    # -- files ------------------------------------------------------------------------------------------------------

    def mark_stored(self, node: Node, group: int) -> None:
        """The node's file of `group` is on disk."""
        node.pending.discard(group)
        node.stored.add(group)

    def mark_missing(self, node: Node, group: int) -> None:
        """The node's file of `group` is not on disk, or no longer. (One that is being written is another matter.)"""
        node.stored.discard(group)
        self.slots.prune(node)

    def mark_unwritten(self, node: Node, group: int) -> None:
        """The write of the node's file of `group` has failed."""
        node.pending.discard(group)
        self.slots.prune(node)

    def count_blocks(self) -> BlockCounts:
        """How many slots are free, read by sequences, and cached only."""
        free = live = total = 0
        for index, pool in enumerate(self.slots.pools):
            read = {block_id for sequence in self._sequences for block_id in sequence.tables[index].block_ids}
            free, live, total = free + pool.num_free, live + len(read), total + pool.capacity
        return BlockCounts(free, live, total - free - live)

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless every reference is accounted for: free + live + cached == total, tree sound."""
        self.tree.check_integrity()
        readers = Counter(node for sequence in self._sequences for node in (*sequence.nodes, sequence.tail) if node)
        for node in self.tree.walk():
            if node.readers != readers.pop(node, 0):
                raise BrokenInvariant(f"{node!r} miscounts its readers")
        if readers:
            raise BrokenInvariant(f"sequences go through {list(readers)}, which the tree has lost")
        for index in range(len(self.groups)):
            tables = (sequence.tables[index] for sequence in self._sequences)
            self.slots.check_integrity(index, Counter(block_id for table in tables for block_id in table.block_ids))
        if self.slots.capacity_bytes > self.slots.ram_budget:
            raise BrokenInvariant("the RAM budget is exceeded")

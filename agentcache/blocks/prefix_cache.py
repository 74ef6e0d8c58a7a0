"""Prefix cache: which cached blocks a prompt uses, and where its new tokens go.

Cached tokens are immutable. A request writes only after its own: in private slots, or in the slot of a tail that no
other request extends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from agentcache.api.stats import BASE
from agentcache.blocks.allocator import BlockAllocator, EvictionOrder
from agentcache.blocks.block_tables import BlockTables, Load, OriginPath, PathBlock, check_sequences
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED, KVOrigin
from agentcache.blocks.ledger import UNBOUNDED, Ledger
from agentcache.blocks.open_blocks import OpenBlocks
from agentcache.blocks.origin_paths import NamedBlock, has_base_tail, state_layout
from agentcache.blocks.pool import BlockCounts, BlockTable, Group, Slots, are_paired, holds_of
from agentcache.blocks.radix_tree import Node, RadixTree, pack, unpack
from agentcache.blocks.search import Cached, CheckpointFinder, PrefixFinder
from agentcache.blocks.sharing import Publisher, append_nodes, attach_prefix, nodes_ahead
from agentcache.blocks.snapshots import DEFAULT_INTERVAL, Snapshots
from agentcache.errors import BrokenInvariant, OutOfBlocks


class PrefixCache:
    """All cached blocks of one model, or of one residual cache."""

    def __init__(
        self,
        groups: Sequence[Group],
        ledger: Ledger,
        *,
        state: Group | None = None,
        state_budget: int = 0,
        snapshot_tokens: int = DEFAULT_INTERVAL,
        name: str = BASE,
        headroom: Callable[[], int] = lambda: UNBOUNDED,
    ) -> None:
        self.groups = tuple(groups)
        self.holds = holds_of(self.groups)
        if not are_paired(self.holds):
            raise BrokenInvariant(f"groups of full and open blocks are not in pairs: {self.holds}")
        self.ledger = ledger
        self.tree = RadixTree()
        self.slots = Slots(self.groups, self.tree)
        self._sequences: set[BlockTables] = set()
        eviction = EvictionOrder(self.slots, self.tree)
        self.allocator = BlockAllocator(self.slots, eviction, ledger, self._sequences, headroom, name)
        self.open_blocks = OpenBlocks(self.groups)
        self.snapshots = (
            None
            if state is None
            else Snapshots(state, len(self.groups), state_budget, ledger, self.slots.prune, snapshot_tokens)
        )
        self.all_groups = self.groups if self.snapshots is None else (*self.groups, self.snapshots.group)
        self._publisher = Publisher(self.tree, self.slots)
        self.checkpoints = Checkpoints(self.tree, self.slots, self._publisher, self.snapshots)
        self._windowed = {index for index, group in enumerate(self.groups) if group.window is not None}

    def match_prefix(
        self,
        root: str,
        token_ids: Sequence[int],
        limit: int,
        producer: KVOrigin | None = None,
    ) -> Cached:
        return self.finder(root, token_ids, producer).match(limit)

    def finder(self, root: str, token_ids: Sequence[int], producer: KVOrigin | None = None) -> PrefixFinder:
        return PrefixFinder(self.tree, self.groups, root, token_ids, producer, self.snapshots)

    def in_ram(self, prefix: Cached) -> bool:
        if prefix.snapshot is not None and prefix.snapshot.state is None:
            return False
        return all(path.is_in_ram(index, self.groups) for path in prefix.paths for index in path.groups)

    def open(self, root: str, prefix: Cached) -> BlockTables:
        """Return block tables filled with `prefix`. Raises OutOfBlocks."""
        if self.snapshots is not None and prefix.snapshot is not None:
            self.snapshots.touch(prefix.snapshot)
        sequence = self._enter(root, prefix)
        try:
            attach_prefix(sequence, prefix, self.allocator)
        except BaseException:
            self.abandon(sequence)
            raise
        self.touch(prefix)
        self.allocator.note_use()
        return sequence

    def touch(self, prefix: Cached) -> None:
        for path in prefix.paths:
            self.tree.touch(path.all_nodes)

    def _enter(self, root: str, prefix: Cached) -> BlockTables:
        # One `unpack`, for speed.
        token_ids = unpack(b"".join(node.packed for node in prefix.paths[-1].all_nodes))[: prefix.num_tokens]
        tables = [BlockTable() for _ in self.groups]
        count = prefix.num_tokens // BLOCK_SIZE
        paths = [
            OriginPath(path.layout, list(path.nodes[:count]), path.tail, list(path.nodes[count:]))
            for path in prefix.paths
        ]
        state = None if self.snapshots is None else self.snapshots.enter(prefix.snapshot)
        sequence = BlockTables(root, prefix.producer, token_ids, tables, paths, state=state)
        start = prefix.snapshot
        if self.snapshots is not None and start is not None:
            sequence.snapshots.append(start)
            if start.state is None and state is not None:
                sequence.loads.append(Load(start, self.snapshots.index, state, start.num_tokens))
        self._sequences.add(sequence)
        for path in paths:
            for node in path.read_nodes:
                node.readers += 1
        return sequence

    def loaded(self, sequence: BlockTables, load: Load) -> None:
        node = load.node
        if self.snapshots is not None and load.group == self.snapshots.index:
            if not sequence.closed:
                self.snapshots.retain(load.block_id)
                self.snapshots.list_in(node, load.block_id)
            return
        if load.num_tokens == node.num_tokens and load.group not in node.block_ids and not sequence.closed:
            self.slots.list_in(node, load.group, load.block_id)

    def reserve(self, sequence: BlockTables, num_tokens: int) -> None:
        """Allocate slots for `num_tokens` more. Raises OutOfBlocks, keeping those it got.

        Groups of sealed and of open blocks both get one for each block that the step may seal.
        """
        end = -(-(sequence.num_tokens + num_tokens) // BLOCK_SIZE)
        for index, table in enumerate(sequence.tables):
            while table.end_block < end:
                table.block_ids.append(self.allocator.allocate(index))

    def tokens_ahead(self, sequence: BlockTables, token_ids: Sequence[int], end: int) -> int:
        return len(nodes_ahead(self.tree, sequence, token_ids, end)) * BLOCK_SIZE

    def catch_up(self, sequence: BlockTables, token_ids: Sequence[int], end: int) -> None:
        for nodes in nodes_ahead(self.tree, sequence, token_ids, end):
            append_nodes(self.slots, sequence, nodes)
        for path in sequence.paths:
            self.tree.touch(path.nodes)

    def advance(self, sequence: BlockTables, token_ids: Sequence[int]) -> list[PathBlock]:
        """Record computed tokens; publish and return the blocks that they fill, and a base tail.

        Slots outside a window stay until `leave_window`, to be saved.
        """
        was_hidden = has_base_tail(sequence.producer, sequence.num_tokens)
        sequence.token_ids.extend(token_ids)
        published = [block for path in sequence.paths for block in self._publisher.publish_full(sequence, path)]
        if has_base_tail(sequence.producer, sequence.num_tokens) and not was_hidden:
            published.append(self._publisher.publish_base_tail(sequence))
            self.slots.prune(published[-1].node)  # without attention it has no data
        return published

    def share_tail(self, sequence: BlockTables, end: int) -> None:
        """Publish an unfinished block up to token `end`; other requests continue in copies."""
        if end % BLOCK_SIZE and self.open_blocks.keepable(sequence, end) == end:
            for path in sequence.paths:
                self.slots.prune(self._publisher.list_slots(sequence, path, end))

    def leave_window(self, sequence: BlockTables, read_from: int | None = None) -> None:
        """Drop slots that no later token reads, and unlist those that no request reads.

        `read_from`: first token to compute, for base's tables of a residual request; their slots stay listed.
        """
        for path in sequence.paths if self._windowed else ():
            for index in self._windowed.intersection(path.groups):
                self._leave_window(sequence, path, index, read_from)

    def _leave_window(self, sequence: BlockTables, path: OriginPath, index: int, read_from: int | None) -> None:
        table, num_tokens = sequence.tables[index], sequence.num_tokens
        reader = num_tokens if read_from is None else min(num_tokens, read_from)
        if self.open_blocks.keeps_first(index, reader):
            start, dropped = FIRST_SEALED, table.clear(FIRST_SEALED, reader // BLOCK_SIZE)
        else:
            start, dropped = table.first_block, table.drop_before(self.groups[index].first_block_needed(reader))
        for node, block_id in zip(path.nodes[start:], dropped, strict=False):
            if block_id < 0:
                continue
            self.slots.pools[index].release(block_id)
            if read_from is not None:
                continue
            if node.block_ids.get(index) == block_id and not self.slots.is_read(index, block_id):
                self.slots.take_from(node, index)

    def close(self, sequence: BlockTables, keep: int | None = None) -> list[PathBlock]:
        """End a request, keep its first `keep` tokens; return its blocks, ordered as `spans`.

        `keep`: an answer of `OpenBlocks.keepable`.
        """
        keep = sequence.num_tokens if keep is None else keep
        if keep != self.open_blocks.keepable(sequence, keep):
            raise BrokenInvariant(f"{keep} tokens end in a sealed block")
        blocks = [block for path in sequence.paths for block in self._keep(sequence, path, keep)]
        if has_base_tail(sequence.producer, keep):
            blocks.append(self._publisher.publish_base_tail(sequence))
        self.abandon(sequence)
        for block in blocks:
            if not block.node.is_full:
                self.slots.prune(block.node)
        return blocks

    def _keep(self, sequence: BlockTables, path: OriginPath, keep: int) -> list[PathBlock]:
        nodes = path.nodes[: keep // BLOCK_SIZE]
        if keep % BLOCK_SIZE:
            nodes.append(self._publisher.publish(sequence, path, keep))
        return [PathBlock(node, path.groups_of(node)) for node in nodes]

    def abandon(self, sequence: BlockTables) -> None:
        """End a request without its unfinished block. Idempotent."""
        if sequence.closed:
            return
        sequence.closed = True
        self._sequences.discard(sequence)
        for index, table in enumerate(sequence.tables):
            # Last slot first: the next request gets ascending ones, restored in one run.
            for block_id in reversed(table.block_ids):
                if block_id >= 0:
                    self.slots.pools[index].release(block_id)
            table.block_ids.clear()
        for path in sequence.paths:
            for node in path.read_nodes:
                node.readers -= 1
                self.slots.prune(node)
        if self.snapshots is not None:
            self.checkpoints.release_start(sequence)
            self.snapshots.leave()

    def mark_stored(self, node: Node, group: int) -> None:
        node.pending.discard(group)
        node.stored.add(group)

    def mark_missing(self, node: Node, group: int) -> None:
        """Note that a file is not on disk; a pending write stays."""
        node.stored.discard(group)
        self.slots.prune(node)

    def mark_unwritten(self, node: Node, group: int) -> None:
        node.pending.discard(group)
        self.slots.prune(node)

    def evict(self, blocks: Iterable[NamedBlock]) -> None:
        """Free slots of unread blocks without pending writes, last first."""
        found = [(node, block.groups) for block in blocks if (node := self.tree.node(block.chain)) is not None]
        for node, groups in sorted(found, key=lambda entry: entry[0].position, reverse=True):
            if self.snapshots is not None and self.snapshots.index in groups:
                self.snapshots.evict(node)
            else:
                self.slots.evict(node, groups)

    def count_blocks(self) -> BlockCounts:
        free = live = total = 0
        for index, pool in enumerate(self.slots.pools):
            read = {block_id for sequence in self._sequences for block_id in sequence.tables[index].slots}
            free, live, total = free + pool.num_free, live + len(read), total + pool.capacity
        return BlockCounts(free, live, total - free - live)

    def check_integrity(self) -> None:
        self.tree.check_integrity()
        check_sequences(self._sequences, self.tree, has_state=self.snapshots is not None)
        if self.snapshots is not None:
            started = [sequence.state for sequence in self._sequences if sequence.state is not None]
            self.snapshots.check_integrity(len(self._sequences), started, self.tree.walk())
        for index in range(len(self.groups)):
            tables = (sequence.tables[index] for sequence in self._sequences)
            self.slots.check_integrity(index, Counter(block_id for table in tables for block_id in table.slots))
        self.allocator.check_integrity()
        self.ledger.check_integrity()


class Checkpoints:
    """Checkpoints of requests and lineages; none without recurrent state."""

    def __init__(self, tree: RadixTree, slots: Slots, publisher: Publisher, snapshots: Snapshots | None) -> None:
        self._tree = tree
        self._slots = slots
        self._publisher = publisher
        self._snapshots = snapshots

    def keep(
        self, sequence: BlockTables, num_tokens: int, *, lasts: bool = False, starts_next: bool = False
    ) -> int | None:
        """List a checkpoint after `num_tokens` and return its slot; None if one exists or there is no room.

        RAM keeps a request's last two longest. With `lasts`, this one as long: other conversations start there. With
        `starts_next`, it stays one of the two: the next prompt probably starts there.
        """
        snapshots = self._snapshots
        if snapshots is None or not num_tokens:
            return None
        node = self._publisher.node_of(sequence, sequence.state_path, num_tokens)
        if not lasts and node not in sequence.snapshots:
            self._note(snapshots, sequence, node, starts_next=starts_next)
        if node.state is not None:
            snapshots.touch(node)
            return None
        try:
            slot = snapshots.allocate()
        except OutOfBlocks:
            self._slots.prune(node)
            return None
        snapshots.list_in(node, slot)
        return slot

    def _note(self, snapshots: Snapshots, sequence: BlockTables, node: Node, *, starts_next: bool) -> None:
        kept = sequence.snapshots[-1:] if sequence.next_start is None else [sequence.next_start]
        for older in sequence.snapshots:
            if older not in kept:
                snapshots.expire(older)
        sequence.snapshots = [*kept, node]
        if starts_next:
            sequence.next_start = node

    def expect_no_start(self, sequence: BlockTables) -> None:
        """Withdraw `starts_next`: that checkpoint leaves RAM first."""
        if self._snapshots is not None and sequence.next_start is not None:
            self._snapshots.expire(sequence.next_start)
            sequence.next_start = None

    def release_start(self, sequence: BlockTables) -> None:
        """Release the slot that the request starts from, once its row has copied it."""
        slot, sequence.state = sequence.state, None
        if slot is not None:
            assert self._snapshots is not None
            self._snapshots.release(slot)

    def find(self, root: str, token_ids: Sequence[int], num_tokens: int, producer: KVOrigin | None) -> list[Node]:
        """Return a lineage's nodes with checkpoints, in order."""
        if self._snapshots is None:
            return []
        layout = state_layout(producer, len(self._slots.groups))
        finder = CheckpointFinder(self._tree, root, pack(token_ids[:num_tokens]), layout, self._snapshots)
        return list(finder.ends(num_tokens))[::-1]

    def node(self, root: str, token_ids: Sequence[int], num_tokens: int, producer: KVOrigin | None) -> Node:
        """Return the node, created if missing."""
        path, node = state_layout(producer, len(self._slots.groups)), self._tree.root(root)
        for begin in range(0, num_tokens, BLOCK_SIZE):
            end = min(begin + BLOCK_SIZE, num_tokens)
            node = self._tree.insert(node, token_ids[begin:end], path.origin_of(end))
        return node

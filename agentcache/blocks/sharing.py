"""Moves blocks between the tree and a request's block tables."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.blocks.allocator import BlockAllocator
from agentcache.blocks.block_tables import BlockTables, Load, OriginPath, PathBlock
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.origin_paths import base_tail_groups
from agentcache.blocks.pool import BlockTable, Copy, Holds, Slots, holds_of
from agentcache.blocks.radix_tree import Node, RadixTree, pack
from agentcache.blocks.search import Cached, CachedPath


def attach_prefix(sequence: BlockTables, prefix: Cached, allocator: BlockAllocator) -> None:
    """Fill empty block tables with `prefix`. Raises OutOfBlocks, leaving them partly filled."""
    slots = allocator.slots
    # Retain first: allocation may evict.
    for path in prefix.paths:
        _share(sequence, path, slots)
    sources = [source for path in prefix.paths for source in _tail_slots(path)]
    for index, block_id in sources:
        slots.pools[index].retain(block_id)
    try:
        for path in prefix.paths:
            for index in path.groups:
                _allocate_absent(sequence, path, index, allocator)
                if path.tail is not None:
                    _allocate_tail(sequence, path, path.tail, index, allocator)
    finally:
        # The engine copies before its next allocation.
        for index, block_id in sources:
            slots.pools[index].release(block_id)


def _share(sequence: BlockTables, path: CachedPath, slots: Slots) -> None:
    for index in path.groups:
        table, read = sequence.tables[index], path.nodes_read(index, slots.groups)
        table.first_block = read[0].position if read else len(path.nodes)
        if slots.groups[index].holds is Holds.FULL:
            table.first_block = max(FIRST_SEALED, table.first_block)
        table.block_ids = [node.block_ids.get(index, -1) for node in read]
        for block_id in table.slots:
            slots.pools[index].retain(block_id)
        table.block_ids += [-1] * (len(path.nodes) - table.end_block)  # sealed blocks, in an open group


def _tail_slots(path: CachedPath) -> list[tuple[int, int]]:
    block_ids = {} if path.tail is None else path.tail.block_ids
    sources = (path.tail_source(index) for index in path.groups)
    return [(source, block_ids[source]) for source in sources if source is not None and source in block_ids]


def _allocate_absent(sequence: BlockTables, path: CachedPath, index: int, allocator: BlockAllocator) -> None:
    table = sequence.tables[index]
    for node in path.nodes_read(index, allocator.slots.groups):
        if table.block_id(node.position) < 0:
            table.replace(node.position, allocator.allocate(index))
            sequence.loads.append(Load(node, index, table.block_id(node.position), BLOCK_SIZE))


def _allocate_tail(sequence: BlockTables, path: CachedPath, tail: Node, index: int, allocator: BlockAllocator) -> None:
    source_group = path.tail_source(index)
    if source_group is None:
        return
    table, source, reopens = sequence.tables[index], tail.block_ids.get(source_group), path.reopens(index)
    if source is not None and path.ends_with_a_block and _may_write_behind(tail, index, source, allocator.slots):
        allocator.slots.pools[index].retain(source)
        table.block_ids.append(source)
        return
    target = allocator.allocate(index)
    table.block_ids.append(target)
    if source is None:
        sequence.loads.append(Load(tail, index, target, path.tail_tokens, reopens))
    else:
        sequence.copies.append(Copy(index, source, target, reopens))


def _may_write_behind(tail: Node, index: int, block_id: int, slots: Slots) -> bool:
    if slots.num_readers(index, block_id) > 1:  # one is `attach_prefix`
        return False
    assert tail.parent is not None
    here = (node for node in tail.parent.children if node.block_ids.get(index) == block_id)
    return all(node.num_tokens <= tail.num_tokens for node in here)


def nodes_ahead(tree: RadixTree, sequence: BlockTables, token_ids: Sequence[int], end: int) -> list[list[Node]]:
    """Return full blocks in RAM after the request's end, one node per origin path."""
    if sequence.num_tokens % BLOCK_SIZE or any(path.ahead for path in sequence.paths):
        return []
    found: list[list[Node]] = []
    count = sequence.num_tokens // BLOCK_SIZE
    parents = [path.parent_of(count, tree.peek(sequence.root)) for path in sequence.paths]
    for block_end in range((count + 1) * BLOCK_SIZE, end + 1, BLOCK_SIZE):
        packed = pack(token_ids[block_end - BLOCK_SIZE : block_end])
        nodes = [
            node
            for path, parent in zip(sequence.paths, parents, strict=True)
            if (node := parent.child(packed, path.layout.origin_of(block_end))) is not None and _in_ram(node, path)
        ]
        if len(nodes) < len(sequence.paths):
            break
        found.append(nodes)
        parents = nodes
    return found


def _in_ram(node: Node, path: OriginPath) -> bool:
    return all(index in node.block_ids for index in path.groups_of(node))


def append_nodes(slots: Slots, sequence: BlockTables, nodes: Sequence[Node]) -> None:
    """Append another request's block, in place of a reserved slot."""
    position = sequence.num_tokens // BLOCK_SIZE
    for path, node in zip(sequence.paths, nodes, strict=True):
        path.nodes.append(node)
        node.readers += 1
        for index in path.groups:
            block_id = node.block_ids[index] if index in path.groups_of(node) else -1
            _append_slot(slots, index, sequence.tables[index], position, block_id)
    sequence.token_ids.extend(nodes[0].token_ids)


def _append_slot(slots: Slots, index: int, table: BlockTable, position: int, block_id: int) -> None:
    """Set the slot of the block after the request's end; -1 for none."""
    if position < table.first_block:  # block 0, in a group of sealed ones
        return
    if block_id >= 0:
        slots.pools[index].retain(block_id)
    if table.has_slot(position):
        slots.pools[index].release(table.block_id(position))
    if table.has(position):
        table.replace(position, block_id)
    else:
        table.block_ids.append(block_id)


class Publisher:
    """Lists computed blocks of requests in the tree."""

    def __init__(self, tree: RadixTree, slots: Slots) -> None:
        self._tree = tree
        self._slots = slots

    def publish_full(self, sequence: BlockTables, path: OriginPath) -> list[PathBlock]:
        published = []
        while (len(path.nodes) + 1) * BLOCK_SIZE <= sequence.num_tokens:
            node = self.publish(sequence, path, (len(path.nodes) + 1) * BLOCK_SIZE)
            node.readers += 1
            path.nodes.append(node)
            if path.ahead:
                path.ahead.pop(0).readers -= 1  # the same node
            published.append(PathBlock(node, path.groups_of(node)))
        return published

    def publish(self, sequence: BlockTables, path: OriginPath, end: int) -> Node:
        """Return the node before token `end`. The request takes over its slots."""
        node = self.list_slots(sequence, path, end)
        for index in path.groups_of(node):
            self._adopt(sequence, node, index)
        return node

    def list_slots(self, sequence: BlockTables, path: OriginPath, end: int) -> Node:
        """Return the node before token `end`, with the request's slots in groups without data.

        RAM must equal the file bit for bit; computed KV could differ by rounding.
        """
        node = self.node_of(sequence, path, end)
        for index in path.groups_of(node):
            self._offer(sequence, node, index)
        return node

    def publish_base_tail(self, sequence: BlockTables) -> PathBlock:
        """List base's part of the block where the adapter starts: of all paths, in the request's own slots.

        Not in an open group whose slot of the block has been dropped since.
        """
        assert sequence.producer is not None
        start = sequence.producer.start
        position = start // BLOCK_SIZE
        parent = sequence.paths[-1].parent_of(position, self._tree.root(sequence.root))
        tail = self._tree.insert(parent, sequence.token_ids[position * BLOCK_SIZE : start])
        groups = base_tail_groups(len(sequence.tables), holds_of(self._slots.groups))
        for index in groups:
            self._offer(sequence, tail, index)
        return PathBlock(tail, groups)

    def node_of(self, sequence: BlockTables, path: OriginPath, end: int) -> Node:
        position = (end - 1) // BLOCK_SIZE
        parent = path.parent_of(position, self._tree.root(sequence.root))
        tokens = sequence.token_ids[position * BLOCK_SIZE : end]
        return self._tree.insert(parent, tokens, path.layout.origin_of(end))

    def _offer(self, sequence: BlockTables, node: Node, index: int) -> None:
        table = sequence.tables[index]
        if table.has_slot(node.position) and not node.available(index) and index not in node.pending:
            self._slots.list_in(node, index, table.block_id(node.position))

    def _adopt(self, sequence: BlockTables, node: Node, index: int) -> None:
        """Read the node's slot instead of the request's own, if the block has no file.

        A block with a file may be evicted. The request then reads its own data; it also does so if the block is in RAM,
        so that eviction changes no answer.
        """
        table, theirs = sequence.tables[index], node.block_ids.get(index)
        if theirs is not None and index not in node.stored and table.has_slot(node.position):
            self._slots.pools[index].retain(theirs)
            self._slots.pools[index].release(table.block_id(node.position))
            table.replace(node.position, theirs)

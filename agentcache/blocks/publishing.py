"""Publishes computed blocks in the radix tree."""

from __future__ import annotations

from agentcache.blocks.block_tables import BlockTables, OriginPath, PathBlock
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.slots import Slots


class Publisher:
    """Creates nodes that list the slots of requests."""

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
            published.append(PathBlock(node, path.groups))
        return published

    def publish(self, sequence: BlockTables, path: OriginPath, end: int) -> Node:
        """Return the path's node that ends before token `end`, sharing slots with the request.

        A node with data on disk only stays so: computed KV could differ by rounding, and RAM and disk must be equal bit
        for bit.
        """
        node = self.list_slots(sequence, path, end)
        for index in path.groups:
            self._adopt(sequence, node, index)
        return node

    def list_slots(self, sequence: BlockTables, path: OriginPath, end: int) -> Node:
        """Return the path's node, with the request's slots in groups without data."""
        node = self.node_of(sequence, path, end)
        for index in path.groups:
            self._offer(sequence, node, index)
        return node

    def publish_base_tail(self, sequence: BlockTables) -> PathBlock:
        """Publish base's tokens of the block in which the adapter starts, with slots of all groups."""
        assert sequence.producer is not None
        start = sequence.producer.start
        position = start // BLOCK_SIZE
        parent = sequence.paths[-1].parent_of(position, self._tree.root(sequence.root))
        tail = self._tree.insert(parent, sequence.token_ids[position * BLOCK_SIZE : start])
        groups = tuple(range(len(sequence.tables)))
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
        if table.has(node.position) and not node.available(index) and index not in node.pending:
            self._slots.list_in(node, index, table.block_id(node.position))

    def _adopt(self, sequence: BlockTables, node: Node, index: int) -> None:
        table, theirs = sequence.tables[index], node.block_ids.get(index)
        if theirs is not None and table.has(node.position):
            self._slots.pools[index].retain(theirs)
            self._slots.pools[index].release(table.block_id(node.position))
            table.replace(node.position, theirs)

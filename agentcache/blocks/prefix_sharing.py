"""In-flight prefix sharing: running requests take over blocks published since they began."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.blocks.block_tables import BlockTables, OriginPath
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.siblings import pack
from agentcache.blocks.slots import Slots


def nodes_ahead(tree: RadixTree, sequence: BlockTables, token_ids: Sequence[int], end: int) -> list[list[Node]]:
    """Return full blocks in RAM after the request's end: per block, one node per origin path."""
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
    return all(index in node.block_ids for index in path.groups)


def append_nodes(slots: Slots, sequence: BlockTables, nodes: Sequence[Node]) -> None:
    """Append one block; frees a slot reserved for it."""
    position = sequence.num_tokens // BLOCK_SIZE
    for path, node in zip(sequence.paths, nodes, strict=True):
        path.nodes.append(node)
        node.readers += 1
        for index in path.groups:
            table, block_id = sequence.tables[index], node.block_ids[index]
            slots.pools[index].retain(block_id)
            if table.has(position):
                slots.pools[index].release(table.block_id(position))
                table.replace(position, block_id)
            else:
                table.block_ids.append(block_id)
    sequence.token_ids.extend(nodes[0].token_ids)

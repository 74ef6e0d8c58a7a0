from __future__ import annotations

from dataclasses import dataclass

from agentcache.blocks.allocator import BlockAllocator
from agentcache.blocks.block_tables import BlockTables, Copy, Load
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import Cached, CachedPath
from agentcache.blocks.slots import Slots


@dataclass(frozen=True)
class _TailSlot:
    index: int
    block_id: int


def attach_prefix(sequence: BlockTables, prefix: Cached, allocator: BlockAllocator) -> None:
    """Fill the empty block tables with the slots of `prefix`; adds due `loads` and `copies`.

    Raises OutOfBlocks: the tables are then partly filled.
    """
    slots = allocator.slots
    # Allocation may evict.
    for path in prefix.paths:
        _share(sequence, path, slots)
    sources = [source for path in prefix.paths for source in _sources(path)]
    for source in sources:
        slots.pools[source.index].retain(source.block_id)
    try:
        for path in prefix.paths:
            for index in path.groups:
                _allocate_absent(sequence, path, index, allocator)
                if path.tail is not None:
                    _allocate_tail(sequence, path, path.tail, index, allocator)
    finally:
        # The engine copies before its next allocation.
        for source in sources:
            slots.pools[source.index].release(source.block_id)


def _share(sequence: BlockTables, path: CachedPath, slots: Slots) -> None:
    for index in path.groups:
        table = sequence.tables[index]
        table.first_block = min(path.first_block_read(slots.groups[index]), len(path.nodes))
        for node in path.nodes[table.first_block :]:
            block_id = node.block_ids.get(index, -1)
            if block_id >= 0:
                slots.pools[index].retain(block_id)
            table.block_ids.append(block_id)


def _sources(path: CachedPath) -> list[_TailSlot]:
    block_ids = {} if path.tail is None else path.tail.block_ids
    return [_TailSlot(index, block_ids[index]) for index in path.groups if index in block_ids]


def _allocate_absent(sequence: BlockTables, path: CachedPath, index: int, allocator: BlockAllocator) -> None:
    table = sequence.tables[index]
    for node in path.nodes[table.first_block :]:
        if table.block_id(node.position) < 0:
            table.replace(node.position, allocator.allocate(index))
            sequence.loads.append(Load(node, index, table.block_id(node.position), BLOCK_SIZE))


def _allocate_tail(sequence: BlockTables, path: CachedPath, tail: Node, index: int, allocator: BlockAllocator) -> None:
    table, source = sequence.tables[index], tail.block_ids.get(index)
    if source is not None and path.ends_with_a_block and _may_write_behind(tail, index, source, allocator.slots):
        allocator.slots.pools[index].retain(source)
        table.block_ids.append(source)
        return
    target = allocator.allocate(index)
    table.block_ids.append(target)
    if source is None:
        sequence.loads.append(Load(tail, index, target, path.tail_tokens))
    else:
        sequence.copies.append(Copy(index, source, target))


def _may_write_behind(tail: Node, index: int, block_id: int, slots: Slots) -> bool:
    if slots.num_readers(index, block_id) > 1:  # one is `attach_prefix`
        return False
    assert tail.parent is not None
    here = (node for node in tail.parent.children if node.block_ids.get(index) == block_id)
    return all(node.num_tokens <= tail.num_tokens for node in here)

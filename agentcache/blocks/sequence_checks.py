from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.radix_tree import RadixTree
from agentcache.errors import BrokenInvariant


def check_sequences(sequences: Collection[BlockTables], tree: RadixTree, *, has_state: bool) -> None:
    """Raise BrokenInvariant if reader counts are wrong or requests do not follow the tree."""
    _check_readers(sequences, tree)
    for sequence in sequences:
        _check_lanes(sequence, tree, has_state)


def _check_readers(sequences: Collection[BlockTables], tree: RadixTree) -> None:
    lanes = (lane for sequence in sequences for lane in sequence.lanes)
    readers = Counter(node for lane in lanes for node in lane.read_nodes)
    for node in tree.walk():
        if node.readers != readers.pop(node, 0):
            raise BrokenInvariant(f"{node!r} miscounts its readers")
    if readers:
        raise BrokenInvariant(f"sequences go through {list(readers)}, which the tree has lost")


def _check_lanes(sequence: BlockTables, tree: RadixTree, has_state: bool) -> None:
    if sorted(index for lane in sequence.lanes for index in lane.groups) != list(range(len(sequence.tables))):
        raise BrokenInvariant("a sequence's lanes do not have each group once")
    if [lane.has_state for lane in sequence.lanes].count(True) != has_state:
        raise BrokenInvariant("not one lane of a sequence has its state")
    for lane in sequence.lanes:
        if len(lane.nodes) != sequence.num_tokens // BLOCK_SIZE:
            raise BrokenInvariant("a lane has not published what its sequence has computed")
        parent = tree.peek(sequence.root)
        for node in lane.nodes:
            if node.parent is not parent or node.producer != lane.layout.origin_of(node.end):
                raise BrokenInvariant(f"{node!r} is not on its lane's path")
            parent = node

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
        _check_paths(sequence, tree, has_state)


def _check_readers(sequences: Collection[BlockTables], tree: RadixTree) -> None:
    paths = (path for sequence in sequences for path in sequence.paths)
    readers = Counter(node for path in paths for node in path.read_nodes)
    for node in tree.walk():
        if node.readers != readers.pop(node, 0):
            raise BrokenInvariant(f"{node!r} miscounts its readers")
    if readers:
        raise BrokenInvariant(f"sequences go through {list(readers)}, which the tree has lost")


def _check_paths(sequence: BlockTables, tree: RadixTree, has_state: bool) -> None:
    if sorted(index for path in sequence.paths for index in path.groups) != list(range(len(sequence.tables))):
        raise BrokenInvariant("a sequence's paths do not have each group once")
    if [path.has_state for path in sequence.paths].count(True) != has_state:
        raise BrokenInvariant("not one path of a sequence has its state")
    for path in sequence.paths:
        if len(path.nodes) != sequence.num_tokens // BLOCK_SIZE:
            raise BrokenInvariant("a path has not published what its sequence has computed")
        parent = tree.peek(sequence.root)
        for node in path.nodes:
            if node.parent is not parent or node.producer != path.layout.origin_of(node.end):
                raise BrokenInvariant(f"{node!r} is not on its path")
            parent = node

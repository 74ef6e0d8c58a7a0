"""Eviction order: least recently used first, leaves before ancestors."""

from __future__ import annotations

from collections.abc import Iterator

from agentcache.blocks.radix_tree import Node, RadixTree
from agentcache.blocks.slots import Slots


class EvictionOrder:
    def __init__(self, slots: Slots, tree: RadixTree) -> None:
        self._slots = slots
        self._tree = tree

    def free_one(self, index: int) -> bool:
        while not self._slots.pools[index].num_free:
            if (victim := self._victim(index)) is not None:
                self._slots.free(victim, list(victim.block_ids))
            elif (holder := self._unread_holder(index)) is not None:
                self._slots.free(holder, [index])
            else:
                return False
        return True

    def _victim(self, index: int) -> Node | None:
        idle = (node for node in self._candidates(index) if self._is_idle(node) and not node.pending)
        # Last resort: a node with a pending write, which has its own copy of the bytes.
        return next(idle, None) or next(filter(self._is_idle, self._candidates(index)), None)

    def _unread_holder(self, index: int) -> Node | None:
        holders = (node for node in self._tree.residents if index in node.block_ids)
        return next((node for node in holders if not self._slots.is_read(index, node.block_ids[index])), None)

    def _candidates(self, index: int) -> Iterator[Node]:
        holders = [node for node in self._tree.residents if index in node.block_ids]
        yield from holders
        yield from (_resident_leaf(node) for node in holders if not self._slots.is_read(index, node.block_ids[index]))

    def _is_idle(self, node: Node) -> bool:
        is_read = self._slots.is_read
        return not node.resident_children and not any(is_read(index, slot) for index, slot in node.block_ids.items())


def _resident_leaf(node: Node) -> Node:
    while node.resident_children:
        node = next(child for child in node.children if child.block_ids)
    return node

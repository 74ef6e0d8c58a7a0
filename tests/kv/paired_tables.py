"""Tables of a row whose sealed and open blocks are in groups of their own."""

from __future__ import annotations

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable


def paired_tables(length: int, num_tokens: int, window: int | None, slot: int = 100) -> tuple[BlockTable, BlockTable]:
    """Of a step behind `length` tokens: sealed blocks in slots from `slot + 1` on, open ones from `slot + 100` on."""
    own, end = length // BLOCK_SIZE, -(-(length + num_tokens) // BLOCK_SIZE)
    first = 0 if window is None or length - window + 1 < BLOCK_SIZE else own
    opened = [slot + 100 + at if at == 0 or at >= own else -1 for at in range(first, end)]
    return BlockTable([slot + at for at in range(1, end)], 1), BlockTable(opened, first)

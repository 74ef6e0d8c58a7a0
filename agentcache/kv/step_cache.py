"""The cache of one layer for the length of one step: what the engine's rows are to a model.

The rows and their blocks belong to whoever made the step; nothing is allocated here and nothing grows. (mlx-lm's cache
contract, whose rows own their blocks, is kept by `BatchQuantizedKVCache`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.step_plan import Reads, Writes


@dataclass(frozen=True)
class PagedKV:
    """Keys and values as attention reads them: in which arena, and where."""

    arena: LayerArena
    reads: Reads


class PagedCache(Protocol):
    """What re-hosted attention wants of a layer's cache."""

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's next token: an int for one row, else int32 [B]."""

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        """Write keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA) behind each row."""


class StepCache:
    """One layer's cache in one step.

    Args:
        reads, writes: of the layer's group; None where the step passes the layer by.
        offset: position of each row's first token in the step: an int for one row, else int32 [B].
    """

    def __init__(self, arena: LayerArena, reads: Reads | None, writes: Writes | None, offset: int | mx.array) -> None:
        self.arena = arena
        self.offset = offset
        self._reads = reads
        self._writes = writes

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        """As in `PagedCache`."""
        if self._reads is None or self._writes is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is computed in a step that passes it by")
        self._writes.put(self.arena, keys, values)
        return PagedKV(self.arena, self._reads)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """mlx-lm's model gets no mask: attention masks by what the step reads."""
        check_window(self.arena, window_size)


def check_window(arena: LayerArena, window_size: int | None) -> None:
    """Raise BrokenInvariant if a model thinks of another window than the layer's."""
    if window_size not in (None, arena.layer.window):
        raise BrokenInvariant(f"this cache's window is {arena.layer.window}, the model asks for {window_size}")

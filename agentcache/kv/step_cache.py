"""The cache of one layer for the length of one step: what the engine's rows are to a model.

The rows and their blocks belong to whoever made the step; nothing is allocated here and nothing grows. (mlx-lm's cache
contract, whose rows own their blocks, is kept by `BatchQuantizedKVCache`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.step_plan import Reads, Writes

# Quantises and writes keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA). Lazy.
Put = Callable[[Writes, LayerArena, mx.array, mx.array | None], None]


class PagedKV(NamedTuple):
    """Keys and values as attention reads them: in which arena, and where."""

    arena: LayerArena
    reads: Reads


@dataclass(slots=True, eq=False)
class Handle:
    """What a model gets in place of cached keys or values, for attention to look up (`models/interception.py`).

    No array: code that computes with cached keys fails loudly instead of wrongly.

    Args:
        dtype: of the keys that the model wrote.
        projections: of MLA, what turns the cached latent into keys and values; None elsewhere.
    """

    kv: PagedKV
    dtype: mx.Dtype
    projections: Any = None

    def astype(self, dtype: mx.Dtype) -> Handle:
        """Itself: attention answers in the queries' type, whatever the keys' is."""
        return self


class StepCache:
    """One layer's cache in one step.

    Args:
        reads, writes: of the layer's group; None where the step passes the layer by.
        offset: position of each row's first token in the step: an int for one row, else int32 [B].
        put: writes what is new, as `Writes.put` does.
    """

    def __init__(
        self,
        arena: LayerArena,
        reads: Reads | None,
        writes: Writes | None,
        offset: int | mx.array,
        put: Put = Writes.put,
    ) -> None:
        self.arena = arena
        self._put = put
        self.offset = offset
        self._reads = reads
        self._writes = writes
        self._written: tuple[Any, Any] | None = None

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        """Write keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA) behind each row."""
        if self._reads is None or self._writes is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is computed in a step that passes it by")
        self._put(self._writes, self.arena, keys, values)
        return PagedKV(self.arena, self._reads)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """mlx-lm's contract, with handles. MLA's latent and rope part, one head each, are kept as one key.

        MLA multiplies its queries' rope part with the cached one's transpose before it calls attention; from here it
        gets the identity [1, 1, D_rope, D_rope], so that what it gives attention is that part of the queries itself.
        """
        if self.arena.values is None:
            kv = self.update(mx.concatenate([keys, values], axis=-1), None)
            self._written = Handle(kv, keys.dtype), mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        else:
            handle = Handle(self.update(keys, values), keys.dtype)
            self._written = handle, handle
        return self._written

    def keys_and_values(self) -> tuple[Any, Any]:
        """mlx-lm's contract: what the step's update gave, for layers that read another one's keys and values."""
        if self._written is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is read before it is written")
        return self._written

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """mlx-lm's model gets no mask: attention masks by what the step reads."""
        check_window(self.arena, window_size)


def check_window(arena: LayerArena, window_size: int | None) -> None:
    """Raise BrokenInvariant if a model thinks of another window than the layer's."""
    if window_size not in (None, arena.layer.window):
        raise BrokenInvariant(f"this cache's window is {arena.layer.window}, the model asks for {window_size}")

"""The cache of one layer during one step, as a model sees it.

The step's builder owns rows and blocks; nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.step_plan import Reads, Writes

# Lazily quantises and writes keys and values (None for MLA).
Put = Callable[[Writes, LayerArena, mx.array, mx.array | None], None]


class PagedKV(NamedTuple):
    """Keys and values for attention. `residual_kv`: a `LayerResidualKV` of some rows, or None."""

    arena: LayerArena
    reads: Reads
    residual_kv: Any = None


@dataclass(slots=True, eq=False)
class Handle:
    """Stands for cached keys or values in model code; attention resolves it (`models/interception.py`).

    Not an array: code that computes with cached keys fails instead of computing wrongly.

    Args:
        dtype: of the model's keys.
        projections: for MLA, from latent to keys and values.
    """

    kv: PagedKV
    dtype: mx.Dtype
    projections: Any = None

    def astype(self, dtype: mx.Dtype) -> Handle:
        return self


class StepCache:
    """One layer's cache in one step.

    Args:
        reads, writes: None if the step skips the layer.
        offset: position of each row's first new token: int for one row, else int32 [B].
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
        """Append keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA)."""
        if self._reads is None or self._writes is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is computed in a step that passes it by")
        self._put(self._writes, self.arena, keys, values)
        return PagedKV(self.arena, self._reads)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """mlx-lm's contract, with handles. MLA's latent and rope part, one head each, are stored as one key.

        MLA multiplies its queries' rope part by the cached part's transpose before attention. It gets the identity [1,
        1, D_rope, D_rope], so that attention receives the rope part unchanged.
        """
        if self.arena.values is None:
            kv = self.update(mx.concatenate([keys, values], axis=-1), None)
            self._written = Handle(kv, keys.dtype), mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        else:
            handle = Handle(self.update(keys, values), keys.dtype)
            self._written = handle, handle
        return self._written

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the last update's result, for layers that share this KV."""
        if self._written is None:
            raise BrokenInvariant(f"layer {self.arena.layer.index} is read before it is written")
        return self._written

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attention masks according to the step's reads."""
        check_window(self.arena, window_size)


def check_window(arena: LayerArena, window_size: int | None) -> None:
    """Raise BrokenInvariant if the model's window is not the layer's."""
    if window_size not in (None, arena.layer.window):
        raise BrokenInvariant(f"this cache's window is {arena.layer.window}, the model asks for {window_size}")

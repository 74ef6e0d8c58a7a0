"""Checkpoints of recurrent state in RAM: one row's arrays per slot. Steps never change them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from agentcache.blocks.snapshots import Snapshots
from agentcache.kv.block_layout import Array, block_tensors
from agentcache.kv.spec import CacheSpec, GroupSpec, RecurrentSpec, state_name

# Arrays [1, ...] per recurrent cache; None for unfilled entries.
RowArrays = Sequence[Sequence[mx.array | None]]

_MLX_DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I32": mx.int32,
    "U32": mx.uint32,
    "I64": mx.int64,
}
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class StateArena:
    """State arrays of the slots of `snapshots`."""

    def __init__(self, spec: CacheSpec, snapshots: Snapshots) -> None:
        assert spec.state_group is not None
        self._group: GroupSpec = spec.state_group
        self._recurrent: tuple[RecurrentSpec, ...] = spec.recurrent
        self._snapshots = snapshots
        self._slots: dict[int, list[list[mx.array]]] = {}
        self._dtypes = {tensor.name: _MLX_DTYPES[tensor.dtype] for tensor in self._group.tensors}

    def put(self, slot: int, arrays: RowArrays, row: int = 0) -> None:
        """Keep one row of a batch's arrays [B, ...]; unfilled entries become zeros. Asynchronous."""
        index = mx.array([row])
        kept = [
            [
                # Indexing copies; a slice would keep the whole batch alive.
                mx.zeros((1, *tensor.shape), getattr(mx, tensor.dtype)) if array is None else array[index]
                for array, tensor in zip(given, spec.tensors, strict=True)
                if tensor is not None
            ]
            for given, spec in zip(arrays, self._recurrent, strict=True)
        ]
        self._keep(slot, kept)

    def _keep(self, slot: int, arrays: list[list[mx.array]]) -> None:
        self.sweep()
        self._slots[slot] = arrays
        mx.async_eval(arrays)

    def arrays(self, slot: int) -> list[list[mx.array | None]]:
        held = [iter(arrays) for arrays in self._slots[slot]]
        return [
            [None if tensor is None else next(arrays) for tensor in spec.tensors]
            for arrays, spec in zip(held, self._recurrent, strict=True)
        ]

    def sweep(self) -> None:
        for slot in [slot for slot in self._slots if self._snapshots.is_free(slot)]:
            del self._slots[slot]

    def is_finite(self, slot: int) -> bool:
        floats = [array for arrays in self._slots[slot] for array in arrays if array.dtype in _FLOATS]
        return bool(mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in floats]))) if floats else True

    def snapshot(self, slot: int) -> Array:
        """Copy the bytes, uint8 [n]."""
        named = self._named(slot)
        mx.eval(named)
        block = np.empty(self._group.bytes_of(0), np.uint8)
        for tensor in block_tensors(self._group, 0):
            array = named[tensor.spec.name]
            tensor.view(block)[...] = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)[0]
        return block

    def _named(self, slot: int) -> dict[str, mx.array]:
        return {
            state_name(cache, number): array
            for cache, arrays in enumerate(self.arrays(slot))
            for number, array in enumerate(arrays)
            if array is not None
        }

    def put_bytes(self, slot: int, data: Array) -> None:
        named = {
            tensor.spec.name: self._decoded(tensor.spec.name, tensor.view(data))
            for tensor in block_tensors(self._group, 0)
        }
        arrays = [
            [named[state_name(cache, number)] for number, tensor in enumerate(spec.tensors) if tensor is not None]
            for cache, spec in enumerate(self._recurrent)
        ]
        self._keep(slot, arrays)

    def _decoded(self, name: str, values: Array) -> mx.array:
        array = mx.array(np.ascontiguousarray(values))[None]
        dtype = self._dtypes[name]
        return array.view(dtype) if array.dtype != dtype else array

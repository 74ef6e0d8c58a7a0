"""What tests of arenas share: values to keep, and what a write of them takes."""

from __future__ import annotations

import mlx.core as mx

from agentcache.kv.arena import SideArena, Slot
from agentcache.kv.packed import quantise
from agentcache.kv.packing import Quantisation
from tests.held_memory import held_bytes

Q64, Q32 = Quantisation(4, 64), Quantisation(4, 32)
HEADS, DIM = 2, 64


def random(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32, size: float = 1.0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * size).astype(dtype)


def peak_of_write(side: SideArena, *, scattered: bool) -> int:
    """Bytes above what was there, while one token is written."""
    packed = quantise(random((1, HEADS, 1, DIM), 5), Q64)
    block_ids, offsets = mx.array([1]), mx.array([17])
    mx.eval(*side.arrays(), *packed, block_ids, offsets)
    before = held_bytes()
    mx.reset_peak_memory()
    if scattered:
        side.write_scattered(packed, block_ids, offsets)
    else:
        side.write_slots(packed, [Slot(1, 17, 0, 1)])
    mx.eval(*side.arrays())
    return mx.get_peak_memory() - before

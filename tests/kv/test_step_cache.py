"""The cache of one layer in one step."""

from __future__ import annotations

import mlx.core as mx
import pytest

from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import StepCache, Writes
from tests.kv.cache_cases import DIM, HEADS, Desk


def test_it_reads_and_writes_by_the_step() -> None:
    desk = Desk()
    desk.arena.grow(3)
    keys = mx.random.normal((1, HEADS, 2, DIM), key=mx.random.key(0))
    reads, writes = Reads([BlockTable([0, 1])], [300], 2, None), Writes([BlockTable([0, 2])], [300], 2)
    kv = StepCache(desk.arena, reads, writes, 300).update(keys, keys)
    assert kv.reads is reads and kv.arena is desk.arena
    used = [bool(desk.arena.keys.gather(mx.array(block_id)).data.any().item()) for block_id in range(3)]
    assert used == [False, False, True]


def test_a_layer_that_is_passed_by_is_not_computed() -> None:
    cache = StepCache(Desk(32).arena, None, None, 0)
    assert cache.make_mask(5, window_size=32) is None, "mlx-lm's models ask the first layer of a kind"
    with pytest.raises(BrokenInvariant, match="layer 0 is computed in a step that skips it"):
        cache.update(mx.zeros((1, HEADS, 1, DIM)), None)

"""Snapshots of recurrent state: in RAM as arrays, in files as bytes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.keys import STATE_GROUP, Namespace
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import BlockRejected
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, RecurrentSpec, StateTensor, attention_group
from agentcache.kv.states import StateArena
from agentcache.store.block_file import make_header
from agentcache.store.store import BlockWrite
from tests.device_marks import cpu_memory
from tests.held_memory import held_bytes
from tests.store.store_cases import MODEL, open_store

RECURRENT = (
    RecurrentSpec(0, (StateTensor((3, 8), "bfloat16"), StateTensor((2, 4, 4), "float32"))),
    RecurrentSpec(1, (None, StateTensor((2, 4, 4), "float32"))),
)
SPEC = CacheSpec(
    "hybrid", 4, (attention_group("full.0", [LayerSpec(2, 2, 64, 64)], Quantisation()),), recurrent=RECURRENT
)


def make_arena() -> tuple[PrefixCache, StateArena]:
    cache = PrefixCache(SPEC.groups, Ledger(1 << 30), state=SPEC.state_group, state_budget=1 << 20)
    assert cache.snapshots is not None
    return cache, StateArena(SPEC, cache.snapshots)


def random_batch(num_rows: int) -> list[list[mx.array | None]]:
    return [
        [
            None if tensor is None else mx.random.normal((num_rows, *tensor.shape)).astype(getattr(mx, tensor.dtype))
            for tensor in spec.tensors
        ]
        for spec in RECURRENT
    ]


def same(left: list[list[mx.array | None]], right: list[list[mx.array | None]], place: int = 0) -> bool:
    pairs = [pair for both in zip(left, right, strict=True) for pair in zip(*both, strict=True)]
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and bool(mx.array_equal(a[0], b[place]))) for a, b in pairs
    )


def slot_of(cache: PrefixCache) -> int:
    assert cache.snapshots is not None
    return cache.snapshots.allocate()


def test_a_group_of_the_models_own_types_widest_first() -> None:
    group = SPEC.state_group
    assert group is not None
    assert [(t.name, t.dtype, t.shape) for t in group.tensors] == [
        ("cache.recurrent.0.1", "F32", (2, 4, 4)),
        ("cache.recurrent.1.1", "F32", (2, 4, 4)),
        ("cache.recurrent.0.0", "BF16", (3, 8)),
    ]
    assert (group.bytes_per_token, group.bytes_per_block) == (0, 2 * 32 * 4 + 24 * 2)
    assert [each.name for each in SPEC.all_groups] == ["full.0", STATE_GROUP]


def test_a_row_of_a_batch_is_kept_as_it_is() -> None:
    cache, arena = make_arena()
    batch = random_batch(3)
    slots = [slot_of(cache) for _ in range(3)]
    for place, slot in enumerate(slots):
        arena.put(slot, batch, place)
    for place, slot in enumerate(slots):
        assert same(arena.arrays(slot), batch, place)


@cpu_memory
def test_what_is_kept_does_not_hold_the_batch() -> None:
    cache, arena = make_arena()
    before = held_bytes()
    batch: list[list[mx.array | None]] = [
        [mx.zeros((512, 3, 8), mx.bfloat16), mx.zeros((512, 2, 4, 4))],
        [None, mx.zeros((512, 2, 4, 4))],
    ]
    mx.eval([array for arrays in batch for array in arrays if array is not None])
    slot = slot_of(cache)
    arena.put(slot, batch, 7)
    mx.eval(arena.arrays(slot)[0])
    del batch
    assert mx.get_active_memory() - before < 1 << 14


def test_a_layer_that_has_not_begun_has_zeros() -> None:
    cache, arena = make_arena()
    slot = slot_of(cache)
    arena.put(slot, [[None, None], [None, None]])
    assert all(array is None or not array.any() for arrays in arena.arrays(slot) for array in arrays)


def test_to_a_file_and_back(tmp_path: Path) -> None:
    cache, arena = make_arena()
    batch, slot, other = random_batch(2), slot_of(cache), slot_of(cache)
    arena.put(slot, batch, 1)
    assert arena.is_finite(slot)
    header = make_header(Namespace(MODEL, SPEC.digest).root, STATE_GROUP, 0, range(7))
    with open_store(tmp_path, spec=SPEC) as store:
        store.write_blocks([BlockWrite(header, arena.snapshot(slot))])
        arena.put_bytes(other, store.blocks.read(header).data)
    assert same(arena.arrays(other), batch, 1)


@pytest.mark.parametrize("offset", [-1, -60, -200])
def test_a_flipped_bit_shows(tmp_path: Path, offset: int) -> None:
    cache, arena = make_arena()
    slot = slot_of(cache)
    arena.put(slot, random_batch(1))
    header = make_header(Namespace(MODEL, SPEC.digest).root, STATE_GROUP, 0, range(7))
    with open_store(tmp_path, spec=SPEC) as store:
        store.write_blocks([BlockWrite(header, arena.snapshot(slot))])
        [path] = (tmp_path / "blocks").rglob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(BlockRejected):
            store.blocks.read(header)
        assert (store.usage.quarantine.count, store.has(header.block_key)) == (1, False)


def test_what_is_not_finite_is_known() -> None:
    cache, arena = make_arena()
    slot, batch = slot_of(cache), random_batch(1)
    batch[0][0] = mx.full((1, 3, 8), np.nan, mx.bfloat16)
    arena.put(slot, batch)
    assert not arena.is_finite(slot)


def test_the_memory_of_free_slots_comes_back() -> None:
    cache, arena = make_arena()
    slot = slot_of(cache)
    arena.put(slot, random_batch(1))
    assert cache.snapshots is not None
    cache.snapshots.release(slot)
    arena.sweep()
    with pytest.raises(KeyError):
        arena.arrays(slot)

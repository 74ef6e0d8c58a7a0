"""Writes of keys and values land where they should, and in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena, SideArena, Slot, copy_block
from agentcache.kv.packed import quantise
from agentcache.kv.packing import ByChannel, LayerPacking, Quantisation
from agentcache.kv.spec import LayerSpec
from tests.device_marks import cpu_memory
from tests.examples import examples
from tests.held_memory import held_bytes
from tests.kv.arena_cases import DIM, HEADS, Q64, peak_of_write, random


def filled_side(num_blocks: int, seed: int = 1) -> SideArena:
    side = LayerArena(LayerSpec(0, HEADS, DIM, 0), Q64).keys
    side.grow(num_blocks)
    for block_id in range(num_blocks):
        packed = quantise(random((1, HEADS, BLOCK_SIZE, DIM), seed + block_id), Q64)
        side.write_slots(packed, [Slot(block_id, 0, 0, BLOCK_SIZE)])
    return side


def contents(side: SideArena) -> list[np.ndarray]:
    return [np.array(array) for array in side.arrays()]


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 255), st.integers(1, 300)), min_size=1, max_size=6))
def test_writes_land_where_they_should(writes: list[tuple[int, int, int]]) -> None:
    """Against arrays of numpy, by slices and by scatter alike."""
    sliced, scattered = filled_side(6), filled_side(6)
    expected = contents(sliced)
    for seed, (block_id, offset, wanted) in enumerate(writes):
        count = min(wanted, BLOCK_SIZE - offset)
        packed = quantise(random((1, HEADS, count, DIM), 100 + seed), Q64)
        sliced.write_slots(packed, [Slot(block_id, offset, 0, count)])
        scattered.write_scattered(packed, mx.array([block_id] * count), mx.arange(offset, offset + count))
        for array, new in zip(expected, packed, strict=True):
            array[block_id, :, offset : offset + count] = np.array(new)[0]
    assert_same(contents(sliced), expected)
    assert_same(contents(scattered), expected)


def test_a_run_over_two_blocks() -> None:
    side = filled_side(3)
    packed = quantise(random((1, HEADS, 20, DIM), 9), Q64)
    side.write_slots(packed, [Slot(2, 250, 0, 6), Slot(0, 0, 6, 20)])
    data = np.array(side.arrays()[0])
    np.testing.assert_array_equal(data[2, :, 250:], np.array(packed.data)[0, :, :6])
    np.testing.assert_array_equal(data[0, :, :14], np.array(packed.data)[0, :, 6:])


def test_rows_are_scattered_in_order() -> None:
    side = filled_side(4)
    packed = quantise(random((2, HEADS, 3, DIM), 9), Q64)
    side.write_scattered(packed, mx.array([1, 1, 2, 3, 3, 3]), mx.array([254, 255, 0, 7, 8, 9]))
    scales = np.array(side.arrays()[1])
    np.testing.assert_array_equal(scales[2, :, 0], np.array(packed.scales)[0, :, 2])
    np.testing.assert_array_equal(scales[3, :, 7:10], np.array(packed.scales)[1])


def test_gather_takes_blocks_in_the_order_asked_for() -> None:
    side = filled_side(4)
    gathered = side.gather(mx.array([[3, 0], [1, 1]]))
    expected = contents(side)
    for part, array in zip(gathered, expected, strict=True):
        np.testing.assert_array_equal(np.array(part), array[[[3, 0], [1, 1]]])


def test_what_is_gathered_is_read_behind_a_launch_that_writes() -> None:
    """What it gives is a zero. Were it none, other blocks would be read: so it is waited for."""
    side = filled_side(3)
    side.written = mx.array([1])
    blocks = side.gather(mx.array([0, 1]))
    for part, whole in zip(side.arrays(), blocks.parts, strict=True):
        assert mx.array_equal(whole, part[1:])
    values = side.blocks(mx.array([0, 1]))
    tokens = side.tokens(mx.array([0, 1]), mx.array([7, 9]))
    assert mx.array_equal(tokens, mx.stack([values[0, :, 7], values[1, :, 9]]))


def test_tokens_of_keys_by_channel_are_those_of_their_blocks() -> None:
    arena = LayerArena(LayerSpec(0, 2, 64, 64), LayerPacking(ByChannel(), Quantisation(4, 64)))
    arena.grow(2)
    assert arena.open is not None
    for _, side in arena.open.sides:
        blocks = mx.random.normal((2, 2, 256, 64), key=mx.random.key(1))
        side.write_blocks(quantise(blocks, side.quantisation), [0, 1])
    arena.seal([1, 0], [0, 1])
    ids, offsets = mx.array([0, 1, 1, 0, 1]), mx.array([0, 63, 64, 200, 255])
    for form in [form for _, side in arena.sides for form in side.forms]:
        expected = form.blocks(mx.array([0, 1]))
        assert mx.array_equal(form.tokens(ids, offsets), expected[ids, :, offsets])
    steps = arena.keys.steps(ids, offsets)
    assert mx.array_equal(steps, arena.keys.arrays()[1][ids, :, offsets // 64].astype(mx.float32))


def test_growing_keeps_blocks_and_adds_zeros() -> None:
    side = filled_side(3)
    before = contents(side)
    side.grow(8)
    after = contents(side)
    assert side.capacity == 8
    assert_same([array[:3] for array in after], before)
    assert all(not array[3:].any() for array in after)


def test_a_layer_never_shrinks() -> None:
    layer = LayerArena(LayerSpec(0, HEADS, DIM, DIM), Q64)
    layer.grow(5)
    layer.grow(2)
    assert [side.capacity for _, side in layer.sides] == [5, 5]


def test_copy_copies_one_block() -> None:
    side = filled_side(4)
    expected = contents(side)
    copy_block(side._arenas, 1, 3)
    for array in expected:
        array[3] = array[1]
    assert_same(contents(side), expected)


def test_copying_a_block_does_not_copy_the_arena() -> None:
    side = LayerArena(LayerSpec(0, HEADS, DIM, 0), Q64).keys
    side.grow(256)
    size = sum(array.nbytes for array in side.arrays())
    before = held_bytes()
    mx.reset_peak_memory()
    for source, target in ((1, 3), (3, 200)):  # and what was written to go on from
        copy_block(side._arenas, source, target)
    mx.eval(*side.arrays())
    assert mx.get_peak_memory() - before < size / 50


@cpu_memory
@pytest.mark.parametrize("scattered", [False, True])
def test_writing_a_token_does_not_copy_the_arena(scattered: bool) -> None:
    side = LayerArena(LayerSpec(0, HEADS, DIM, 0), Q64).keys
    side.grow(256)
    size = sum(array.nbytes for array in side.arrays())
    assert peak_of_write(side, scattered=scattered) < size / 50
    held = [array[:1] for array in side.arrays()]  # what this test is there to notice
    mx.eval(held)
    assert peak_of_write(side, scattered=scattered) > size / 2
    del held

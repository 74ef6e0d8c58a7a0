"""The arenas hold what `mx.quantize` makes, at the right places, and are written in place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv import arena as arena_module
from agentcache.kv.arena import (
    GroupArena,
    LayerArena,
    Packed,
    SideArena,
    Slot,
    TensorArena,
    dequantise,
    make_arenas,
    quantise,
    take_due,
)
from agentcache.kv.block_layout import Place
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, TensorSpec, attention_group, make_groups, tensor_name
from tests.device_marks import cpu_memory
from tests.examples import examples
from tests.held_memory import held_bytes
from tests.kv.store_cases import named_tensors

Q64, Q32 = Quantisation(4, 64), Quantisation(4, 32)
HEADS, DIM = 2, 64


def random(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32, size: float = 1.0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * size).astype(dtype)


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


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("quantisation", [Q64, Q32, Quantisation(8, 64)])
def test_quantise_is_mx_quantize_with_float16_scales(dtype: mx.Dtype, quantisation: Quantisation) -> None:
    x = random((3, 5, 128), dtype=dtype, size=4.0)
    data, scales, biases = mx.quantize(x.astype(mx.float32), quantisation.group_size, quantisation.bits)
    packed = quantise(x, quantisation)
    assert [part.dtype for part in packed] == [mx.uint32, mx.float16, mx.float16]
    assert mx.array_equal(packed.data, data)
    assert mx.array_equal(packed.scales, scales.astype(mx.float16))
    assert mx.array_equal(packed.biases, biases.astype(mx.float16))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dequantise_is_mx_dequantize_on_the_float16_scales(dtype: mx.Dtype) -> None:
    packed = quantise(random((3, 5, 128)), Q64)
    expected = mx.dequantize(packed.data, packed.scales.astype(mx.float32), packed.biases.astype(mx.float32), 64, 4)
    actual = dequantise(packed, Q64, dtype)
    assert actual.dtype == dtype
    assert mx.array_equal(actual, expected.astype(dtype))


def test_a_value_moves_by_at_most_a_step() -> None:
    x = random((50, 64), size=3.0)
    error = mx.abs(dequantise(quantise(x, Q64), Q64, mx.float32) - x)
    steps = mx.abs(quantise(x, Q64).scales.astype(mx.float32))
    assert mx.all(error <= 1.01 * steps).item()
    assert mx.mean(error <= 0.51 * steps).item() > 0.9


def test_low_nibble_comes_first() -> None:
    packed = Packed(mx.array([[0x76543210] + [0] * 7], dtype=mx.uint32), *(mx.array([[v]], mx.float16) for v in (1, 0)))
    assert dequantise(packed, Q64, mx.float32)[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e6, 65504.0, -65504.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_scales_are_finite_whatever_comes_in(value: float, dtype: mx.Dtype) -> None:
    x = random((4, 128), size=1.0)
    x[1, 3] = value
    x[2] = value
    packed = quantise(x.astype(dtype), Q64)
    for part in (packed.scales, packed.biases, dequantise(packed, Q64, mx.float16)):
        assert mx.isfinite(part).all().item()
    assert mx.abs(dequantise(packed, Q64, mx.float32)).max().item() < 33000
    assert mx.array_equal(packed.data[0], quantise(x[:1].astype(dtype), Q64).data[0])


def test_large_values_do_not_wreck_their_neighbours() -> None:
    x = random((1, 128))
    x[0, 3] = 1e6  # in the first of two groups
    error = mx.abs(dequantise(quantise(x, Q64), Q64, mx.float32) - x)
    assert error[0, 4:64].max().item() <= 2000  # one step of a group up to 30000
    assert error[0, 64:].max().item() < 0.5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_masked_values_add_nothing_however_large(dtype: mx.Dtype) -> None:
    """Weight zero times a slot's content is zero: products of float16 would turn an infinity into NaN."""
    values = random((1, 256, 64))
    values[:, 100:] = random((1, 156, 64), 1, size=1e6)
    weights = mx.zeros((1, 1, 256)).at[..., :100].add(0.01).astype(dtype)
    out = mx.quantized_matmul(weights, *quantise(values, Q64), transpose=False, group_size=64, bits=4)
    near = mx.quantized_matmul(weights[..., :100], *quantise(values[:, :100], Q64), False, 64, 4)
    assert mx.isfinite(out).all().item()
    assert mx.abs(out - near).max().item() < 0.01


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
    tokens = side.gather_tokens(mx.array([0, 1]), mx.array([7, 9]))
    for part, whole, few in zip(side.arrays(), blocks.parts, tokens.parts, strict=True):
        assert mx.array_equal(whole, part[1:])
        assert mx.array_equal(few, mx.stack([part[1, :, 7], part[2, :, 9]]))


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
    side.copy(1, 3)
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
        side.copy(source, target)
    mx.eval(*side.arrays())
    assert mx.get_peak_memory() - before < size / 50


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


def group_of(*layers: LayerSpec, quantisation: Quantisation = Q64) -> GroupArena:
    arena = GroupArena(attention_group("full.0", layers, quantisation))
    arena.grow(6)
    return arena


def fill(arena: GroupArena, block_id: int, seed: int) -> None:
    for layer in arena.layers:
        for number, (_, side) in enumerate(layer.sides):
            x = random((1, side.num_heads, BLOCK_SIZE, side.dim), seed + 10 * number + layer.layer.index)
            side.write_slots(quantise(x, side.quantisation), [Slot(block_id, 0, 0, BLOCK_SIZE)])


@pytest.fixture(params=[True, False], ids=["in place", "uploaded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways of blocks to and from arenas; the second is a discrete GPU's, and right on every device."""
    shared: bool = request.param and arena_module.shares_memory()
    monkeypatch.setattr(arena_module, "shares_memory", lambda: shared)
    return shared


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", [1, 255, 256])
@pytest.mark.parametrize("value_dim", [0, 32])
def test_snapshot_and_put_are_bit_exact(num_tokens: int, value_dim: int) -> None:
    layers = (LayerSpec(3, 2, 96, value_dim), LayerSpec(5, 1, 32, value_dim))
    arena, other = group_of(*layers, quantisation=Q32), group_of(*layers, quantisation=Q32)
    fill(arena, 2, seed=7)
    fill(arena, 4, seed=8)
    fill(other, 5, seed=9)
    saved = [arena.snapshot(2, num_tokens), arena.snapshot(4, BLOCK_SIZE)]
    assert set(named_tensors(arena.spec, saved[0], num_tokens)) == {
        tensor_name(layer, side, part)
        for layer in layers
        for side in ("key_cache", "value_cache")[: 2 if value_dim else 1]
        for part in ("data", "scales", "biases")
    }
    other.put([5, 1], saved)
    np.testing.assert_array_equal(other.snapshot(5, num_tokens), saved[0])
    np.testing.assert_array_equal(other.snapshot(1, BLOCK_SIZE), saved[1])
    for layer, there in zip(arena.layers, other.layers, strict=True):
        for (_, side), (_, restored) in zip(layer.sides, there.sides, strict=True):
            for part, array in side.parts.items():
                own = array.array[2, :, :num_tokens]
                assert mx.array_equal(restored.parts[part].array[5, :, :num_tokens], own)
    rest = named_tensors(other.spec, other.snapshot(5, BLOCK_SIZE), BLOCK_SIZE)
    assert all(not array[:, num_tokens:].any() for array in rest.values())


def test_an_upload_is_a_slice_for_slots_that_follow_each_other() -> None:
    """A scatter is compiled when it is first used, on CUDA for seconds."""
    names = list[str]()

    def upload(blocks: mx.array) -> mx.array:
        tensor = TensorArena(TensorSpec("x", "F16", (2,)))
        tensor.resize(8)
        tensor.upload([4, 5, 6, 1], blocks)
        return tensor.array

    def see(node: dict[str, Any]) -> None:
        names.extend([node["name"]] if node["type"] == "primitive" else [])

    blocks = mx.arange(4 * 256 * 2, dtype=mx.float16).reshape(4, 256, 2)
    mx.export_function(see, upload, blocks)
    assert names.count("SliceUpdate") == 2
    assert "Scatter" not in names
    expected = mx.zeros((8, 256, 2), mx.float16)
    expected[4:7], expected[1] = blocks[:3], blocks[3]
    assert mx.array_equal(upload(blocks), expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", [3, 256])
def test_blocks_that_were_put_are_copies(num_tokens: int) -> None:
    """A reader's buffer is used again at once."""
    arena = group_of(LayerSpec(0, 2, 64, 64))
    buffer = np.empty((2, arena.spec.bytes_of(num_tokens)), np.uint8)  # as a reader has them: one behind the other
    buffer[:] = np.random.default_rng(0).integers(0, 256, buffer.shape)
    blocks = buffer.copy()
    arena.put([4, 1], list(buffer))
    buffer[:] = 0
    for block_id, block in zip((4, 1), blocks, strict=True):
        np.testing.assert_array_equal(arena.snapshot(block_id, num_tokens), block)


def test_a_put_comes_behind_writes_that_are_due() -> None:
    """A slot's former owner has written there; the step is not computed yet when the next one's block comes."""
    arena = group_of(LayerSpec(0, HEADS, DIM, DIM))
    block = np.ones(arena.spec.bytes_per_block, np.uint8)
    fill(arena, 2, seed=1)
    fill(arena, 3, seed=2)
    arena.put([2], [block])
    expected = group_of(LayerSpec(0, HEADS, DIM, DIM))
    fill(expected, 3, seed=2)
    assert (arena.snapshot(2, BLOCK_SIZE) == 1).all()
    np.testing.assert_array_equal(arena.snapshot(3, BLOCK_SIZE), expected.snapshot(3, BLOCK_SIZE))


def test_a_put_leaves_the_arena_where_it_is() -> None:
    if not arena_module.shares_memory():
        pytest.skip("the device has memory of its own")
    arena = group_of(LayerSpec(0, HEADS, DIM, 0))
    arena.grow(256)
    size = sum(tensor.array.nbytes for tensor in arena.tensors)
    before = held_bytes()
    mx.reset_peak_memory()
    arena.put([7, 200], [np.ones(arena.spec.bytes_of(tokens), np.uint8) for tokens in (256, 17)])
    assert mx.get_peak_memory() <= before
    assert peak_of_write(arena.layers[0].keys, scattered=False) < size / 50


def test_a_snapshot_does_not_follow_later_writes() -> None:
    arena = group_of(LayerSpec(0, 1, 64, 64))
    fill(arena, 0, seed=1)
    snapshot = arena.snapshot(0, BLOCK_SIZE)
    kept = snapshot.copy()
    fill(arena, 0, seed=2)
    mx.eval(take_due(arena.tensors))
    np.testing.assert_array_equal(snapshot, kept)


@cpu_memory
def test_a_snapshot_leaves_writes_in_place() -> None:
    side_spec = LayerSpec(0, HEADS, DIM, 0)
    arena = group_of(side_spec)
    arena.grow(256)
    arena.snapshot(0, 100)
    side = arena.layers[0].keys
    assert peak_of_write(side, scattered=False) < sum(array.nbytes for array in side.arrays()) / 50


def test_one_arena_a_group() -> None:
    layers = [LayerSpec(0, 1, 64, 64), LayerSpec(1, 1, 64, 64, window=32), LayerSpec(2, 1, 64, 64)]
    spec = CacheSpec("tiny", 2, make_groups(layers, Q64))
    arenas = make_arenas(spec)
    assert [arena.spec.name for arena in arenas] == [group.name for group in spec.groups]
    assert sorted(layer.layer.index for arena in arenas for layer in arena.layers) == [0, 1, 2]


def test_bytes_are_those_of_the_spec() -> None:
    spec = attention_group("full.0", [LayerSpec(0, 2, 128, 64), LayerSpec(1, 1, 64, 0)], Q64)
    arena = GroupArena(spec)
    arena.grow(3)
    assert sum(tensor.array.nbytes for tensor in arena.tensors) == 3 * spec.bytes_per_block


def read_to(arena: GroupArena, block_id: int, block: np.ndarray) -> Place:
    """As a reader does it: integers straight to where they belong, the rest from where it has looked at it."""
    memory = arena.memory()
    assert memory is not None
    place, begin = memory.place(block_id), 0
    for run in place.integers:
        run[:] = block.data[begin : begin + len(run)]
        begin += len(run)
    place.put_rest(block[begin:])
    place.let_go()
    memory.let_go()
    return place


@pytest.mark.skipif(not arena_module.shares_memory(), reason="the device has memory of its own")
@pytest.mark.parametrize("value_dim", [0, 32])
def test_a_block_is_read_to_where_it_belongs(value_dim: int) -> None:
    layers = (LayerSpec(3, 2, 96, value_dim), LayerSpec(5, 1, 32, value_dim))
    arena, other = group_of(*layers, quantisation=Q32), group_of(*layers, quantisation=Q32)
    for block_id in (1, 2, 4):
        fill(arena, block_id, seed=block_id)
    fill(other, 5, seed=9)
    left = other.snapshot(4, BLOCK_SIZE)
    read_to(other, 5, arena.snapshot(2, BLOCK_SIZE))
    np.testing.assert_array_equal(other.snapshot(5, BLOCK_SIZE), arena.snapshot(2, BLOCK_SIZE))
    np.testing.assert_array_equal(other.snapshot(4, BLOCK_SIZE), left)


@pytest.mark.skipif(not arena_module.shares_memory(), reason="the device has memory of its own")
def test_a_place_that_was_let_go_is_written_by_steps_alone() -> None:
    arena = group_of(LayerSpec(0, HEADS, DIM, 0))
    arena.grow(256)
    size = sum(tensor.array.nbytes for tensor in arena.tensors)
    place = read_to(arena, 7, np.ones(arena.spec.bytes_per_block, np.uint8))
    for run in (*place.integers, *place.rest):
        with pytest.raises(ValueError, match="released"):
            run[0] = 1
    assert peak_of_write(arena.layers[0].keys, scattered=False) < size / 50


def test_blocks_of_floats_and_those_on_a_device_have_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = GroupArena(GroupSpec("full.0", (TensorSpec("residual.@", "F16", (3,)),)))
    floats.grow(2)
    assert floats.memory() is None
    monkeypatch.setattr(arena_module, "shares_memory", lambda: False)
    assert group_of(LayerSpec(0, HEADS, DIM, 0)).memory() is None

"""Blocks of a group come and go bit for bit, to where they belong and in place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv import arena as arenas
from agentcache.kv.arena import GroupArena, Slot, TensorArena, make_arenas, take_due
from agentcache.kv.block_layout import Place, RestBuffer
from agentcache.kv.packed import quantise
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, TensorSpec, attention_group, make_groups, tensor_name
from tests.device_marks import cpu_memory
from tests.held_memory import held_bytes
from tests.kv.arena_cases import DIM, HEADS, Q32, Q64, peak_of_write, random
from tests.store.store_cases import named_tensors


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
    shared: bool = request.param and arenas.shares_memory()
    monkeypatch.setattr(arenas, "shares_memory", lambda: shared)
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
    if not arenas.shares_memory():
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


@pytest.mark.parametrize("at_once", [1, 2, 24])
def test_tensors_that_are_copied_are_so_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few at a time: not all of them are in memory twice."""
    arena = GroupArena(attention_group("full.0", [LayerSpec(index, 2, 32, 32) for index in range(4)], Q32))
    arena.grow(3)
    fill(arena, 1, seed=3)
    before = arena.snapshot(1, BLOCK_SIZE)
    sizes = [5 * tensor.spec.slot_bytes for tensor in arena.tensors]
    monkeypatch.setattr(arenas, "_RESIZED_AT_ONCE", sum(sizes) * at_once // len(sizes))
    evaluated: list[int] = []
    evaluate = mx.eval

    def noting(arrays: list[mx.array]) -> None:
        evaluated.append(sum(array.nbytes for array in arrays))
        evaluate(arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", noting)
        arena.grow(5)
    assert sum(evaluated) == sum(sizes) and len(sizes) == 24
    assert max(evaluated) <= sum(sizes) * at_once // len(sizes) + max(sizes)
    assert len(evaluated) <= len(sizes) // at_once + 1
    np.testing.assert_array_equal(arena.snapshot(1, BLOCK_SIZE), before)
    assert not arena.snapshot(4, BLOCK_SIZE).any()


def read_to(arena: GroupArena, block_id: int, block: np.ndarray) -> Place:
    """As a reader does it: integers straight to where they belong, the rest from where it has looked at it."""
    memory = arena.memory()
    assert memory is not None
    place, begin = memory.place(block_id), 0
    for run in place.integers:
        run[:] = block.data[begin : begin + len(run)]
        begin += len(run)
    rest = RestBuffer(place.rest_sizes)
    rest.data[:] = block[begin:]
    place.put_rest(rest)
    place.let_go()
    memory.let_go()
    return place


@pytest.mark.skipif(not arenas.shares_memory(), reason="the device has memory of its own")
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


@pytest.mark.skipif(not arenas.shares_memory(), reason="the device has memory of its own")
def test_a_place_that_was_let_go_is_written_by_steps_alone() -> None:
    arena = group_of(LayerSpec(0, HEADS, DIM, 0))
    arena.grow(256)
    size = sum(tensor.array.nbytes for tensor in arena.tensors)
    place = read_to(arena, 7, np.ones(arena.spec.bytes_per_block, np.uint8))
    for run in place.integers:
        with pytest.raises(ValueError, match="released"):
            run[0] = 1
    with pytest.raises(ValueError, match="released"):
        place.put_rest(RestBuffer(place.rest_sizes))
    assert peak_of_write(arena.layers[0].keys, scattered=False) < size / 50


def test_blocks_of_floats_and_those_on_a_device_have_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = GroupArena(GroupSpec("full.0", (TensorSpec("residual.@", "F16", (3,)),)))
    floats.grow(2)
    assert floats.memory() is None
    monkeypatch.setattr(arenas, "shares_memory", lambda: False)
    assert group_of(LayerSpec(0, HEADS, DIM, 0)).memory() is None

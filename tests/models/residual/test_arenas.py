"""The cache of an adapter's residuals: its spec, and the memory that its blocks lie in."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import BlockPool, Copy, Holds
from agentcache.kv.arena import make_arenas, take_due
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, make_groups
from agentcache.models.residual.arenas import ResidualArenas
from agentcache.models.residual.spec import ResidualLayer, ResidualShape, residual_spec

LAYERS = [LayerSpec(index, 2, 64, 64, None if index % 2 else 300) for index in range(4)]
BASE = CacheSpec("tiny", 4, make_groups(LAYERS, Quantisation()))
SHAPE = ResidualShape((ResidualLayer(1, 3, 5, normed=True), ResidualLayer(3, 0, 2, normed=True)), "float32")
SPEC = residual_spec(BASE, SHAPE)


def test_residuals_of_full_and_open_blocks_are_in_one_group() -> None:
    pairs = [
        (replace(each, holds=Holds.FULL), replace(each, name=f"{each.name}.open", window=1, holds=Holds.OPEN))
        for each in BASE.groups
    ]
    groups = tuple(group for pair in pairs for group in pair)
    spec = residual_spec(replace(BASE, groups=groups), SHAPE)
    assert spec.groups == SPEC.groups and spec.holds == ()
    assert spec.digest != SPEC.digest


def test_groups_are_bases_where_there_is_something_to_keep() -> None:
    assert [group.name for group in BASE.groups] == ["window300.0", "full.0", "window300.1", "full.1"]
    assert [(group.name, group.window, group.layers) for group in SPEC.groups] == [
        ("full.0", None, ()),
        ("full.1", None, ()),
    ]
    assert [[(t.name, t.dtype, t.shape) for t in group.tensors] for group in SPEC.groups] == [
        [
            ("residual.layers.1.key_a.@", "F16", (3,)),
            ("residual.layers.1.key_norms.@", "F16", (2, 2)),
            ("residual.layers.1.value_a.@", "F16", (5,)),
        ],
        [("residual.layers.3.value_a.@", "F16", (2,))],
    ]
    assert SPEC.bytes_per_token == 2 * (3 + 5 + 2) + 2 * 4  # ranks, and two norms of two heads
    windowed = residual_spec(BASE, ResidualShape((ResidualLayer(0, 1, 0, normed=False),), "float32"))
    assert [(group.name, group.window) for group in windowed.groups] == [("window300.0", 300)]


def test_what_a_residual_depends_on_is_in_the_digest() -> None:
    others = [
        residual_spec(replace(BASE, rope="other"), SHAPE),
        residual_spec(replace(BASE, groups=make_groups(LAYERS, Quantisation(bits=8))), SHAPE),
        residual_spec(BASE, replace(SHAPE, dtype="bfloat16")),
        residual_spec(BASE, replace(SHAPE, layers=SHAPE.layers[:1])),
    ]
    assert len({spec.digest for spec in (BASE, SPEC, *others)}) == 6


def test_other_specs_have_the_digest_that_they_had() -> None:
    assert "beside" in asdict(BASE)
    assert replace(BASE, beside="").digest == BASE.digest != replace(BASE, beside="x").digest
    assert json.dumps(asdict(BASE))  # as the digest has it


def make(*, measures: bool = False) -> tuple[ResidualArenas, list[BlockPool]]:
    pools = [BlockPool(3) for _ in SPEC.groups]
    arenas = ResidualArenas(
        SPEC, pools, lambda: None, lambda: mx.eval(arenas.saturated, take_due(arenas.tensors)), measures=measures
    )
    arenas.fit()
    return arenas, pools


def block(group: int, num_tokens: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(SPEC.groups[group].bytes_of(num_tokens) // 2)
    return values.astype(np.float16).view(np.uint8)


@pytest.mark.parametrize("num_tokens", [1, 100, 256])
def test_blocks_come_back_as_they_went_in(num_tokens: int) -> None:
    arenas, _ = make()
    for group in (0, 1):
        data = block(group, num_tokens, group)
        arenas.put_blocks(group, [2], [data])
        np.testing.assert_array_equal(arenas.snapshot(group, 2, num_tokens), data)


def test_arenas_follow_their_pools_and_keep_what_is_in_use() -> None:
    arenas, pools = make(measures=True)
    data = block(0, 256, 1)
    arenas.put_blocks(0, [1], [data])
    arenas.put_extras(0, 1, 256, {"divergence": np.full(4, 256, np.float32)})
    arenas.copy_blocks([Copy(0, 1, 0)])
    pools[0].grow(9)
    arenas.fit()
    arenas.move_blocks([Copy(0, 0, 8)])
    for slot in (0, 1, 8):
        np.testing.assert_array_equal(arenas.snapshot(0, slot, 256), data)
        np.testing.assert_array_equal(arenas.block_extras(0, slot, 256)["divergence"], np.full(4, 256))
    pools[0].shrink(2)
    arenas.fit()
    assert arenas.tensor("residual.layers.1.key_a.@")[1].capacity == 2
    np.testing.assert_array_equal(arenas.snapshot(0, 1, 256), data)


def test_blocks_go_where_their_pools_have_moved_them() -> None:
    """One after the other, before anything else is done with the arena; also what is read from a slot that is gone."""
    arenas, pools = make(measures=True)
    blocks = [block(0, 256, seed) for seed in (1, 2)]
    arenas.put_blocks(0, [1, 2], blocks)
    arenas.put_extras(0, 2, 256, {"divergence": np.full(4, 256, np.float32)})
    pools[0].note_move(2, 0)
    pools[0].note_move(1, 2)
    np.testing.assert_array_equal(arenas.snapshot(0, 0, 256), blocks[1])
    np.testing.assert_array_equal(arenas.snapshot(0, 2, 256), blocks[0])
    np.testing.assert_array_equal(arenas.block_extras(0, 0, 256)["divergence"], np.full(4, 256))
    pools[0].grow(9)
    pools[0].note_move(8, 1)  # where nothing has ever been
    pools[0].note_move(2, 1)
    pools[0].shrink(2)
    np.testing.assert_array_equal(arenas.snapshot(0, 1, 256), blocks[0])
    assert arenas.tensor("residual.layers.1.key_a.@")[1].capacity == 2


def test_measures_of_a_family_do_not_go_with_its_files() -> None:
    """They are of whoever reads its residuals."""
    arenas, _ = make(measures=True)
    arenas.put_extras(0, 1, 256, {"divergence": np.full(4, 256, np.float32)})
    assert arenas.block_extras(0, 1, 256)
    arenas.is_family = True
    assert arenas.block_extras(0, 1, 256) == {}


def test_numbers_that_float16_cannot_hold_saturate() -> None:
    arenas, _ = make()
    x = mx.array([1.0, -1e6, float("nan"), float("inf"), 65504.0])
    np.testing.assert_array_equal(np.array(arenas.saturate(x)), [1, -65504, 0, 65504, 65504])
    assert arenas.saturated.item() == 3


def test_sixteen_agents_of_an_8b_shape_take_a_25th_of_as_many_caches_in_float16() -> None:
    """Llama 3 8B's heads, 32K tokens, rank 16, and a tail of each agent's own. Real blocks of one layer; all are alike.

    A spec of one layer is what a model of 32 has 32 times, in base and in residuals.
    """
    agents, blocks, rank, heads, dim = 16, 32768 // 256, 16, 8, 128
    base = CacheSpec("llama", 32, make_groups([LayerSpec(0, heads, dim, dim)], Quantisation()))
    spec = residual_spec(base, ResidualShape((ResidualLayer(0, rank, rank, normed=False),), "bfloat16"))
    shared = make_arenas(base)[0]
    shared.grow(blocks + agents)
    own = [ResidualArenas(spec, [BlockPool(blocks + 1)], lambda: None, lambda: None) for _ in range(agents)]
    for arenas in own:
        arenas.fit()
    tensors = [*shared.tensors, *(tensor for arenas in own for tensor in arenas.tensors)]
    arrays = [tensor.array for tensor in tensors]
    float16 = agents * (blocks + 1) * 256 * 2 * heads * dim * 2
    assert sum(array.nbytes for array in arrays) <= float16 / 25

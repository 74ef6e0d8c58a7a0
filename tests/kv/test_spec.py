"""Sizes, windows, groups, and what the digest covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.api.model import CacheGroupInfo
from agentcache.blocks.allocator import least_bytes
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Holds
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import BrokenInvariant, UnsupportedModel
from agentcache.kv.group_info import bytes_for, describe_group, tokens_within
from agentcache.kv.packing import Quantisation, quantisation_for
from agentcache.kv.spec import (
    CacheSpec,
    GroupSpec,
    LayerSpec,
    RecurrentSpec,
    StateTensor,
    TensorSpec,
    attention_group,
    make_groups,
)

LAYER = LayerSpec(0, num_kv_heads=2, key_dim=128, value_dim=64)
WINDOWS = st.integers(1, 2000)


@pytest.mark.parametrize(
    ("dims", "group_size"), [((128,), 64), ((64, 128), 64), ((96,), 32), ((128, 96), 32), ((576, 0), 64)]
)
def test_the_widest_quantisation_group_that_divides(dims: tuple[int, ...], group_size: int) -> None:
    assert quantisation_for(*dims) == Quantisation(4, group_size)


def test_head_dimensions_without_a_quantisation_group() -> None:
    with pytest.raises(UnsupportedModel, match="80"):
        quantisation_for(128, 80)


def test_bytes_of_a_token() -> None:
    """192 values a head: half a byte each, and four bytes of scale and bias for every 64."""
    group = attention_group("full.0", [LAYER, replace(LAYER, index=1)], Quantisation())
    assert group.bytes_per_token == 2 * 2 * (192 // 2 + 192 // 64 * 4)
    assert group.bytes_per_block == group.bytes_per_token * BLOCK_SIZE


@given(WINDOWS, st.integers(0, 5000))
def test_the_first_block_needed_is_that_of_the_first_token_attended_to(window: int, num_tokens: int) -> None:
    group = attention_group("window.0", [replace(LAYER, window=window)], Quantisation())
    attended = [key for key in range(num_tokens + 1) if key > num_tokens - window]
    assert group.first_block_needed(num_tokens) == attended[0] // BLOCK_SIZE
    assert attention_group("full.0", [LAYER], Quantisation()).first_block_needed(num_tokens) == 0


@given(st.lists(st.sampled_from([None, 512, 1024]), min_size=1, max_size=40))
def test_groups_are_runs_of_depth_of_one_attention_kind(windows: list[int | None]) -> None:
    layers = [replace(LAYER, index=index, window=window) for index, window in enumerate(windows)]
    groups = make_groups(layers, Quantisation())
    assert sorted(layer.index for group in groups for layer in group.layers) == list(range(len(windows)))
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        assert {layer.window for layer in group.layers} == {group.window}
        assert group.layers[-1].index - group.layers[0].index < -(-len(windows) // (2 if len(windows) < 8 else 4))


def spec(**changes: object) -> CacheSpec:
    return replace(CacheSpec("llama", 8, make_groups([LAYER, replace(LAYER, index=1)], Quantisation())), **changes)


def test_totals() -> None:
    assert spec().num_layers == 2
    assert spec().bytes_per_token == sum(group.bytes_per_token for group in spec().groups)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen2"},
        {"num_attention_heads": 16},
        {"rope": "yarn"},
        {"block_size": 128},
        {"groups": make_groups([LAYER], Quantisation())},
        {"groups": make_groups([LAYER, replace(LAYER, index=1)], Quantisation(8))},
        {"groups": make_groups([LAYER, replace(LAYER, index=1)], Quantisation(4, 32))},
        {"groups": make_groups([LAYER, replace(LAYER, index=1, window=512)], Quantisation())},
        {"groups": make_groups([LAYER, replace(LAYER, nth=1)], Quantisation())},
        {"recurrent": (RecurrentSpec(0, (StateTensor((3,), "float32"),)),)},
    ],
)
def test_the_digest_covers_everything(changed: dict[str, object]) -> None:
    assert spec(**changed).digest != spec().digest
    assert spec().digest == spec().digest


def test_caches_of_earlier_versions_keep_their_addresses() -> None:
    assert spec().digest == "3f6a1fa0872c84db6686c0767e724960"


def test_a_group_by_name() -> None:
    assert spec().group("full.1").layers == (replace(LAYER, index=1),)
    with pytest.raises(KeyError):
        spec().group("full.7")


def test_what_groups_hold_is_part_of_the_address_if_not_all_blocks() -> None:
    tensors = (TensorSpec("t", "F32", (2,)),)
    plain = CacheSpec("m", 4, (GroupSpec("a", tensors), GroupSpec("b", tensors, window=1)))
    paired = replace(
        plain, groups=(replace(plain.groups[0], holds=Holds.FULL), replace(plain.groups[1], holds=Holds.OPEN))
    )
    assert (plain.holds, paired.holds) == ((), (Holds.FULL, Holds.OPEN))
    assert paired.digest != plain.digest


def test_an_open_group_needs_the_block_of_the_next_token() -> None:
    group = GroupSpec("a", (TensorSpec("t", "F32", (2,)),), window=1, holds=Holds.OPEN)
    assert [group.first_block_needed(count) for count in (0, 255, 256, 700)] == [0, 0, 1, 2]
    with pytest.raises(BrokenInvariant, match="window"):
        replace(group, window=None)


def infos(groups: Sequence[GroupSpec]) -> list[CacheGroupInfo]:
    return [describe_group(group) for group in groups]


def test_groups_are_described_by_what_they_keep() -> None:
    layers = [LayerSpec(0, 2, 64, 64), LayerSpec(1, 2, 64, 64, window=300), LayerSpec(2, 1, 96, 0)]
    kinds = [describe_group(attention_group("g", [layer], Quantisation(4, 32))).kind for layer in layers]
    assert kinds == ["full", "window", "latent"]
    state = describe_group(GroupSpec("state.0", (TensorSpec("state", "F32", (2, 8, 8), token_axis=None),)))
    assert (state.kind, state.bytes_per_token, state.bytes_per_snapshot) == ("state", 0, 512)
    full = describe_group(attention_group("full.0", [layers[0]], Quantisation(4, 32)))
    assert (full.layers, full.bytes_per_snapshot, full.bytes_per_block) == (1, 0, 256 * full.bytes_per_token)


@pytest.mark.parametrize("window", [None, 300])
def test_what_fits_is_counted_with_the_open_blocks_of_a_step(window: int | None) -> None:
    layers = [LayerSpec(index, 2, 64, 64, window if index % 2 else None) for index in range(8)]
    full = [replace(group, holds=Holds.FULL) for group in make_groups(layers, Quantisation(4, 32))]
    opened = [replace(group, name=f"{group.name}.open", window=1, holds=Holds.OPEN) for group in full]
    groups = [group for pair in zip(full, opened, strict=True) for group in pair]
    assert [info.kind for info in infos(groups[:2])] == ["full", "open"]
    assert bytes_for(infos(groups)[1], 255) == groups[1].bytes_per_block
    assert bytes_for(infos(groups)[1], 5000) == 2 * groups[1].bytes_per_block, "at rest: the first and the last one"
    for num_bytes in (least_bytes(groups), 10**7, 10**8 + 1):
        cache = PrefixCache(groups, Ledger(num_bytes))
        assert tokens_within(infos(groups), num_bytes, 2**40) == cache.allocator.max_tokens()


@pytest.mark.parametrize("window", [None, 300])
def test_what_fits_is_what_the_allocator_lets_one_sequence_have(window: int | None) -> None:
    layers = [LayerSpec(index, 2, 64, 64, window if index % 2 else None) for index in range(8)]
    groups = make_groups(layers, Quantisation(4, 32))
    for num_bytes in (least_bytes(groups), 10**7, 10**8 + 1):
        cache = PrefixCache(groups, Ledger(num_bytes))
        assert tokens_within(infos(groups), num_bytes, 2**40) == cache.allocator.max_tokens()
    assert tokens_within(infos(groups), 10**8, 5000) == 5000


def test_a_state_is_counted_once_however_long_the_sequence() -> None:
    state = describe_group(GroupSpec("state.0", (TensorSpec("state", "F32", (1000,), token_axis=None),)))
    assert bytes_for(state, 1) == bytes_for(state, 100_000) == 4000
    assert tokens_within([state], 3999, 5000) == 0 and tokens_within([state], 4000, 5000) == 5000

"""Which layer is kept in how many bits: its name, its groups, its addresses, its bytes in arenas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.kv.arena import GroupArena
from agentcache.kv.group_info import describe_group
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import BITS, BY_CHANNEL, LayerBits, LayerPacking, Packing, Plain, Precision, Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, attention_group, make_groups
from agentcache.kv.step_cache import Writes

FOUR, EIGHT = BY_CHANNEL, LayerBits(8, 8)
Q4, Q8, F16, BF16 = Quantisation(4), Quantisation(8), Plain("F16"), Plain("BF16")
LAYERS = [LayerSpec(index, 2, 64, 64, 512 if index % 2 else None) for index in range(9)]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((), "none"),
        ((FOUR,) * 3, "4"),
        ((LayerBits(8, 4),) * 2, "k8v4"),
        ((EIGHT, EIGHT, FOUR, FOUR, FOUR, FOUR, EIGHT), "4 (layers 0-1, 6 in 8)"),
        ((FOUR, FOUR, FOUR, EIGHT, LayerBits(8, 4), FOUR), "4 (layers 4 in k8v4; 3 in 8)"),
    ],
)
def test_how_people_read_it(layers: tuple[LayerBits, ...], name: str) -> None:
    assert str(Precision(layers)) == name


def test_labels_say_it_in_words() -> None:
    told = {name: bits.words for name, bits in BITS.items()}
    assert told == {
        "2.5": "3 bits, keys by channel, values in 2",
        "3": "3 bits, keys by channel",
        "4": "4 bits, keys by channel",
        "4t": "4 bits per token",
        "k8v4": "8 bits, values in 4",
        "8": "8 bits",
        "16": "16 bits",
    }
    mixed = Precision((BY_CHANNEL, BY_CHANNEL, BY_CHANNEL, EIGHT, LayerBits(8, 4)))
    assert mixed.words == "4 bits, keys by channel (layers 4 in 8 bits, values in 4; 3 in 8 bits)"
    assert Precision(()).words == "none"


def test_names_to_ask_by() -> None:
    assert {name: (bits.keys, bits.values, bits.by_channel) for name, bits in BITS.items()} == {
        "2.5": (3, 2, True),
        "3": (3, 3, True),
        "4": (4, 4, True),
        "4t": (4, 4, False),
        "k8v4": (8, 4, False),
        "8": (8, 8, False),
        "16": (16, 16, False),
    }


def test_addresses_of_caches_in_4_and_8_bits_are_what_they_were() -> None:
    """Before there were others: blocks that are on disk must be found again."""
    digests = [CacheSpec("tiny", 4, make_groups(LAYERS, Quantisation(bits=bits)), "rope").digest for bits in (4, 8)]
    assert digests == ["ac7e824f0d1ed26226e9a134d80b2015", "1993697e16537dc384b0683cc509a227"]


def packings(*layers: tuple[Packing, Packing]) -> list[LayerPacking]:
    return [LayerPacking(*each) for each in layers]


def test_layers_in_other_bits_are_groups_of_their_own() -> None:
    full = [LayerSpec(index, 2, 64, 64) for index in range(8)]
    mixed = packings((Q8, Q4), *[(Q4, Q4)] * 6, (F16, F16))
    groups = {group.name: [layer.index for layer in group.layers] for group in make_groups(full, mixed)}
    assert groups == {
        "full.0.k8v4": [0],
        "full.0": [1],
        "full.1": [2, 3],
        "full.2": [4, 5],
        "full.3": [6],
        "full.3.16": [7],
    }


def test_every_choice_has_addresses_of_its_own() -> None:
    full = LAYERS[:4]
    choices = [(Q4, Q4), (Q8, Q4), (Q4, Q8), (Q8, Q8), (F16, F16), (BF16, BF16)]
    specs = [CacheSpec("tiny", 4, make_groups(full, packings(*[each] * 4))) for each in choices]
    for raised in range(4):
        layers = [(Q8, Q8) if index == raised else (Q4, Q4) for index in range(4)]
        specs.append(CacheSpec("tiny", 4, make_groups(full, packings(*layers))))
    assert len({spec.digest for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    ("keys", "values", "bits", "num_bytes"),
    [
        (Q4, Q4, 4, 36 + 36),
        (Q8, Q4, 6, 68 + 36),
        (Q8, Q8, 8, 68 + 68),
        (F16, F16, 16, 128 + 128),
        (BF16, Q4, 10, 128 + 36),
    ],
)
def test_bytes_of_a_token(keys: Packing, values: Packing, bits: float, num_bytes: int) -> None:
    """Of two heads of 64 values: what each takes, and four bytes of scale and bias where it is quantised."""
    group = attention_group("full.0", [LayerSpec(0, 2, 64, 64)], keys, values)
    assert group.bytes_per_token == 2 * num_bytes
    assert CacheSpec("tiny", 4, (group,)).bits == bits
    told = describe_group(group).packing
    assert told == (str(keys) if keys == values else f"{keys}, values {values}")


def test_a_latent_has_the_bits_of_keys() -> None:
    group = attention_group("full.0", [LayerSpec(0, 1, 576, 0)], Q8, Q4)
    assert [tensor.own_bytes for tensor in group.tensors] == [576, 18, 18]


def test_bits_are_the_mean_over_values() -> None:
    layers = [LayerSpec(0, 2, 64, 64), LayerSpec(1, 6, 64, 64)]
    assert CacheSpec("tiny", 4, make_groups(layers, packings((F16, F16), (Q4, Q4)))).bits == 7


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_what_is_not_quantised_comes_back_as_it_was(dtype: mx.Dtype) -> None:
    x = (mx.random.normal((3, 5, 80), key=mx.random.key(0)) * 50).astype(dtype)
    plain = F16 if dtype == mx.float16 else BF16
    assert mx.array_equal(dequantise(quantise(x, plain), plain, dtype), x).item()


@pytest.mark.parametrize("plain", [F16, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_nothing_in_a_slot_is_infinite(plain: Plain, value: float) -> None:
    x = mx.full((2, 64), value)
    assert mx.isfinite(dequantise(quantise(x, plain), plain, mx.float32)).all().item()


@pytest.mark.parametrize(("keys", "values"), [(Q8, Q4), (F16, F16), (BF16, BF16), (BF16, Q4), (Q4, F16)])
@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE, 37])
def test_a_block_goes_to_bytes_and_back(keys: Packing, values: Packing, num_tokens: int) -> None:
    layers = [LayerSpec(0, 3, 64, 128), LayerSpec(1, 1, 128, 64)]
    group = attention_group("full.0", layers, keys, values)
    arena, other = GroupArena(group), GroupArena(group)
    arena.grow(3)
    other.grow(2)
    for number, layer in enumerate(arena.layers):
        spec = layer.layer
        new = [
            mx.random.normal((1, spec.num_kv_heads, num_tokens, dim), key=mx.random.key(10 * number + side))
            for side, dim in enumerate((spec.key_dim, spec.value_dim))
        ]
        Writes([BlockTable([2])], [0], num_tokens).put(layer, *new)
    block = arena.snapshot(2, num_tokens)
    assert block.nbytes == group.bytes_of(num_tokens)
    other.put([1], [block])
    for one, two in zip(arena.layers, other.layers, strict=True):
        for (_, side), (_, same) in zip(one.sides, two.sides, strict=True):
            held, there = (
                dequantise(each.gather(mx.array([slot])), each.quantisation, mx.float32)[0, :, :num_tokens]
                for each, slot in ((side, 2), (same, 1))
            )
            assert mx.array_equal(held, there).item() and mx.abs(held).max().item() > 1

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from agentcache.blocks.keys import Namespace
from agentcache.blocks.radix_tree import pack
from agentcache.errors import BlockRejected, BrokenInvariant, StoreError
from agentcache.kv.block_layout import ALIGNMENT
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import CacheSpec, LayerSpec, attention_group
from agentcache.store import block_file
from agentcache.store.block_file import (
    BlockHeader,
    decode_block,
    make_header,
    max_encoded_size,
)
from tests.examples import examples
from tests.serving.block_damage import sign
from tests.store.store_cases import ROOT, SPEC, encode_block, make_block, make_data, quantised, tensor_views, tensors_of

BLOCK = make_block((5, 6, 7, 151_000, 5), position=3)
FILE = encode_block(SPEC, BLOCK.header, BLOCK.data)
HEADER_END = 8 + int.from_bytes(FILE[:8], "little")
HEADER_JSON = json.loads(FILE[8:HEADER_END])
REGIONS = {"length": (0, 8), "header": (8, HEADER_END)} | {
    name: (HEADER_END + entry["data_offsets"][0], HEADER_END + entry["data_offsets"][1])
    for name, entry in HEADER_JSON.items()
    if name != "__metadata__"
}


def decoded(spec: CacheSpec, header: BlockHeader, file: bytes) -> dict[str, Any]:
    return tensor_views(spec, header, decode_block(spec, header, file).data)


def test_a_block_comes_back_as_it_was_written() -> None:
    tensors = decoded(SPEC, BLOCK.header, FILE)
    assert tensors.keys() == tensors_of(BLOCK).keys()
    for name, array in tensors_of(BLOCK).items():
        np.testing.assert_array_equal(tensors[name], array)
        assert tensors[name].dtype == array.dtype


def test_tensors_are_aligned_read_only_views_of_the_bytes() -> None:
    for tensor in decoded(SPEC, BLOCK.header, FILE).values():
        assert not tensor.flags.writeable and not tensor.flags.owndata and tensor.flags.aligned


def test_any_safetensors_reader_opens_the_file(tmp_path: Any) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(FILE)
    loaded = load(FILE)
    for name, array in tensors_of(BLOCK).items():
        np.testing.assert_array_equal(loaded[name], array)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["block_key"] == BLOCK.header.block_key
    assert metadata["parent"] == ROOT
    assert (metadata["total_tokens"], metadata["num_blocks"]) == (str(3 * 256 + 5), "4")
    assert (metadata["model_type"], metadata["num_layers"], metadata["num_attention_heads"]) == ("tiny", "2", "4")
    assert (metadata["num_kv_heads"], metadata["head_dim"]) == ("2", "64")
    assert (metadata["quantization"], metadata["producer"]) == ("affine-4bit-g64", "base")
    assert metadata["format_version"] == "2"
    assert set(loaded) == {
        f"cache.layers.0.{cache}.3.{part}"
        for cache in ("key_cache", "value_cache")
        for part in ("data", "scales", "biases")
    }


def test_a_full_block_takes_at_most_29_percent_of_float16() -> None:
    group = attention_group("full.0", [LayerSpec(layer, 2, 128, 128) for layer in range(2)], Quantisation())
    spec = CacheSpec("qwen3", 16, (group,))
    tokens = np.random.default_rng(1).integers(0, 152_000, 256).tolist()
    header = make_header(ROOT, "full.0", 120, tokens)
    data = encode_block(spec, header, make_data(spec, header))
    assert len(data) <= 0.29 * (2 * 2 * 2 * 256 * 128 * 2)


def test_no_file_is_longer_than_its_bound() -> None:
    assert len(FILE) <= max_encoded_size(SPEC, BLOCK.header)


def test_a_layer_without_values_has_a_key_cache_only() -> None:
    spec = CacheSpec("deepseek_v2", 16, (attention_group("full.0", [LayerSpec(4, 1, 576, 0)], Quantisation()),))
    header = make_header(ROOT, "full.0", 0, (1, 2))
    tensors = decoded(spec, header, encode_block(spec, header, make_data(spec, header)))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "cache.layers.4.key_cache.0.data": (1, 2, 72),
        "cache.layers.4.key_cache.0.scales": (1, 2, 9),
        "cache.layers.4.key_cache.0.biases": (1, 2, 9),
    }


def test_groups_of_32_and_odd_lengths_round_trip() -> None:
    spec = CacheSpec("tiny", 3, (attention_group("g", [LayerSpec(0, 3, 96, 32)], Quantisation(4, 32)),))
    header = make_header(ROOT, "g", 0, (9,))
    tensors = decoded(spec, header, encode_block(spec, header, make_data(spec, header)))
    assert tensors["cache.layers.0.key_cache.0.scales"].shape == (3, 1, 3)


@given(st.integers(0, len(FILE) - 1))
def test_a_truncated_file_is_rejected(length: int) -> None:
    with pytest.raises(BlockRejected):
        decode_block(SPEC, BLOCK.header, FILE[:length])


@pytest.mark.parametrize("region", REGIONS)
def test_every_flipped_bit_is_found(region: str) -> None:
    begin, end = REGIONS[region]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.integers(begin, end - 1), st.integers(0, 7))
    def check(offset: int, bit: int) -> None:
        damaged = bytearray(FILE)
        damaged[offset] ^= 1 << bit
        with pytest.raises(BlockRejected):
            decode_block(SPEC, BLOCK.header, bytes(damaged))

    check()


def test_every_single_bit_of_the_header_matters() -> None:
    for offset in range(HEADER_END):
        for bit in range(8):
            damaged = bytearray(FILE)
            damaged[offset] ^= 1 << bit
            with pytest.raises(BlockRejected):
                decode_block(SPEC, BLOCK.header, bytes(damaged))


def test_padding_is_part_of_what_is_checked() -> None:
    blocks = [make_block(tuple(range(count))) for count in range(1, 9)]
    padded = [block for block in blocks if _padding_of(encode_block(SPEC, block.header, block.data))]
    assert padded
    for block in padded:
        damaged = bytearray(encode_block(SPEC, block.header, block.data))
        damaged[7 + int.from_bytes(damaged[:8], "little")] = ord("\t")
        with pytest.raises(BlockRejected, match="not the one that was written"):
            decode_block(SPEC, block.header, bytes(damaged))


def test_tensors_begin_where_copies_are_fast() -> None:
    for num_tokens in (1, 5, 256):
        block = make_block(tuple(range(num_tokens)))
        file = encode_block(SPEC, block.header, block.data)
        assert (8 + int.from_bytes(file[:8], "little")) % ALIGNMENT == 0


def test_files_of_before_with_less_padding_are_read(tmp_path: Path) -> None:
    """Their tensors begin on a multiple of 8; nothing but that and 64 is right."""
    path, extras = tmp_path / "block.safetensors", {"note": np.arange(3, dtype=np.float32)}
    for file in FILE, encode_block(SPEC, BLOCK.header, BLOCK.data, extras):
        end = 8 + int.from_bytes(file[:8], "little")
        text = file[8:end].rstrip(b" ")
        for padding in range(-len(text) % 8, 200, 8):
            sign(path, text.ljust(len(text) + padding), file[end:])
            if padding < 8 or (8 + len(text) + padding == end):
                read = decode_block(SPEC, BLOCK.header, path.read_bytes())
                np.testing.assert_array_equal(read.data, BLOCK.data)
                assert read.extras.keys() == (extras.keys() if file is not FILE else set())
            else:
                with pytest.raises(BlockRejected):
                    decode_block(SPEC, BLOCK.header, path.read_bytes())


def _padding_of(file: bytes) -> int:
    header = file[8 : 8 + int.from_bytes(file[:8], "little")]
    return len(header) - len(header.rstrip(b" "))


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_other_bytes_are_rejected(data: bytes, with_length: bool) -> None:
    prefix = len(data).to_bytes(8, "little") if with_length else b""
    with pytest.raises(BlockRejected):
        decode_block(SPEC, BLOCK.header, prefix + data)


@pytest.mark.parametrize("extra", [b"\0", b"x" * 100])
def test_extra_bytes_are_rejected(extra: bytes) -> None:
    with pytest.raises(BlockRejected, match="bytes"):
        decode_block(SPEC, BLOCK.header, FILE + extra)


@pytest.mark.parametrize(
    "other",
    [
        make_block((5, 6, 7, 151_000, 6), position=3),
        make_block((5, 6, 7, 151_000, 5), position=4),
        make_block((5, 6, 7, 151_000, 5), position=3, group="full.1"),
        make_block((5, 6, 7, 151_000, 5), position=3, parent=Namespace("another model", SPEC.digest).root),
        make_block((5, 6, 7, 151_000, 5), position=3, parent=Namespace("model", SPEC.digest, salt="s").root),
        make_block((5, 6, 7, 151_000), position=3),
        make_block((5, 6, 7, 151_000, 5), position=3, producer="a@3"),
    ],
    ids=["tokens", "position", "group", "model", "salt", "length", "producer"],
)
def test_another_block_is_rejected_under_this_name(other: Any) -> None:
    with pytest.raises(BlockRejected):
        decode_block(SPEC, BLOCK.header, encode_block(SPEC, other.header, other.data))


@pytest.mark.parametrize(
    ("field", "value"),
    [("producer", "adapter-1"), ("parent", "0" * 40), ("block_key", "f" * 40), ("packed", pack((5, 6, 7, 151_000, 9)))],
    ids=["producer", "parent", "block key", "token ids"],
)
def test_a_reader_that_expects_something_else_rejects(
    field: str, value: object, request: pytest.FixtureRequest
) -> None:
    expected = replace(BLOCK.header, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(BlockRejected, match=request.node.callspec.id.replace(" ", ".")):
        decode_block(SPEC, expected, FILE)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, model_type="other"),
        replace(SPEC, num_attention_heads=8),
        quantised(SPEC, Quantisation(8)),
        quantised(SPEC, Quantisation(4, 32)),
        replace(
            SPEC, groups=(attention_group("full.0", [LayerSpec(0, 4, 32, 32)], Quantisation(4, 32)), SPEC.groups[1])
        ),
    ],
    ids=["model_type", "heads", "bits", "group_size", "shape"],
)
def test_another_model_or_quantisation_is_rejected(spec: CacheSpec) -> None:
    with pytest.raises(BlockRejected):
        decode_block(spec, BLOCK.header, FILE)


def test_an_older_format_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "FORMAT_VERSION", 1)
    old = encode_block(SPEC, BLOCK.header, BLOCK.data)
    monkeypatch.undo()
    with pytest.raises(BlockRejected, match="format_version is '1', expected '2'"):
        decode_block(SPEC, BLOCK.header, old)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["scales", "biases"])
def test_values_that_are_not_finite_are_neither_written_nor_read(
    part: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = BLOCK.data.copy()
    tensor_views(SPEC, BLOCK.header, data)[f"cache.layers.0.value_cache.3.{part}"][1, 4, 0] = value
    with pytest.raises(StoreError, match="not finite"):
        encode_block(SPEC, BLOCK.header, data)
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "_all_finite", lambda array: True)
        poisoned = encode_block(SPEC, BLOCK.header, data)
    with pytest.raises(BlockRejected, match="not finite"):
        decode_block(SPEC, BLOCK.header, poisoned)


@pytest.mark.parametrize(("unsigned", "floats"), [(np.uint16, np.float16), (np.uint32, np.float32)])
def test_floats_are_told_from_infinity_and_nan_by_their_bits(unsigned: type, floats: type) -> None:
    edges = np.array([0, 1, *floats([65504, np.inf, -65504, -np.inf, np.nan, -0.0]).view(unsigned)], unsigned)
    bits = np.concatenate([edges - 1, edges, edges + 1])
    for value in bits.view(floats):
        beside = np.array([-1, value, 1], floats)
        assert block_file._all_finite(beside) == np.isfinite(beside).all(), beside.view(unsigned)
    assert block_file._all_finite(np.empty(0, floats))


@pytest.mark.parametrize(
    "data", [BLOCK.data[:-1], np.append(BLOCK.data, 0), BLOCK.data.view(np.uint32), BLOCK.data[None]]
)
def test_bytes_that_are_not_the_blocks_are_not_written(data: np.ndarray[Any, Any]) -> None:
    with pytest.raises(StoreError):
        encode_block(SPEC, BLOCK.header, data)


@pytest.mark.parametrize(("position", "tokens"), [(-1, (1,)), (0, ()), (0, tuple(range(257)))])
def test_impossible_headers_cannot_be_made(position: int, tokens: tuple[int, ...]) -> None:
    with pytest.raises(BrokenInvariant):
        make_header(ROOT, "full.0", position, tokens)


@pytest.mark.slow
def test_token_ids_that_unpack_to_gigabytes_are_rejected_cheaply() -> None:
    import base64
    import zlib

    bomb = base64.b64encode(zlib.compress(bytes(200_000_000), 9)).decode()
    text = FILE[8:HEADER_END].replace(HEADER_JSON["__metadata__"]["token_ids"].encode(), bomb.encode())
    with pytest.raises(BlockRejected):
        decode_block(SPEC, BLOCK.header, len(text).to_bytes(8, "little") + text + FILE[HEADER_END:])

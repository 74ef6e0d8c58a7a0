"""What a block's file may say of the block beside its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.errors import BlockMissing, BlockRejected, StoreError
from agentcache.store.block_file import Extras, decode_block, decode_extras, encode_extras
from agentcache.store.store import BlockWrite
from agentcache.store.verify import verify_folder
from tests.serving.block_damage import header_of, sign
from tests.store.damage import DAMAGE, block_file
from tests.store.store_cases import SPEC, encode_block, encoded_size, make_block, open_store

EXTRAS: Extras = {
    "energy.keys": np.array([0.5, 0.25], np.float32),
    "energy.values": np.array([[1.5], [2.0]], np.float16),
    "rotation": 'hadamard "64" ä "checksum":"0"',
    "count": np.array(7, np.uint32),
}
PLAIN = make_block((5, 6, 7), position=3)
BLOCK = BlockWrite(PLAIN.header, PLAIN.data, EXTRAS)
FILE = encode_block(SPEC, BLOCK.header, BLOCK.data, EXTRAS)


def assert_same(extras: Extras, expected: Extras) -> None:
    assert extras.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert extras[name] == value
        else:
            np.testing.assert_array_equal(extras[name], value)
            assert extras[name].dtype == value.dtype  # type: ignore[union-attr]


def test_extras_come_back_with_the_block() -> None:
    read = decode_block(SPEC, BLOCK.header, FILE)
    assert_same(read.extras, EXTRAS)
    plain = encode_block(SPEC, PLAIN.header, PLAIN.data)
    np.testing.assert_array_equal(read.data, decode_block(SPEC, PLAIN.header, plain).data)
    assert not decode_block(SPEC, PLAIN.header, plain).extras


def test_a_block_without_any_says_nothing_of_them() -> None:
    assert encode_block(SPEC, PLAIN.header, PLAIN.data, {}) == encode_block(SPEC, PLAIN.header, PLAIN.data)
    assert b"extras" not in encode_block(SPEC, PLAIN.header, PLAIN.data)


def test_the_size_is_known_before_encoding() -> None:
    assert encoded_size(SPEC, BLOCK) == len(FILE) > encoded_size(SPEC, PLAIN)


def test_every_single_bit_of_the_header_matters() -> None:
    head_size = 8 + int.from_bytes(FILE[:8], "little")
    for offset in range(head_size):
        damaged = bytearray(FILE)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(BlockRejected):
            decode_block(SPEC, BLOCK.header, bytes(damaged))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_store_keeps_them_and_finds_damage(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with open_store(tmp_path) as store:
        assert store.write_blocks([BLOCK]) == len(FILE) == store.usage.total
        assert_same(store.blocks.read(BLOCK.header).extras, EXTRAS)
    assert verify_folder(tmp_path).problems == ()
    damage(block_file(tmp_path, BLOCK))
    assert len(verify_folder(tmp_path).problems) == 1
    with open_store(tmp_path, disk_budget=1 << 50) as store:
        with pytest.raises((BlockRejected, BlockMissing)):  # what is no file is found at the start
            store.blocks.read(BLOCK.header)
        assert store.usage.quarantine.count == 1


@pytest.mark.parametrize(
    "extras",
    [
        {"": "x"},
        {"A": "x"},
        {"a/b": "x"},
        {"a" * 65: "x"},
        {"a": np.array([np.nan], np.float32)},
        {"a": np.array([np.inf], np.float16)},
        {"a": np.array([1.0], np.float64)},
        {"a": np.array(["x"], object)},
        {"a": "x" * (1 << 16)},
        {"a": np.zeros(1 << 14, np.float32)},
    ],
)
def test_extras_that_cannot_be_written(extras: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        encode_block(SPEC, PLAIN.header, PLAIN.data, extras)


TENSOR = {"dtype": "F32", "shape": [2], "data": "AAAAAAAAAAA="}
UNREADABLE = {
    "nothing": "{}",
    "a list": "[]",
    "no JSON": "{",
    "another spacing": '{"a": "b"}',
    "another order": '{"b":"x","a":"y"}',
    "twice": '{"a":"x","a":"y"}',
    "a bad name": '{"A":"x"}',
    "a number": '{"a":1}',
    "no data": json.dumps({"a": {"dtype": "F32", "shape": [2]}}, separators=(",", ":")),
    "another dtype": json.dumps({"a": {**TENSOR, "dtype": "F64"}}, sort_keys=True, separators=(",", ":")),
    "another shape": json.dumps({"a": {**TENSOR, "shape": [3]}}, sort_keys=True, separators=(",", ":")),
    "an open shape": json.dumps({"a": {**TENSOR, "shape": [-1]}}, sort_keys=True, separators=(",", ":")),
    "bad base64": json.dumps({"a": {**TENSOR, "data": "AA=A"}}, sort_keys=True, separators=(",", ":")),
    "more": json.dumps({"a": {**TENSOR, "more": 1}}, sort_keys=True, separators=(",", ":")),
    "not finite": json.dumps({"a": {**TENSOR, "data": "AADAfwAAwH8="}}, sort_keys=True, separators=(",", ":")),
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_texts_that_nobody_has_written_are_rejected(text: str, tmp_path: Path) -> None:
    """Also under a checksum that is right."""
    with pytest.raises(BlockRejected):
        decode_extras(text)
    path = tmp_path / "block"
    path.write_bytes(FILE)
    head, tensors = header_of(path)
    ours = json.dumps(encode_extras(EXTRAS)).encode()
    assert ours in head
    changed = head.replace(ours, json.dumps(text).encode())
    sign(path, changed.rstrip(b" ") + b" " * (-len(changed.rstrip(b" ")) % 8), tensors)
    with pytest.raises(BlockRejected):
        decode_block(SPEC, BLOCK.header, path.read_bytes())
